"""Draws from an unnormalised density: Langevin dynamics with Metropolis' correction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_positive
from natgrad.ground.densities import Density
from natgrad.ground.pure import run_detached
from natgrad.ground.spaces import Params


@dataclass(frozen=True)
class Langevin:
    """x <- x + step grad log p(x) + sqrt(2 step) z, z ~ N(0, I), `steps` times from where it starts.

    Args:
        steps: Number of moves.
        step: Step length, in squared units of x.
        adjusted: Accept or refuse each move (Metropolis; MALA), so that the draws are from p for every step length.
            False accepts every move, with a bias of order `step`.

    Raises:
        ValueError: For steps < 1 or step <= 0.
    """

    steps: int = 20
    step: float = 0.01
    adjusted: bool = True

    def __post_init__(self) -> None:
        check_integer("steps", self.steps)
        check_positive("step", self.step)

    @torch.no_grad()
    def draw(self, density: Density, params: Params, start: Tensor, generator: torch.Generator) -> Tensor:
        """One draw per example of `start`.

        Args:
            density: log p.
            params: Its parameters, name -> tensor.
            start: Where the chains start, shape (b, ...).
            generator: Source of the noise.

        Returns:
            Shape (b, ...).
        """
        point = {name: p.detach() for name, p in params.items()}
        x, here = start, self._at(density, point, start)
        for _ in range(self.steps):
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
            moved = x + self.step * here[1] + math.sqrt(2 * self.step) * noise
            there = self._at(density, point, moved)
            if self.adjusted:
                accepted = self._accept(x, moved, here, there, generator)
                wide = accepted.view(-1, *[1] * (x.dim() - 1))
                moved = torch.where(wide, moved, x)
                there = torch.where(accepted, there[0], here[0]), torch.where(wide, there[1], here[1])
            x, here = moved, there
        return x

    def _at(self, density: Density, params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        return run_detached(lambda: density.log_p(params, x)), density.scores(params, x).view(x.shape)

    def _accept(
        self,
        x: Tensor,
        moved: Tensor,
        here: tuple[Tensor, Tensor],
        there: tuple[Tensor, Tensor],
        generator: torch.Generator,
    ) -> Tensor:
        """Metropolis and Hastings: log u < log p(y) + log q(x | y) - log p(x) - log q(y | x); a NaN is a refusal."""

        def log_q(to: Tensor, origin: Tensor, slope: Tensor) -> Tensor:
            return -(to - origin - self.step * slope).flatten(1).square().sum(1) / (4 * self.step)

        gain = there[0] - here[0] + log_q(x, moved, there[1]) - log_q(moved, x, here[1])
        drawn = torch.rand(len(x), generator=generator, dtype=x.dtype).to(x.device)
        return drawn.log() < gain
