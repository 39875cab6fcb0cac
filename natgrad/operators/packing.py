"""Operators as plain tensors and values and back, so that a checkpoint of them is read without trusting its code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from natgrad.operators.base import PACKABLE, Operator
from natgrad.operators.facts import Facts

Packed = dict[str, Any]
PLAIN = (Tensor, bool, int, float, str, type(None))


def pack_operator(operator: Operator) -> Packed:
    """An operator as a dict of tensors, numbers, strings, lists and such dicts.

    Args:
        operator: Of a class that says what it is made of (`Operator.state`, or its own `pack` and `unpack`).

    Returns:
        What `torch.load(weights_only=True)` reads, and `unpack_operator` makes the operator of. It shares the tensors.

    Raises:
        TypeError: If the class does not say it.
    """
    facts = {} if operator.facts == Facts() else {"facts": dict(vars(operator.facts))}
    return {"kind": operator.packed_as, **{name: pack_value(v) for name, v in operator.pack().items()}, **facts}


def pack_value(value: Any) -> Any:
    """One of the things that an operator is made of; TypeError for what is neither plain nor an operator."""
    if isinstance(value, Operator):
        return pack_operator(value)
    if isinstance(value, (list, tuple)):
        return [pack_value(v) for v in cast("Sequence[Any]", value)]
    if isinstance(value, PLAIN):
        return value
    raise TypeError(f"{value!r} cannot be kept in a checkpoint: expected tensors, numbers, strings, lists or operators")


def unpack_operator(packed: Packed) -> Operator:
    """The operator that `pack_operator` took apart.

    Args:
        packed: The dict. Its "kind" names the class, which must have been defined in this process.

    Returns:
        An operator that shares the tensors.

    Raises:
        ValueError: If no operator class of that name is known.
    """
    kind = PACKABLE.get(packed["kind"])
    if kind is None:
        raise ValueError(
            f"no operator class {packed['kind']!r} is known, expected one of {sorted(PACKABLE)}: import the module "
            "that defines it before you load"
        )
    parts = {name: unpack_value(value) for name, value in packed.items() if name not in ("kind", "facts")}
    operator = kind.unpack(parts)
    return operator.declare(**packed["facts"]) if "facts" in packed else operator


def unpack_value(value: Any) -> Any:
    """What `pack_value` was given, lists for tuples."""
    if isinstance(value, dict):
        return unpack_operator(cast("dict[str, Any]", value))
    return [unpack_value(v) for v in cast("list[Any]", value)] if isinstance(value, list) else value
