"""The natural gradient as a function: (G + damping I)^-1 g."""

from __future__ import annotations

from torch import Tensor

from natgrad.damping import Damping
from natgrad.operators import Operator
from natgrad.solvers import Auto, Solution, Solver, Status
from natgrad.wrong_calls import explain_calls


@explain_calls
def natural_gradient(
    operator: Operator, gradient: Tensor, *, solver: Solver | None = None, damping: float | Damping = 0.0
) -> Solution:
    """x = (G + damping I)^-1 g.

    Args:
        operator: G at a point, from `metric.at(params, inputs)`.
        gradient: g, shape (n,), flattened in the same order as G: `ng.Space(params).flatten(...)`.
        solver: How the system is solved; default `ng.Auto()`, by shape and cost.
        damping: A number >= 0 in the unit of G, or a strategy, whose first value counts. At 0 a singular G gives the
            minimum-norm solution with direct and sample-space solvers.

    Returns:
        A `Solution`: `.value` is x, shape (n,), with the residual, the number of steps and the status beside it.

    Raises:
        TypeError: For an operator or a solver of another kind.
        ValueError: For a gradient of another shape, a gradient or a metric that is not finite, a negative damping.

    Reference:
        Amari 1998.

    Example:
        >>> G = ng.operators.DenseOperator(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        >>> ng.natural_gradient(G, torch.tensor([1.0, 1.0])).value
        tensor([0.5000, 0.2500])
    """
    if not isinstance(operator, Operator):
        raise TypeError(
            f"operator is {type(operator).__name__}, expected a natgrad Operator: wrap a matrix with "
            "ng.operators.DenseOperator(matrix), or take a metric at a point with metric.at(params, inputs)"
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
