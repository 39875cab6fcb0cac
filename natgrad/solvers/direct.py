"""Closed forms, Cholesky and, for Hessians, eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import all_finite, solve_psd, solve_symmetric, take_absolute
from natgrad.operators import DenseOperator, Operator
from natgrad.solvers.base import Solution, Status, UnitSolver, check_system, measure_solution, return_zero


@dataclass(frozen=True)
class Direct(UnitSolver):
    """The operator's closed-form inverse (diagonal, low rank, Kronecker, blocks), else Cholesky of the matrix.

    A numerically singular system gets its minimum-norm solution, by eigenvalues. Without a closed form the (n, n)
    matrix is formed: O(n^2) memory, O(n^3) time. The status INACCURATE means that the right-hand side lies outside the
    range of G (then the residual is the part outside) or that the system is too ill-conditioned for its dtype.

    Args:
        absolute: Solve (|G| + damping I) x = b with the absolute values of G's eigenvalues, so that saddle points do
            not attract a Newton step. Residual and image then refer to that system.

    Reference:
        `absolute`: Dauphin et al. 2014.

    Example:
        >>> G = ng.operators.DenseOperator(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> ng.Direct().solve(G, torch.tensor([3.0, 3.0])).value
        tensor([1.0000, 1.0000])
    """

    absolute: bool = False

    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        if self.absolute:
            check_system(operator, rhs, damping, guess)
            operator = DenseOperator.from_symmetric(take_absolute(operator.dense()))
        return super().solve(operator, rhs, damping=damping, guess=guess)

    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float) -> Solution:
        inverse = operator.inverse(damping) if operator.closed_form else None
        if inverse is not None and operator.inverse_kept and damping == 0:
            value = inverse.mv(rhs)  # its image is b by definition
            solution = Solution(value, torch.zeros_like(rhs.sum()), 0, Status.CONVERGED, rhs.clone())
            return solution if all_finite(value) else return_zero(rhs, 0)
        if inverse is not None:
            return measure_solution(operator.mv, rhs, damping, inverse.mv(rhs), 0)
        solve = solve_symmetric if operator.indefinite else solve_psd
        return measure_solution(operator.mv, rhs, damping, solve(operator.dense(), rhs, damping), 0)
