"""A metric held as a matrix, or as its diagonal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import inverse_symmetric, psd_root, pseudo_solve, solve_psd, symmetrise
from natgrad.operators.base import Operator
from natgrad.operators.facts import Facts


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
        identity = torch.eye(self.size, dtype=self.dtype, device=self.device)
        if damping == 0:
            return DenseOperator(symmetrise(pseudo_solve(self.matrix, identity)))
        return DenseOperator(symmetrise(solve_psd(self.matrix, identity, damping)))

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

    @property
    def closed_form(self) -> bool:
        return True

    def inverse(self, damping: float = 0.0) -> DiagonalOperator:
        damped = self.values + damping
        return DiagonalOperator(torch.where(damped == 0, 0, 1 / torch.where(damped == 0, 1, damped)))  # a NaN stays one

    def diagonal(self) -> Tensor:
        return self.values.clone()

    def dense(self) -> Tensor:
        return torch.diag(self.values)
