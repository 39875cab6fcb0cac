"""Closed forms and Cholesky."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from natgrad.linalg import solve_psd
from natgrad.operators import Operator
from natgrad.solvers.base import Solution, Solver, check_system, measured


@dataclass(frozen=True)
class Direct(Solver):
    """The operator's closed-form inverse (diagonal, low rank, Kronecker, blocks), else Cholesky of the matrix.

    A numerically singular system gets its minimum-norm solution, by eigenvalues. Forms the (n, n) matrix unless there
    is a closed form: O(n^2) memory, O(n^3) time. Status INACCURATE means that the right-hand side lies outside the
    range (then the residual is the part outside) or that the system is too ill-conditioned for its dtype.
    """

    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        check_system(operator, rhs, damping, guess)
        inverse = operator.inverse(damping) if operator.closed_form else None
        value = inverse.mv(rhs) if inverse is not None else solve_psd(operator.dense(), rhs, damping)
        return measured(operator.mv, rhs, damping, value, 0)
