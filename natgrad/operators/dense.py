"""A metric held as a matrix, its diagonal, its Cholesky factor, its inverse or a thin root."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import (
    Factor,
    cholesky,
    damped_inverse,
    inverse_symmetric,
    invert_lower,
    positive_inverse,
    psd_root,
    pseudo_square,
    solve_psd,
    symmetrise,
    woodbury_solve,
)
from natgrad.ground.pure import compute_exactly
from natgrad.operators.base import Facts, Operator


@compute_exactly
class DenseOperator(Operator, packed_as="Dense"):
    """G given as a matrix.

    Args:
        matrix: Shape (n, n), symmetric; positive semi-definite unless `indefinite`.
        indefinite: True if G may have negative eigenvalues. Its inverse is then by eigenvalues, and there is no root.

    Raises:
        TypeError: If the matrix is no tensor.
        ValueError: If it is not square, not symmetric or not of floating point.
    """

    state = ("matrix",)

    def __init__(self, matrix: Tensor, *, indefinite: bool = False) -> None:
        if not isinstance(matrix, Tensor):
            raise TypeError(f"matrix is {type(matrix).__name__}, expected a tensor (n, n); use torch.tensor(...)")
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix has shape {tuple(matrix.shape)}, expected (n, n)")
        if not matrix.is_floating_point():
            raise ValueError(f"matrix has dtype {matrix.dtype}, expected floating point; convert it with .double()")
        tolerance = 1e3 * torch.finfo(matrix.dtype).eps * matrix.abs().max() if matrix.numel() else 0.0
        if ((matrix - matrix.mT).abs() > tolerance).any():
            raise ValueError("matrix is not symmetric, expected a metric; symmetrise it with (A + A.mT) / 2")
        self._hold(matrix)
        self.facts = Facts(indefinite=indefinite)

    @classmethod
    def unpack(cls, parts: dict[str, Any]) -> DenseOperator:
        return cls.from_symmetric(parts["matrix"])

    @classmethod
    def from_symmetric(cls, matrix: Tensor) -> DenseOperator:
        """A matrix that is symmetric by construction, without a check: looking for asymmetry takes three more of its
        size.

        Args:
            matrix: Shape (n, n), symmetric and positive semi-definite.
        """
        operator = cls.__new__(cls)
        operator._hold(matrix)
        return operator

    def _hold(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.size, self.dtype, self.device = len(matrix), matrix.dtype, matrix.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector

    def mm(self, block: Tensor) -> Tensor:
        return self.matrix @ block

    def root(self) -> Tensor | None:
        return None if self.indefinite else psd_root(self.matrix)

    def inverse(self, damping: float = 0.0) -> DenseOperator:
        if self.indefinite:
            return DenseOperator(inverse_symmetric(self.matrix, damping), indefinite=True)
        unit = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return DenseOperator.from_symmetric(symmetrise(solve_psd(self.matrix, unit, damping)))

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal().clone()

    def dense(self) -> Tensor:
        return symmetrise(self.matrix)


class DiagonalOperator(Operator, packed_as="diagonal"):
    """G = diag(values).

    Args:
        values: Shape (n,), >= 0.

    Raises:
        ValueError: For another shape or a negative entry.
    """

    has_closed_form = True
    state = ("values",)

    def __init__(self, values: Tensor) -> None:
        if values.dim() != 1:
            raise ValueError(f"values has shape {tuple(values.shape)}, expected (n,)")
        if (values < 0).any():
            raise ValueError("values has negative entries, expected >= 0: a metric is positive semi-definite")
        self.values = values
        self.size, self.dtype, self.device = len(values), values.dtype, values.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.values * vector

    def mm(self, block: Tensor) -> Tensor:
        return self.values.unsqueeze(1) * block

    def root(self) -> Tensor:
        return torch.diag(self.values.sqrt())

    def inverse(self, damping: float = 0.0) -> DiagonalOperator:
        return DiagonalOperator(positive_inverse(self.values + damping, 0.0))

    def diagonal(self) -> Tensor:
        return self.values.clone()

    def dense(self) -> Tensor:
        return torch.diag(self.values)


# Held as the Cholesky factor, or as the inverse


@compute_exactly
class Factored(Operator):
    """G = L L^T: products and solves in O(n^2).

    Args:
        lower: L, shape (n, n), lower triangular with a positive diagonal.
    """

    has_closed_form = True
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

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """At damping 0 by two triangular solves per vector; else a new factorisation, O(n^3)."""
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


@compute_exactly
class InvertedOperator(Operator, packed_as="Inverted"):
    """G known by P = G^-1: solves are products with P.

    A product with G itself factorises P, once: O(n^3).

    Args:
        matrix: P, shape (n, n), symmetric positive definite.
    """

    has_closed_form = True
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
        return invert_lower(self._factor.lower.to(self.dtype)).mT

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """P itself at damping 0; else (I + damping P)^-1 P, O(n^3)."""
        return DenseOperator.from_symmetric(self.matrix if damping == 0 else damped_inverse(self.matrix, damping))


# G = U U^T: products by a thin matrix


@compute_exactly
class LowRankOperator(Operator, packed_as="LowRank"):
    """G = U U^T.

    Args:
        factor: U, shape (n, r).

    Raises:
        ValueError: If U has not two dimensions.
    """

    state = ("factor",)

    def __init__(self, factor: Tensor) -> None:
        if factor.dim() != 2:
            raise ValueError(f"factor has shape {tuple(factor.shape)}, expected (n, r)")
        self.factor = factor
        self.size, self.dtype, self.device = factor.shape[0], factor.dtype, factor.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.factor @ (self.factor.mT @ vector)

    def mm(self, block: Tensor) -> Tensor:
        return self.mv(block)

    def root(self) -> Tensor:
        return self.factor

    @property
    def closed_form(self) -> bool:
        return self.factor.shape[1] <= self.size  # a wide factor's (r, r) is the larger system

    def inverse(self, damping: float = 0.0) -> LowRankInverse:
        return LowRankInverse(self.factor, damping)

    def diagonal(self) -> Tensor:
        return self.factor.square().sum(1)

    def dense(self) -> Tensor:
        return self.factor @ self.factor.mT


class LowRankInverse(Operator):
    """(U U^T + damping I)^-1 by Woodbury, in O(n r^2 + r^3); at damping 0 the pseudo-inverse U (U^T U)^+2 U^T."""

    state = ("factor", "damping")

    def __init__(self, factor: Tensor, damping: float) -> None:
        self.factor, self.damping = factor, damping
        self.size, self.dtype, self.device = factor.shape[0], factor.dtype, factor.device

    def mv(self, vector: Tensor) -> Tensor:
        if self.damping > 0:
            return woodbury_solve(self.factor, vector, self.damping)
        vectors, weights, scale = pseudo_square(self.factor.mT @ self.factor)

        def once(right: Tensor) -> Tensor:
            coordinates = vectors.mT @ (self.factor.mT @ right)
            image = self.factor @ (vectors @ (weights.view(-1, *[1] * (right.dim() - 1)) * coordinates))
            return image / scale / scale

        value = once(vector)
        return value + once(vector - self.factor @ (self.factor.mT @ value))  # squared eigenvalues cost half the digits

    def mm(self, block: Tensor) -> Tensor:
        return self.mv(block)

    def inverse(self, damping: float = 0.0) -> Operator | None:
        return LowRankOperator(self.factor) if damping == 0 and self.damping == 0 else None
