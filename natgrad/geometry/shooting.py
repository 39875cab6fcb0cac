"""Manifolds whose geodesics are known from their start alone: the way to a given point is found by shooting."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.geometry.smooth import length


class Shooting(Manifold):
    """`arrive` gives a geodesic's end and velocity; `log` solves for the start. `distance` has exact gradients."""

    @abstractmethod
    def arrive(self, point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """The geodesic at time 1: where it is, and its velocity there."""

    @abstractmethod
    def aim(self, point: Tensor, other: Tensor) -> Tensor:
        """`log`, for detached points (b, n)."""

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self.arrive(point, tangent)[0]

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        """As a number: no gradients. ValueError where shooting does not arrive."""
        point, other = torch.broadcast_tensors(self.check(point).detach(), self.check(other).detach())
        n = point.shape[-1]
        return self.aim(point.reshape(-1, n), other.reshape(-1, n)).view(point.shape)

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        """With gradients by the first variation: -G v / d at the start, G v' / d at the end."""
        velocity = self.log(point, other)
        found = self.norm(point.detach(), velocity)
        if not (point.requires_grad or other.requires_grad):
            return found
        end = self.arrive(point.detach(), velocity)[1].detach()
        moved = self.inner(other.detach(), end, other - other.detach())
        moved = moved - self.inner(point.detach(), velocity, point - point.detach())
        return found + moved / torch.where(found > 0, found, 1.0)

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        return self.carry(point, self.log(point, other), vector)[1]


def scale(manifold: Manifold, point: Tensor, misfit: Tensor) -> Tensor:
    """Length of a misfit near the point."""
    return length(manifold.inner(point, misfit, misfit))
