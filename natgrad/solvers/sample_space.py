"""The solve in the space of outputs: (U U^T + l I)^-1 = (I - U (l I + U^T U)^-1 U^T) / l."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import cholesky, pseudo_solve, pseudo_square
from natgrad.ground.typed_torch import measure_norm
from natgrad.operators import Operator
from natgrad.solvers.base import (
    Product,
    Solution,
    Solver,
    check_system,
    find_power_of_two,
    measure_solution,
    restore_units,
)


@dataclass(frozen=True)
class SampleSpace(Solver):
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

    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        check_system(operator, rhs, damping, guess)
        scale = find_power_of_two(rhs)
        return restore_units(self._solve(operator, rhs / scale, damping), scale, operator, rhs, damping)

    def _solve(self, operator: Operator, rhs: Tensor, damping: float) -> Solution:
        """For b of entries near 1."""
        gram, up, down = find_factor_products(operator)

        def product(vector: Tensor) -> Tensor:
            return up(down(vector))

        if damping == 0:
            return solve_minimum_norm(gram, up, down, rhs)
        gram.diagonal().add_(damping)
        factor = cholesky(gram)

        def once(right: Tensor) -> Tensor:
            return (right - up(factor.solve(down(right)))) / damping

        solution = measure_solution(product, rhs, damping, once(rhs), 1)
        if bool(solution.residual <= 1e3 * torch.finfo(rhs.dtype).eps * measure_norm(rhs)):
            return solution
        refined = solution.value + once(rhs - solution.image)
        solution = measure_solution(product, rhs, damping, refined, solution.steps + 1)
        if bool(solution.residual <= measure_norm(rhs)):
            return solution
        gram.diagonal().sub_(damping)
        in_range = up(factor.solve(pseudo_solve(gram, down(rhs))))  # for b = U w it is U (K + l I)^-1 w
        return measure_solution(product, rhs, damping, in_range, solution.steps + 1)


def solve_minimum_norm(gram: Tensor, up: Product, down: Product, rhs: Tensor) -> Solution:
    """U (U^T U)^+2 U^T b by the lower triangle of U^T U, refined once: squaring costs half the digits at first."""
    vectors, weights = pseudo_square(gram)

    def once(right: Tensor) -> Tensor:
        return up(vectors @ (weights * (vectors.mT @ down(right))))

    first = measure_solution(lambda v: up(down(v)), rhs, 0.0, once(rhs), 1)
    refined = measure_solution(lambda v: up(down(v)), rhs, 0.0, first.value + once(rhs - first.image), first.steps + 1)
    return refined if bool(refined.residual <= first.residual) else first


def find_factor_products(operator: Operator) -> tuple[Tensor, Product, Product]:
    """A fresh U^T U (r, r), valid in its lower triangle, w -> U w and v -> U^T v for an operator G = U U^T."""
    rows = operator.sample_rows
    if rows is not None:
        return rows.lower_gram(), rows.mv, rows.rmv
    root = operator.root()
    if root is None:
        raise ValueError(
            f"operator {operator!r} has no root U with G = U U^T, which SampleSpace needs; use CG() or Direct()"
        )
    return root.mT @ root, lambda weights: root @ weights, lambda vector: root.mT @ vector
