"""Blocks and their damped inverses, made with a ladder: more damping where they are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.layers import Layer
from natgrad.operators import Layout, Operator, pack_operator, unpack_operator
from natgrad.pure import leaves
from natgrad.typed_torch import list_numbers

Prepare = Callable[[Operator, float, float], dict[str, Tensor]]


FARTHEST = 1e12
"""Length of a block's step at which a metric means nothing: squares of more overflow in single precision."""


@dataclass(frozen=True)
class Inverted:
    """A block as it was inverted, not written yet.

    Attributes:
        operator: The damped inverse; None where the rule needs none.
        packed: The same as tensors.
        level: Its damping.
        prepared: What the rule's `prepare` made of the block's metric.
    """

    operator: Operator | None
    packed: dict[str, Any]
    level: float
    prepared: dict[str, Tensor]


def is_finite(inverse: Operator) -> bool:
    """True if every number that an inverse keeps is finite."""
    return all(bool(torch.isfinite(t.sum())) for t in leaves(pack_operator(inverse)))


def robust_inverse(operator: Operator, damping: float) -> Operator | None:
    """(G + damping I)^-1, or with more damping where that is not finite, up to 1e4 times.

    Args:
        operator: G, one block of a metric.
        damping: In units of G.

    Returns:
        The inverse; None if nothing helps.

    Raises:
        TypeError: If G has no closed-form inverse, or one that cannot be kept (`Operator.pack`).
    """
    for raise_by in (1.0, 1e2, 1e4):
        try:
            inverse = operator.inverse(damping * raise_by)
        except RuntimeError:  # torch.linalg.LinAlgError is one
            continue
        if inverse is None:
            raise TypeError(f"the structure gave {operator!r}, whose inverse({damping:g}) is None: a block needs one")
        if is_finite(inverse):
            return inverse
    return None


def least_damping(norms: Sequence[Tensor]) -> float:
    """lambda with |(G + lambda I)^-1 g| <= `FARTHEST`, for the gradients g of a block's parameters.

    Where each softmax is saturated at a wrong class the Fisher information is 1e-37 and the gradient is not small: the
    step has no end then, and with this damping it goes along the gradient.

    Args:
        norms: |g| of each parameter, scalar tensors. One that is not finite counts as 0: its step is left out.
    """
    sizes = list_numbers(torch.stack([norm.double() for norm in norms])) if norms else []
    return math.hypot(*(size for size in sizes if math.isfinite(size))) / FARTHEST


def invert_block(
    operator: Operator, level: float, inverts: bool, prepare: Prepare | None, positions: float
) -> Inverted | None:
    """A block's damped inverse, and what a rule prepares; None where numbers fail."""
    inverse = robust_inverse(operator, level) if inverts else None
    if inverts and inverse is None:
        return None
    try:
        prepared = {} if prepare is None else prepare(operator, level, positions)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        return None
    if not all(bool(torch.isfinite(t.sum())) for t in prepared.values()):
        return None
    tensors = {} if inverse is None else pack_operator(inverse)
    return Inverted(None if inverse is None else unpack_operator(tensors), tensors, level, prepared)


@dataclass
class Block:
    """One layer, or one parameter without a layer: its matrix, and its damped inverse once there is one."""

    layout: Layout
    layer: Layer | None
    inverse: Operator | None = None


def give_back(layout: Layout, solved: Tensor, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was solved, by name, for those that have a part here."""
    return {name: part for name, part in layout.split(solved).items() if name in names}


def single(name: str, p: Tensor) -> Layout:
    """The layout of a parameter without a layer."""
    return Layout(name, None, 1, 1, p.numel(), tuple(p.shape))
