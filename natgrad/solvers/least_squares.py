"""Damped least squares: (U U^T + l I) x = U w, through the smaller of the two Gram matrices, without cancellation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from natgrad.ground.linalg import Factor, cholesky, loses_rank, pseudo_solve
from natgrad.operators import Operator
from natgrad.solvers.base import FactorisedSystem, RowSolver, Solution, Solver, check_system, require_rows
from natgrad.solvers.direct import Direct
from natgrad.solvers.nystrom import Nystrom
from natgrad.solvers.sample_space import SampleSpace, measure_rows


@dataclass(frozen=True)
class LeastSquares(RowSolver):
    """Cholesky of U U^T + l I (n, n) or of U^T U + l I (r, r), whichever is smaller, for G = U U^T with r columns.

    Where both are too large, conjugate gradients in the space of the rows behind a randomised sketch of U^T U.

    Where b = U w is known by its weights w, as in nonlinear least squares, `factorise` solves it as
    U (U^T U + l I)^-1 w: no subtraction of large numbers, however small the damping. One factorisation then serves
    several right-hand sides. `solve`, for any b, is `Direct`, `SampleSpace` or `beyond` by size.

    Args:
        largest: The largest matrix that is factorised, by its side.
        beyond: What solves larger systems.

    Example:
        >>> G = ng.operators.LowRank(torch.ones(1000, 1))
        >>> ng.LeastSquares().solve(G, torch.ones(1000), damping=1.0).value[0]  # 1 / (1000 + 1)
        tensor(0.0010)
    """

    largest: int = 8000
    beyond: RowSolver = Nystrom()

    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        check_system(operator, rhs, damping, guess)
        return self.choose(operator).solve(operator, rhs, damping=damping, guess=guess)

    def factorise(self, operator: Operator, damping: float) -> FactorisedSystem:
        rows, chosen = require_rows(operator), self.choose(operator)
        if isinstance(chosen, RowSolver):
            return chosen.factorise(operator, damping)
        direct = isinstance(chosen, Direct)
        return factorise_gram(operator, operator.dense() if direct else rows.lower_gram(), damping, direct)

    def choose(self, operator: Operator) -> Solver:
        """What solves the system of this operator: by a matrix of its parameters, of its rows, or by products.

        Args:
            operator: G, of size n.
        """
        rank = operator.sample_rank
        side = operator.size if rank is None else min(rank, operator.size)
        if side > self.largest:
            return self.beyond
        return SampleSpace() if rank is not None and rank < operator.size else Direct()


def factorise_gram(operator: Operator, gram: Tensor, damping: float, direct: bool) -> Factorised:
    """The factorised system from its Gram matrix, which is damped in place."""
    plain = gram.diagonal().clone()
    gram.diagonal().add_(damping)
    return Factorised(operator, gram, plain, cholesky(gram), damping, direct)


@dataclass(frozen=True, eq=False)
class Factorised(FactorisedSystem):
    """A factorised system (U U^T + l I) x = U w.

    Args:
        operator: G = U U^T.
        matrix: What was factorised: U U^T + l I or U^T U + l I.
        diagonal: The matrix's diagonal without l.
        factor: Its Cholesky factor.
        damping: l.
        direct: True if it was the former.
    """

    operator: Operator
    matrix: Tensor
    diagonal: Tensor
    factor: Factor
    damping: float
    direct: bool

    @property
    def rows(self) -> Any:
        """U by its products."""
        return self.operator.sample_rows

    def solve(self, weights: Tensor) -> Solution:
        rhs = self.rows.mv(weights)
        return measure_rows(self.rows, rhs, self.damping, self._invert(rhs if self.direct else weights), 0)

    def find_value(self, weights: Tensor) -> Tensor:
        return self._invert(self.rows.mv(weights) if self.direct else weights)

    def change_damping(self, damping: float) -> Factorised:
        gram = self.matrix.clone()
        gram.diagonal().copy_(self.diagonal)
        return factorise_gram(self.operator, gram, damping, self.direct)

    def _invert(self, right: Tensor) -> Tensor:
        """x from U w (n,) or w (r,); NaN where there is no factor."""
        solved = self.factor.solve(right)
        if self.damping == 0 and loses_rank(self.factor, self.matrix):  # the minimum-norm solution
            lower = self.matrix.tril()
            solved = pseudo_solve(lower + lower.tril(-1).mT, right)
        return solved if self.direct else self.rows.mv(solved)
