"""The solve in the space of outputs: (U U^T + l I)^-1 = (I - U (l I + U^T U)^-1 U^T) / l."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import cholesky, pseudo_solve, pseudo_square
from natgrad.ground.typed_torch import measure_norm
from natgrad.operators import Operator, SampleRows
from natgrad.solvers.base import Solution, UnitSolver, measure_solution, write_rows


@dataclass(frozen=True)
class SampleSpace(UnitSolver):
    """Exact solve through the Gram matrix U^T U (r, r) of G = U U^T: cheap where outputs are fewer than parameters.

    For a pulled-back metric the Gram matrix is summed layer by layer and the Jacobian is never formed. For any other
    operator its `root()` is used. At damping 0 it gives the minimum-norm solution U (U^T U)^+2 U^T b. Where the
    subtraction cancels more than three digits, one step of iterative refinement follows. Where damping is below the
    round-off of U^T U, refinement cannot help: then the part of b outside the range of G, which would be divided by the
    damping, is left out, and the status is INACCURATE if that part was not round-off itself.

    `solve` raises a ValueError for an operator without a root.

    Example:
        >>> G = ng.operators.LowRankOperator(torch.ones(1000, 1))
        >>> ng.SampleSpace().solve(G, torch.ones(1000), damping=1.0).value[0]  # 1 / (1000 + 1)
        tensor(0.0010)
    """

    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float) -> Solution:
        rows = write_rows(operator)
        gram = rows.lower_gram()
        if damping == 0:
            return solve_minimum_norm(rows, gram, rhs)
        gram.diagonal().add_(damping)
        factor = cholesky(gram)

        def once(right: Tensor) -> Tensor:
            return (right - rows.mv(factor.solve(rows.rmv(right)))) / damping

        solution = measure_rows(rows, rhs, damping, once(rhs), 1)
        if bool(solution.residual <= 1e3 * torch.finfo(rhs.dtype).eps * measure_norm(rhs)):
            return solution
        refined = solution.value + once(rhs - solution.image)
        solution = measure_rows(rows, rhs, damping, refined, solution.steps + 1)
        if bool(solution.residual <= measure_norm(rhs)):
            return solution
        gram.diagonal().sub_(damping)
        in_range = rows.mv(factor.solve(pseudo_solve(gram, rows.rmv(rhs))))  # for b = U w it is U (K + l I)^-1 w
        return measure_rows(rows, rhs, damping, in_range, solution.steps + 1)


def solve_minimum_norm(rows: SampleRows, gram: Tensor, rhs: Tensor) -> Solution:
    """U (U^T U)^+2 U^T b by the lower triangle of U^T U, refined once: squaring costs half the digits at first."""
    vectors, weights, scale = pseudo_square(gram)

    def once(right: Tensor) -> Tensor:
        return rows.mv(vectors @ (weights * (vectors.mT @ rows.rmv(right)))) / scale / scale

    first = measure_rows(rows, rhs, 0.0, once(rhs), 1)
    refined = measure_rows(rows, rhs, 0.0, first.value + once(rhs - first.image), first.steps + 1)
    return refined if bool(refined.residual <= first.residual) else first


def measure_rows(rows: SampleRows, rhs: Tensor, damping: float, value: Tensor, steps: int) -> Solution:
    """`measure_solution` with products v -> U U^T v."""
    return measure_solution(lambda vector: rows.mv(rows.rmv(vector)), rhs, damping, value, steps)
