"""Descent on a manifold with momentum: a retraction for the step, a transport for what is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold


@dataclass(frozen=True)
class Descent:
    """Natural gradient descent with heavy-ball momentum on a manifold.

    step(point, gradient, velocity) -> (point, velocity): v <- momentum * v + natural gradient, point <- point moved by
    -lr v, v carried there. The step is `retract`, which never leaves the domain for any rate. transport: "cheap" for
    `translate`, "parallel" for `transport`. What changes is returned: keep it for a checkpoint. At points so extreme
    that a direction overflows, it is left out.
    """

    manifold: Manifold
    lr: float
    momentum: float = 0.9
    transport: Literal["cheap", "parallel"] = "cheap"

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}, expected a positive number")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}, expected at least 0 and below 1")
        if self.transport not in ("cheap", "parallel"):
            raise ValueError(f"transport is {self.transport!r}, expected 'cheap' or 'parallel'")

    def step(self, point: Tensor, gradient: Tensor, velocity: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One step from partial derivatives at the point. velocity: what the last step returned, None at first."""
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError("gradient is not finite: look for a NaN in the loss")
        natural = self.manifold.natural(point, gradient)
        heading = natural if velocity is None else self.momentum * velocity + natural
        heading = torch.where(torch.isfinite(self.lr * heading), heading, 0.0)
        new = self.manifold.retract(point, -self.lr * heading)
        carry = self.manifold.transport if self.transport == "parallel" else self.manifold.translate
        carried = carry(point, new, heading)
        return new, torch.where(torch.isfinite(carried), carried, 0.0)
