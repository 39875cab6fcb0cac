"""Families that lie in a larger or another one: psi, densities and derivatives are those of it, by a map of theta."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families.exponential import ExponentialFamily


class Embedded(ExponentialFamily):
    """Distributions of another family at A theta + b: psi(theta) = psi'(A theta + b), T = A^T T', eta = A^T eta'.

    A subclass sets `inner`, and overrides the maps that are not the identity.

    Attributes:
        inner: The other family.
    """

    inner: ExponentialFamily
    """The other family."""

    def embed(self, theta: Tensor) -> Tensor:
        """A theta + b, the natural parameters in the other family.

        Args:
            theta: Natural parameters, shape (..., n).
        """
        return theta

    def pull(self, covector: Tensor) -> Tensor:
        """A^T v: the other family's statistics and expectation parameters to one's own.

        Args:
            covector: v, shape (..., n').

        Returns:
            Shape (..., n).
        """
        return covector

    def source(self, y: Tensor) -> Tensor:
        """y as the other family has it.

        Args:
            y: Shape (..., event).
        """
        return y

    def statistics(self, x: Tensor) -> Tensor:
        return self.pull(self.inner.statistics(self.source(x)))

    def log_partition(self, theta: Tensor) -> Tensor:
        return self.inner.log_partition(self.embed(self.check_shape(theta, "theta")))

    def inside(self, theta: Tensor) -> Tensor:
        return self.inner.inside(self.embed(theta))

    def log_base(self, x: Tensor) -> Tensor:
        return self.inner.log_base(self.source(x))

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return self.inner.mean_log_base(self.embed(theta))

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.inner.log_prob(self.embed(self.check(theta)), self.source(x))

    def entropy(self, theta: Tensor) -> Tensor:
        return self.inner.entropy(self.embed(self.check(theta)))

    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        return self.inner.kl(self.embed(self.check(theta)), self.embed(self.check(other)))

    def expectation(self, theta: Tensor) -> Tensor:
        return self.pull(self.inner.expectation(self.embed(self.check(theta))))

    def covariance(self, theta: Tensor) -> Tensor:
        return self.pull(self.pull(self.inner.covariance(self.embed(self.check(theta)))).mT)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        return self.inner.draw(self.embed(theta), count, generator)
