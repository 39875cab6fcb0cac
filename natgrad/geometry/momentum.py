"""Descent on a manifold with momentum: a retraction for the step, a transport for what is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.ground.checks import check_choice, check_positive, check_share


@dataclass(frozen=True)
class Descent:
    """Natural gradient descent with heavy-ball momentum on a manifold.

    v <- momentum * v + natural gradient, point <- point moved by -lr v, v carried there. The step is `retract`, which
    never leaves the domain for any rate. What changes is returned: keep it for a checkpoint. At points so extreme that
    a direction overflows, that direction is left out.

    Args:
        manifold: Where the points lie.
        lr: The learning rate.
        momentum: Share of the last velocity that is kept, 0 <= momentum < 1.
        transport: "cheap" carries v by `translate`, "parallel" by `transport`.

    Raises:
        ValueError: For a number out of range.

    Example:
        >>> descent = ng.geometry.Descent(ng.geometry.Simplex(), lr=0.1, momentum=0.0)
        >>> point, velocity = torch.full((3,), 1 / 3), None
        >>> for _ in range(3):
        ...     point, velocity = descent.step(point, torch.tensor([1.0, 0.0, 0.0]), velocity)
        >>> bool(point[0] < 1 / 3), round(float(point.sum()), 4)
        (True, 1.0)
    """

    manifold: Manifold
    lr: float
    momentum: float = 0.9
    transport: Literal["cheap", "parallel"] = "cheap"

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_share("momentum", self.momentum)
        check_choice("transport", self.transport, ("cheap", "parallel"))

    def step(self, point: Tensor, gradient: Tensor, velocity: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One step from partial derivatives at the point: the new point and the new velocity.

        Args:
            point: Shape (..., event).
            gradient: Partial derivatives at the point, the same shape.
            velocity: What the last step returned, None at first.
        """
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError("gradient is not finite: look for a NaN in the loss")
        natural = self.manifold.natural(point, gradient)
        heading = natural if velocity is None else self.momentum * velocity + natural
        heading = torch.where(torch.isfinite(self.lr * heading), heading, 0.0)
        new = self.manifold.retract(point, -self.lr * heading)
        carry = self.manifold.transport if self.transport == "parallel" else self.manifold.translate
        carried = carry(point, new, heading)
        return new, torch.where(torch.isfinite(carried), carried, 0.0)
