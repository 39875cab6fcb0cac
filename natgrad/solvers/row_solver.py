"""Solvers that are told b = U w by its weights w, as nonlinear least squares knows it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from torch import Tensor

from natgrad.operators import Operator, SampleRows
from natgrad.solvers.base import Solution, Solver


class FactorisedSystem(Protocol):
    """(U U^T + l I) x = U w, ready for several w."""

    def solve(self, weights: Tensor) -> Solution:
        """The solution for b = U w.

        Args:
            weights: w, shape (r,).
        """
        ...

    def find_value(self, weights: Tensor) -> Tensor:
        """The value of that solution alone, (n,), without the products that measure its residual.

        Args:
            weights: w, shape (r,).
        """
        ...

    def change_damping(self, damping: float) -> FactorisedSystem:
        """The same system with another l, for less than a new one where something can be kept.

        Args:
            damping: l >= 0.
        """
        ...


class RowSolver(Solver):
    """A solver of (U U^T + l I) x = U w as well, for G = U U^T with r columns: U (U^T U + l I)^-1 w.

    That subtracts no large numbers, however small the damping, and one factorisation serves several w.
    """

    @abstractmethod
    def factorise(self, operator: Operator, damping: float) -> FactorisedSystem:
        """What solves (U U^T + damping I) x = U w for any w.

        Args:
            operator: G, with `sample_rows`.
            damping: In the operator's units, >= 0.

        Raises:
            ValueError: For an operator without rows.
        """


def require_rows(operator: Operator) -> SampleRows:
    """U by its products. ValueError for an operator without rows."""
    rows = operator.sample_rows
    if rows is None:
        raise ValueError(f"operator {operator!r} has no rows: use solve(operator, b) with ng.Direct() or ng.CG()")
    return rows
