"""The natural gradient as a function: (G + damping I)^-1 g."""

from __future__ import annotations

from torch import Tensor

from natgrad.damping import Damping
from natgrad.operators import Operator
from natgrad.solvers import Auto, Solution, Solver, Status


def natural_gradient(
    operator: Operator, gradient: Tensor, *, solver: Solver | None = None, damping: float | Damping = 0.0
) -> Solution:
    """x = (G + damping I)^-1 g; `.value` is x (n,), with residual, steps and status beside it.

    operator: G at a point, from metric.at(params, inputs).   gradient: g (n,), flattened in the same order
    (ng.Space(params).flatten(...)).   solver: default `Auto`, by shape and cost.   damping: a number >= 0 or a
    strategy, whose first value counts; at 0 a singular G gives the minimum-norm solution with direct and sample-space
    solvers. Amari 1998. ValueError for wrong shapes, a non-finite gradient or metric, negative damping.
    """
    if not isinstance(operator, Operator):
        raise TypeError(
            f"operator is {type(operator).__name__}, expected a natgrad Operator: wrap a matrix with "
            "ng.operators.Dense(matrix), or take a metric at a point with metric.at(params, inputs)"
        )
    if solver is not None and not isinstance(solver, Solver):
        hint = "; did you forget the parentheses?" if isinstance(solver, type) else ""
        raise TypeError(f"solver is {solver!r}, expected a natgrad Solver such as ng.CG(){hint}")
    operator.check(gradient, "gradient")
    amount = damping.amount(damping.initial(), operator) if isinstance(damping, Damping) else damping
    solution = (solver or Auto()).solve(operator, gradient, damping=amount)
    if solution.status is Status.NON_FINITE and not bool(solution.value.any()):
        raise ValueError(
            f"operator is not finite: {operator!r} gave no finite product; look for an overflow in the metric"
        )
    return solution
