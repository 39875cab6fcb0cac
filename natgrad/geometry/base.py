"""A statistical model as a Riemannian manifold: lengths, geodesics, transport, and steps that stay inside."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily
from natgrad.geometry.stable_functions import safe_sqrt
from natgrad.ground.linalg import refuse_mapped
from natgrad.ground.messages import Explained, show_dtype
from natgrad.ground.pure import compute_exactly

SHORTENINGS = 50


@compute_exactly
class Manifold(Explained):
    """Points are tensors (..., event), in coordinates that the class names; tangents have the point's shape.

    Leading dimensions are batches and broadcast. A subclass gives the metric (`inner`, `natural`), geodesics (`exp`,
    `log`), Levi-Civita transport, and which points are inside. Angles, lengths and times follow.

    Attributes:
        event: Trailing dimensions of a point: 1 for a vector, 2 for a matrix.
        domain: What `inside` asks for, in the words of an error message.
    """

    event: int = 1
    domain: str = "inside the manifold"

    @abstractmethod
    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The metric: <first, second> at the point, shape (...).

        Args:
            point: Shape (..., event).
            first: A tangent at the point.
            second: A tangent at the point.
        """

    @abstractmethod
    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        """The natural gradient G^-1 g of a function, a tangent at the point.

        Args:
            point: Shape (..., event).
            gradient: g, the partial derivatives in these coordinates.
        """

    @abstractmethod
    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        """Where the geodesic that starts with that velocity is at time 1.

        Args:
            point: Where it starts, shape (..., event).
            tangent: Its velocity.
        """

    @abstractmethod
    def log(self, point: Tensor, other: Tensor) -> Tensor:
        """The velocity with which the geodesic from `point` reaches `other` at time 1, a tangent at `point`.

        Args:
            point: Where it starts, shape (..., event).
            other: Where it arrives.
        """

    @abstractmethod
    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        """A tangent carried in parallel from `point` along the geodesic to `other`: lengths and angles stay.

        Args:
            point: Where the geodesic starts, shape (..., event).
            other: Where it arrives.
            vector: A tangent at `point`.
        """

    @abstractmethod
    def inside(self, point: Tensor) -> Tensor:
        """Whether the point is one of the open manifold, shape (...) of bool.

        Args:
            point: Shape (..., event).
        """

    def norm(self, point: Tensor, tangent: Tensor) -> Tensor:
        """sqrt(<v, v>), in units of sqrt(2 KL), shape (...).

        Args:
            point: Shape (..., event).
            tangent: v, a tangent at the point.
        """
        return safe_sqrt(self.inner(point, tangent, tangent))

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        """Length of the geodesic between two points, shape (...).

        Args:
            point: Where it starts, shape (..., event).
            other: Where it arrives.
        """
        return self.norm(point, self.log(point, other))

    def geodesic(self, point: Tensor, other: Tensor, t: Tensor | float) -> Tensor:
        """The point at time t of the geodesic from `point` (t = 0) to `other` (t = 1), (T, ..., event) for T times.

        Args:
            point: Where it starts, shape (..., event).
            other: Where it is at time 1.
            t: A number, or a tensor (T,) for T points along a new first dimension.
        """
        velocity = self.log(point, other)
        if not isinstance(t, Tensor) or t.dim() == 0:
            return self.exp(point, t * velocity)
        return self.exp(point, t.reshape(-1, *(1,) * velocity.dim()) * velocity)

    def carry(self, point: Tensor, tangent: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        """exp(point, tangent), and the vector carried there in parallel.

        Args:
            point: Where the geodesic starts, shape (..., event).
            tangent: Its velocity.
            vector: Another tangent at the point.
        """
        other = self.exp(point, tangent)
        return other, self.transport(point, other, vector)

    def retract(self, point: Tensor, tangent: Tensor) -> Tensor:
        """A cheap step that starts as the geodesic does and is inside for a tangent of any length.

        Where round-off or overflow spoils even that, the tangent is shortened until it does not.

        Args:
            point: Where the step starts, shape (..., event).
            tangent: Its velocity.

        Raises:
            ValueError: For a point that is not inside or a tangent that is not finite.
        """
        self.check(point)
        if not bool(torch.isfinite(tangent).all()):
            raise ValueError("tangent is not finite: look for a division by zero in the gradient")
        for count in range(SHORTENINGS):
            end = self.curve(point, tangent)
            inside = self.inside(end)
            if bool(inside.all()):
                return end
            tangent = torch.where(self.widen(inside), tangent, tangent * 0.5 ** (1 + count))  # 2^-1275 in the end
        end = self.curve(point, tangent)
        return torch.where(self.widen(self.inside(end)), end, point)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        """The retraction's formula. Default: the geodesic.

        Args:
            point: Where the step starts, shape (..., event).
            tangent: Its velocity.
        """
        return self.exp(point, tangent)

    def translate(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        """A cheap transport: the components kept, projected where tangents are restricted, and the length restored.

        Args:
            point: Where the vector is, shape (..., event).
            other: Where it goes.
            vector: A tangent at `point`.
        """
        moved = self.project(other, vector)
        before, after = self.norm(point, vector), self.norm(other, moved)
        factor = torch.where(after > 0, before / torch.where(after > 0, after, 1.0), 0.0)
        return self.widen(factor) * moved

    def project(self, point: Tensor, vector: Tensor) -> Tensor:
        """The nearest tangent at the point. Default: every vector is one.

        Args:
            point: Shape (..., event).
            vector: The point's shape.
        """
        return torch.broadcast_tensors(point, vector)[1]

    def widen(self, numbers: Tensor) -> Tensor:
        """One number per point, with the trailing dimensions of a point.

        Args:
            numbers: Shape (...).
        """
        return numbers.reshape(*numbers.shape, *(1,) * self.event)

    def check(self, point: Tensor) -> Tensor:
        """The point as it is, checked to be inside.

        Args:
            point: Shape (..., event).

        Raises:
            ValueError: Unless it is inside; within `torch.func.vmap`.
        """
        if not isinstance(point, Tensor) or not point.is_floating_point():
            raise TypeError(f"a point of {self!r} is {show_dtype(point)}, expected a floating-point tensor")
        refuse_mapped(point, f"a point of {self!r}")
        if point.dim() < self.event or not bool(self.inside(point.detach()).all()):
            raise ValueError(self._refusal(point))
        return point

    def _refusal(self, point: Tensor) -> str:
        """What an error message says of a point that is not inside."""
        return f"a point of shape {tuple(point.shape)} is not of {self!r}: expected {self.domain}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def require_family(family: Any) -> ExponentialFamily:
    """The family as it is; TypeError for anything else, such as a distribution of torch with its parameters inside."""
    if not isinstance(family, ExponentialFamily):
        raise TypeError(
            f"family is {family!r}, expected an exponential family of natgrad, such as ng.Normal(): it holds no "
            "parameters, theta says which distribution is meant, as family.from_mean_std(mean, std) gives it"
        )
    return family
