"""Manifolds whose geodesics are known from their start alone: the way to a given point is found by shooting."""

from __future__ import annotations

import warnings
from abc import abstractmethod

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold


class Shooting(Manifold):
    """`arrive` gives a geodesic's end and velocity; `log` solves for the start. `distance` has exact gradients."""

    @abstractmethod
    def arrive(self, point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """The geodesic at time 1: where it is, and its velocity there.

        Args:
            point: Where it starts, shape (..., n).
            tangent: Its velocity there.
        """

    @abstractmethod
    def aim(self, point: Tensor, other: Tensor) -> Tensor:
        """`log`, for detached points, in float64 where there is one; NaN in rows without a way.

        Args:
            point: Where the geodesics start, shape (b, n).
            other: Where they arrive, shape (b, n).
        """

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self.arrive(point, tangent)[0]

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        """The velocity with which the geodesic from `point` reaches `other`, without gradients, computed in float64.

        Args:
            point: Where it starts, shape (..., n).
            other: Where it arrives.

        Returns:
            A tangent at `point`. NaN, and a warning, for pairs of a batch without a way.

        Raises:
            ValueError: Where no pair has a way: the points are too far apart for the work that is allowed.
        """
        point, other = torch.broadcast_tensors(self.check(point).detach(), self.check(other).detach())
        flat, goal = (x.reshape(-1, point.shape[-1]) for x in (point, other))
        if point.device.type != "mps":
            flat, goal = flat.double(), goal.double()
        velocity = self.aim(flat, goal)
        self._tell_lost(torch.isnan(velocity).any(1))
        return velocity.to(point.dtype).view(point.shape)

    def _tell_lost(self, lost: Tensor) -> None:
        """A warning where some rows are lost, ValueError where all are."""
        count, many = int(lost.sum()), len(lost)
        words = f"no geodesic of {self!r} was found between {count} of {many} pairs of points within the work allowed"
        if count and count == many:
            raise ValueError(f"{words}: they are too far apart; go by a point between them")
        if count:
            warnings.warn(f"{words}: NaN there; they are too far apart, go by points between them", stacklevel=4)

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        """With gradients by the first variation: -G v / d at the start, G v' / d at the end."""
        velocity = self.log(point, other)
        length = self.norm(point.detach(), velocity)
        if not (point.requires_grad or other.requires_grad):
            return length
        end = self.arrive(point.detach(), velocity)[1].detach()
        moved = self.inner(other.detach(), end, other - other.detach())
        moved = moved - self.inner(point.detach(), velocity, point - point.detach())
        return length + moved / torch.where(length > 0, length, 1.0)

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        return self.carry(point, self.log(point, other), vector)[1]
