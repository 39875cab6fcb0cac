"""Checks of arguments at the door, and settings by keyword."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor


def check_integer(name: str, value: Any, least: int = 1, *, of: str = "", hint: str = "") -> int:
    """The value as a Python integer of at least `least`; NumPy's integers are taken too, booleans are not."""
    number = operator.index(value) if is_integer(value) else least - 1
    if number < least:
        raise ValueError(f"{name} is {value!r}, expected {f'{of}, ' if of else ''}an integer >= {least}{hint}")
    return number


def check_positive(name: str, value: Any, *, hint: str = "") -> None:
    """Check that a value is a finite number > 0."""
    if not is_real(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a finite number > 0{hint}")


def check_number(name: str, value: Any, least: float = 0.0, most: float = math.inf, *, hint: str = "") -> None:
    """Check that a value is a number within bounds, which may be infinite but never NaN."""
    if not is_real(value) or not least <= value <= most:
        wanted = f"a number in [{least:g}, {most:g}]" if most < math.inf else f"a number >= {least:g}"
        raise ValueError(f"{name} is {value!r}, expected {wanted}{hint}")


def check_range(name: str, value: Any, interval: str, *, hint: str = "") -> None:
    """Check that a value is a number in an interval, such as "(0, 1]" with 1 and without 0."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    inside = is_real(value) and low <= value <= high
    if not inside or (interval[0] == "(" and value == low) or (interval[-1] == ")" and value == high):
        raise ValueError(f"{name} is {value!r}, expected a number in {interval}{hint}")


def check_tensor(name: str, value: Any) -> None:
    """TypeError for what is no tensor, as a NumPy array or a table is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}, expected a tensor: torch.as_tensor({name})")


def check_share(name: str, value: Any) -> None:
    """Check that a value is a number in [0, 1), such as the weight of the past."""
    check_range(name, value, "[0, 1)")


def check_precision(name: str, dtype: torch.dtype, hint: str) -> None:
    """ValueError for half precision, which has no linear algebra of its own."""
    if dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"{name} is {dtype}, expected double precision, or single: {hint}")


def check_positions(name: str, value: Any, size: int) -> tuple[int, ...]:
    """Different positions in a vector, as a tuple; ValueError for anything else.

    Args:
        name: The argument's name in the error message.
        value: What came.
        size: Of the vector.
    """
    positions = tuple(value) if isinstance(value, Sequence) else ()
    different = all(map(is_integer, positions)) and len(set(positions)) == len(positions)
    if not positions or not different or not 0 <= min(positions) <= max(positions) < size:
        raise ValueError(f"{name} is {value!r}, expected a list of different positions from 0 to {size - 1}")
    return positions


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Check that a value is one of a few."""
    if not isinstance(value, (str, int, float, type(None))) or value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def is_real(value: Any) -> bool:
    """True for a real number, NumPy's and a tensor's without dimensions too; not for a boolean."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """True for an integer, NumPy's and an integer tensor's with one number too; not for a boolean."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


# Keywords that belong to groups of settings: `TRPO(batch=512)` means `TRPO(rollouts=Rollouts(batch=512))`


@dataclass(frozen=True)
class Group:
    """A group of settings that a constructor takes whole or one by one."""

    default: Any
    prefix: str = ""

    def read(self, keyword: str, choices: Mapping[str, Any]) -> Any:
        """The group with all that was said of it."""
        given = choices.get(keyword, self.default)
        kind = cast("type[Any]", type(self.default))
        if not isinstance(given, kind):
            hint = "; did you forget the parentheses?" if given is kind else ""
            raise TypeError(f"{keyword} is {given!r}, expected {kind.__name__}(...){hint}")
        return replace(given, **{name: choices[key] for key, name in self.names().items() if key in choices})

    def names(self) -> dict[str, str]:
        """keyword -> field."""
        return {f"{self.prefix}{setting.name}": setting.name for setting in fields(self.default)}


def read_groups(
    caller: str, groups: Mapping[str, Group], choices: Mapping[str, Any], own: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Every group as the keywords say, by its keyword."""
    known = [*own, *groups, *(key for group in groups.values() for key in group.names())]
    for name in choices:
        if name not in known or name in own:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"its keywords are {', '.join(known)}"
            raise TypeError(f"{caller} takes no {name!r}: {hint}")
    return {keyword: group.read(keyword, choices) for keyword, group in groups.items()}
