"""A step along a curve: the direction with its second-order correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.rules.quadratic import FlatStep


@dataclass(frozen=True)
class BentStep(FlatStep):
    """A step t v + t^2 b along a curve: its slope and forms are those of t v.

    Attributes:
        vector: t v + t^2 b, shape (n,).
        image: G t v.
        straight: t v, shape (n,).
    """

    straight: Tensor

    @property
    def tangent(self) -> Tensor:
        return self.straight

    @staticmethod
    def of(tangent: Tensor, image: Tensor, bend: Tensor) -> BentStep:
        """The step at t = 1.

        Args:
            tangent: v, shape (n,).
            image: G v, shape (n,).
            bend: b, shape (n,).
        """
        return BentStep(tangent + bend, image, tangent)

    def scale_by(self, factor: Tensor | float) -> BentStep:
        bend = factor * factor * (self.vector - self.straight)
        return BentStep(factor * self.straight + bend, factor * self.image, factor * self.straight)

    def form(self) -> Tensor:
        return self.image @ self.straight

    def damped_form(self, damping: Tensor | float) -> Tensor:
        return self.form() + (damping * self.straight) @ self.straight

    def nothing(self) -> BentStep:
        return BentStep(*(torch.zeros_like(self.vector) for _ in range(3)))
