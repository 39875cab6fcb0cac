"""G = A (x) B on a weight matrix: (A (x) B) vec(X) = vec(A X B), vec row-major."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.linalg import KroneckerEigen, psd_root, safe_cutoff
from natgrad.operators.base import Operator


class Kronecker(Operator):
    """A (p, p) (x) B (q, q), both symmetric PSD, acting on a (p, q) matrix flattened row-major: n = p q.

    For a linear layer y = W x, A is the output factor E[d d^T] and B the input factor E[x x^T].
    ValueError if a factor is not square, or if the factors differ in dtype or device.
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        for name, factor in (("left", left), ("right", right)):
            if factor.dim() != 2 or factor.shape[0] != factor.shape[1]:
                raise ValueError(f"{name} has shape {tuple(factor.shape)}, expected a square matrix")
        if (left.dtype, left.device) != (right.dtype, right.device):
            raise ValueError(
                f"left is {left.dtype} on {left.device}, right {right.dtype} on {right.device}; convert one with .to()"
            )
        self.left, self.right = left, right
        self.size, self.dtype, self.device = len(left) * len(right), left.dtype, left.device

    def mv(self, vector: Tensor) -> Tensor:
        return (self.left @ vector.view(len(self.left), len(self.right)) @ self.right).reshape(-1)

    def root(self) -> Tensor:
        return torch.kron(psd_root(self.left), psd_root(self.right))

    @property
    def closed_form(self) -> bool:
        return True

    def inverse(self, damping: float = 0.0) -> KroneckerSpectral:
        """Exact damping in the joint eigenbasis, not the factored approximation of K-FAC."""
        eigen = KroneckerEigen.of(self.left, self.right)
        values = eigen.values()
        cutoff = safe_cutoff(max(values.shape), self.dtype) * values.max() if damping == 0 else 0.0
        damped = values + damping
        keep = damped > cutoff
        return KroneckerSpectral(eigen, torch.where(keep, 1 / torch.where(keep, damped, 1), 0))

    def diagonal(self) -> Tensor:
        return torch.outer(self.left.diagonal(), self.right.diagonal()).reshape(-1)

    def trace(self) -> Tensor:
        return self.left.trace() * self.right.trace()

    def dense(self) -> Tensor:
        return torch.kron(self.left, self.right)


class KroneckerSpectral(Operator):
    """V diag(spectrum) V^T in the eigenbasis V of a Kronecker product, spectrum (p, q) >= 0."""

    def __init__(self, eigen: KroneckerEigen, spectrum: Tensor) -> None:
        self.eigen, self.spectrum = eigen, spectrum
        self.size, self.dtype, self.device = spectrum.numel(), spectrum.dtype, spectrum.device

    def mv(self, vector: Tensor) -> Tensor:
        return self.eigen.apply(self.spectrum, vector.view(self.spectrum.shape)).reshape(-1)

    def trace(self) -> Tensor:
        return self.spectrum.sum()
