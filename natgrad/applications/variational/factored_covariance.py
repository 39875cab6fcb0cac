"""Covariances diag(s)^2 + B B^T, and the Fisher matrix of a normal in s and B: products by thin matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from natgrad.lapack import require_factor
from natgrad.operators import Operator


@dataclass(frozen=True)
class FactoredCovariance:
    """Sigma = diag(scales)^2 + factor factor^T.

    Args:
        scales: s > 0, shape (d,).
        factor: B, shape (d, r).
    """

    scales: Tensor
    factor: Tensor

    @cached_property
    def thin(self) -> Tensor:
        """V (d, r) with diag(s) Sigma^-1 diag(s) = I - V V^T."""
        return torch.linalg.solve_triangular(self._root.mT, self._relative, upper=True, left=False)

    def mv(self, vector: Tensor) -> Tensor:
        """Sigma times a vector (d,).

        Args:
            vector: Shape (d,).
        """
        return self.scales.square() * vector + self.factor @ (self.factor.mT @ vector)

    def diagonal(self) -> Tensor:
        """Of Sigma, shape (d,)."""
        return self.scales.square() + self.factor.square().sum(1)

    def dense(self) -> Tensor:
        """Sigma, shape (d, d)."""
        return torch.diag(self.scales.square()) + self.factor @ self.factor.mT

    def spread(self, z: Tensor) -> Tensor:
        """Rows s * z_1 + B z_2 of covariance Sigma.

        Args:
            z: Rows (z_1, z_2) of unit covariance, shape (k, d + r).
        """
        d = len(self.scales)
        return z[:, :d] * self.scales + z[:, d:] @ self.factor.mT

    def half_logdet(self) -> Tensor:
        """log det Sigma / 2."""
        return self.scales.log().sum() + self._root.diagonal().log().sum()

    def entropy_slopes(self) -> tuple[Tensor, Tensor]:
        """Derivatives of log det Sigma / 2 in log s (d,) and in diag(s)^-1 B (d, r)."""
        thin = self.thin
        return 1 - thin.square().sum(1), self._relative - thin @ (thin.mT @ self._relative)

    def move(self, logs: Tensor, relative: Tensor) -> FactoredCovariance:
        """After s <- s exp(logs) and B <- B + diag(s) relative.

        Args:
            logs: Shape (d,).
            relative: Shape (d, r).
        """
        return FactoredCovariance(self.scales * logs.exp(), self.factor + self.scales.unsqueeze(1) * relative)

    @cached_property
    def _relative(self) -> Tensor:
        return self.factor / self.scales.unsqueeze(1)

    @cached_property
    def _root(self) -> Tensor:
        """Lower factor of I + B^T diag(s)^-2 B."""
        inner = self._relative.mT @ self._relative
        inner.diagonal().add_(1)
        return require_factor(
            inner, "q's covariance is not finite: take a smaller lr or a start with a smaller covariance"
        )


class FactorFisher(Operator):
    """Fisher matrix of N(0, Sigma) in (log s, diag(s)^-1 B): 1/2 tr(Sigma^-1 dSigma Sigma^-1 dSigma) as a form.

    It is singular along rotations of B's columns, which leave Sigma as it is. A product costs d r^2 operations.

    Args:
        covariance: Sigma.
    """

    def __init__(self, covariance: FactoredCovariance) -> None:
        self.thin, self.relative = covariance.thin, covariance._relative
        self.size = self.relative.numel() + len(self.relative)
        self.dtype, self.device = self.relative.dtype, self.relative.device
        self.turned = self._apply_inverse(self.relative)

    def mv(self, vector: Tensor) -> Tensor:
        d = len(self.relative)
        logs, step = 2 * vector[:d], vector[d:].view_as(self.relative)  # of s^2, relative to it
        thin, turned, moved = self.thin, self.turned, self._apply_inverse(step)
        inner = thin.mT @ (logs.unsqueeze(1) * thin)
        own = logs * (1 - 2 * thin.square().sum(1)) + ((thin @ inner) * thin).sum(1)
        diagonal = own + 2 * (moved * turned).sum(1)
        sides = self._apply_inverse(logs.unsqueeze(1) * turned)
        sides = sides + moved @ (turned.mT @ self.relative) + turned @ (moved.mT @ self.relative)
        return torch.cat([diagonal, sides.reshape(-1)])  # 1/2 of the trace's slope in log s is 1/2 * 2 of it in s^2

    def _apply_inverse(self, block: Tensor) -> Tensor:
        """(I - V V^T) block: Sigma^-1 in units of s."""
        return block - self.thin @ (self.thin.mT @ block)
