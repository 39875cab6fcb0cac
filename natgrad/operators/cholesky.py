"""A metric held as its Cholesky factor, or as its inverse."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import Factor, cholesky, damped_inverse
from natgrad.ground.typed_torch import torch_linalg
from natgrad.operators.base import Operator
from natgrad.operators.dense import DenseOperator
from natgrad.operators.facts import Facts


class Factored(Operator):
    """G = L L^T: products and solves in O(n^2).

    Args:
        lower: L, shape (n, n), lower triangular with a positive diagonal.
    """

    state = ("lower",)

    def __init__(self, lower: Tensor) -> None:
        self.lower = lower
        self.size, self.dtype, self.device = len(lower), lower.dtype, lower.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.lower @ (self.lower.mT @ vector)

    def mm(self, block: Tensor) -> Tensor:
        return self.mv(block)

    def root(self) -> Tensor:
        return self.lower

    @property
    def closed_form(self) -> bool:
        return True

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """At damping 0 by two triangular solves per vector; else a new factorisation, O(n^3).

        Args:
            damping: In G's units, >= 0.
        """
        return FactoredInverse(self.lower) if damping == 0 else DenseOperator(self.dense()).inverse(damping)

    def diagonal(self) -> Tensor:
        return self.lower.square().sum(1)


class FactoredInverse(Operator):
    """(L L^T)^-1: two triangular solves per vector.

    Args:
        lower: L, shape (n, n), lower triangular.
    """

    def __init__(self, lower: Tensor) -> None:
        self.factor = Factor(lower, 0.0, 0)
        self.size, self.dtype, self.device = len(lower), lower.dtype, lower.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.factor.solve(vector)

    def mm(self, block: Tensor) -> Tensor:
        return self.factor.solve(block)

    def inverse(self, damping: float = 0.0) -> Operator | None:
        return Factored(self.factor.lower) if damping == 0 else None

    def pack(self) -> dict[str, Any]:
        return {"lower": self.factor.lower}


class InvertedOperator(Operator, packed_as="Inverted"):
    """G known by P = G^-1: solves are products with P.

    A product with G itself factorises P, once: O(n^3).

    Args:
        matrix: P, shape (n, n), symmetric positive definite.
    """

    state = ("matrix",)

    facts = Facts(inverse_kept=True)

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.size, self.dtype, self.device = len(matrix), matrix.dtype, matrix.device

    @cached_property
    def _factor(self) -> Factor:
        return cholesky(self.matrix)

    def mv(self, vector: Tensor) -> Tensor:
        return self._factor.solve(vector)

    def mm(self, block: Tensor) -> Tensor:
        return self._factor.solve(block)

    def root(self) -> Tensor:
        """L^-T of P = L L^T."""
        eye = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return torch_linalg.solve_triangular(self._factor.lower.to(self.dtype), eye, upper=False).mT

    @property
    def closed_form(self) -> bool:
        return True

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """P itself at damping 0; else (I + damping P)^-1 P, O(n^3).

        Args:
            damping: In G's units, >= 0.
        """
        return DenseOperator.from_symmetric(self.matrix if damping == 0 else damped_inverse(self.matrix, damping))
