"""The natural gradient as a function: (G + damping I)^-1 g."""

from __future__ import annotations

from torch import Tensor

from natgrad.damping import Damping
from natgrad.operators import Operator
from natgrad.solvers import Auto, Solution, Solver


def natural_gradient(
    operator: Operator, gradient: Tensor, *, solver: Solver | None = None, damping: float | Damping = 0.0
) -> Solution:
    """x = (G + damping I)^-1 g; `.value` is x (n,), with residual, steps and status beside it.

    operator: G at a point, from metric.at(params, inputs).   gradient: g (n,), flattened in the same order
    (ng.Space(params).flatten(...)).   solver: default `Auto`, by shape and cost.   damping: a number >= 0 or a
    strategy, whose first value counts; at 0 a singular G gives the minimum-norm solution with direct and sample-space
    solvers. Amari 1998. ValueError for wrong shapes, a non-finite gradient, negative damping.
    """
    amount = damping.amount(damping.initial(), operator) if isinstance(damping, Damping) else damping
    return (solver or Auto()).solve(operator, gradient, damping=amount)
