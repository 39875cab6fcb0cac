"""The pseudo-inverse with a cut: directions that the data hardly determine are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from natgrad.ground.checks import check_number
from natgrad.ground.linalg import eigh, svd
from natgrad.operators import Operator
from natgrad.solvers.base import (
    FactorisedSystem,
    RowSolver,
    Solution,
    Status,
    UnitSolver,
    measure_solution,
    require_rows,
)


@dataclass(frozen=True)
class PseudoInverse(UnitSolver, RowSolver):
    """x = V (S^2 + l I)^-1 V^T b over the singular values S of U above `cut` times the largest, G = U U^T.

    Singular values come from U itself where it is known: their squares would lose those below 1e-8 of the largest. The
    residual of the solution is what was cut off, and its status LEAST_SQUARES.

    Args:
        cut: Share of the largest singular value, the square root of an eigenvalue of G, in [0, 1).

    Reference:
        Schwencke & Furtlehner 2024 (ANaGRAM).

    Example:
        >>> G = ng.operators.DiagonalOperator(torch.tensor([1.0, 1e-8]))
        >>> ng.solvers.PseudoInverse(cut=1e-3).solve(G, torch.tensor([2.0, 1.0])).value
        tensor([2., 0.])
    """

    cut: float = 1e-6

    def __post_init__(self) -> None:
        check_number("cut", self.cut, 0.0, 1.0, hint=", a share of the largest singular value")
        if self.cut == 1:
            raise ValueError("cut is 1, expected less: nothing would be left")

    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float) -> Solution:
        rows, cut = operator.sample_rows, self.cut
        if rows is None:
            values, vectors = eigh(operator.dense())
            sizes = values.clamp(min=0).sqrt()
            cut = max(cut, (operator.size * torch.finfo(operator.dtype).eps) ** 0.5)  # roots of round-off
        else:
            vectors, sizes, _ = svd(rows.dense())
        large = keep_above(sizes, cut)
        shares = torch.where(large, 1 / torch.where(large, sizes.square() + damping, 1), 0)
        value = vectors @ (shares * (vectors.mT @ rhs))
        return say_least_squares(measure_solution(operator.mv, rhs, damping, value, 0))

    def factorise(self, operator: Operator, damping: float) -> SingularValues:
        return SingularValues(operator, *svd(require_rows(operator).dense()), self.cut, damping)


@dataclass(frozen=True, eq=False)
class SingularValues(FactorisedSystem):
    """U = left diag(sizes) right, ready to solve (U U^T + l I) x = U w; sizes below cut of the largest are zero."""

    operator: Operator
    left: Tensor
    sizes: Tensor
    right: Tensor
    cut: float
    damping: float

    def solve(self, weights: Tensor) -> Solution:
        rhs = require_rows(self.operator).mv(weights)
        return say_least_squares(measure_solution(self.operator.mv, rhs, self.damping, self.find_value(weights), 0))

    def find_value(self, weights: Tensor) -> Tensor:
        large = keep_above(self.sizes, self.cut)
        shares = torch.where(large, self.sizes / torch.where(large, self.sizes.square() + self.damping, 1), 0)
        return self.left @ (shares * (self.right @ weights))

    def change_damping(self, damping: float) -> SingularValues:
        return replace(self, damping=damping)


def keep_above(sizes: Tensor, cut: float) -> Tensor:
    """Which singular values count: above the cut, and above the dtype's round-off."""
    least = max(cut, len(sizes) * torch.finfo(sizes.dtype).eps)
    return sizes > least * sizes.max() if len(sizes) else sizes > 0


def say_least_squares(solution: Solution) -> Solution:
    """INACCURATE becomes LEAST_SQUARES: what is left was cut off on purpose."""
    return replace(solution, status=Status.LEAST_SQUARES) if solution.status is Status.INACCURATE else solution
