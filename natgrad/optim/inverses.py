"""Damped inverses, made with a ladder: more damping where they are not finite."""

from __future__ import annotations

import torch

from natgrad.operators import Operator, pack_operator
from natgrad.pure import leaves


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
