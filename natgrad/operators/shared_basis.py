"""One block per unit, all diagonal in one basis that the units share."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.linalg import safe_cutoff
from natgrad.operators.base import Operator
from natgrad.operators.kronecker import positive_inverse
from natgrad.typed_torch import join_diagonally


class SharedBasis(Operator):
    """diag(G_1, ..., G_k), G_j = Q diag(s_j) Q^T + r_j (1 - Q Q^T): a unit's own eigenvalues in a common basis.

    There are n = k d parameters.

    Args:
        basis: Q, shape (d, m), with orthonormal columns, m <= d.
        spectrum: s, shape (k, m), >= 0.
        rest: r, shape (k,), >= 0: the one eigenvalue of all directions outside of Q.

    Raises:
        ValueError: For shapes that do not fit.
    """

    state = (
        "basis",
        "spectrum",
        "rest",
    )

    def __init__(self, basis: Tensor, spectrum: Tensor, rest: Tensor) -> None:
        fits = basis.dim() == 2 and spectrum.dim() == 2 and basis.shape[1] == spectrum.shape[1] <= basis.shape[0]
        if not fits or rest.shape != spectrum.shape[:1]:
            raise ValueError(
                f"basis has shape {tuple(basis.shape)}, spectrum {tuple(spectrum.shape)}, rest {tuple(rest.shape)}, "
                "expected (d, m), (k, m) and (k,) with m <= d"
            )
        self.basis, self.spectrum, self.rest = basis, spectrum, rest
        self.whole = basis.shape[0] == basis.shape[1]
        self.size = len(spectrum) * len(basis)
        self.dtype, self.device = basis.dtype, basis.device

    def mv(self, vector: Tensor) -> Tensor:
        return self._scale_in_basis(vector, self.spectrum, self.rest)

    def root(self) -> Tensor:
        """The symmetric one."""
        roots = (self.basis * self.spectrum.sqrt().unsqueeze(1)) @ self.basis.mT
        outside = torch.eye(len(self.basis), dtype=self.dtype, device=self.device) - self.basis @ self.basis.mT
        return join_diagonally(roots + self.rest.sqrt()[:, None, None] * outside)

    @property
    def closed_form(self) -> bool:
        return True

    def inverse(self, damping: float = 0.0) -> SharedBasis:
        cutoff = 0.0
        if damping == 0:
            cutoff = safe_cutoff(len(self.basis), self.dtype) * float(torch.maximum(self._largest(), self.rest.max()))
        spectrum, rest = (positive_inverse(part + damping, cutoff) for part in (self.spectrum, self.rest))
        return SharedBasis(self.basis, spectrum, rest)

    def diagonal(self) -> Tensor:
        squares = self.basis.square()
        outside = torch.zeros_like(squares[:, 0]) if self.whole else 1 - squares.sum(1)
        return (self.spectrum @ squares.mT + self.rest.outer(outside)).reshape(-1)

    def _largest(self) -> Tensor:
        return self.spectrum.amax() if self.spectrum.numel() else self.rest.max()

    def _scale_in_basis(self, vector: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
        block = vector.reshape(len(inside), -1)
        if self.whole:
            return ((block @ self.basis * inside) @ self.basis.mT).reshape(-1)
        apart = outside.unsqueeze(1)
        return (block * apart + (block @ self.basis * (inside - apart)) @ self.basis.mT).reshape(-1)
