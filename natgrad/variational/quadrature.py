"""Points and weights that stand for a standard normal distribution in d dimensions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_range
from natgrad.ground.linalg import require_factor

LARGEST_GRID = 2**16
REPLICATES, SEEDS = 8, 10_007
"""Of Sobol's points, other scramblings that tell their error; how far their seeds are from the first one's."""


class Points(ABC):
    """How an expectation under N(0, I) is taken: sum_s w_s f(z_s)."""

    @abstractmethod
    def at(self, d: int, step: int) -> tuple[Tensor, Tensor]:
        """Points and weights, in float64.

        Args:
            d: Number of dimensions.
            step: Number of the step, for points that are drawn anew.

        Returns:
            z (s, d) and w (s,), with the sum 1.
        """

    @property
    def steady(self) -> bool:
        """True if they are the same at every step."""
        return False

    def others(self) -> Sequence[Points]:
        """Other points for the same expectations, by which the error of these is known."""
        return [Sobol(seed=SEEDS + k) for k in range(REPLICATES)]


@dataclass(frozen=True)
class Sobol(Points):
    """Scrambled Sobol points with their negatives, scaled so that their second moment is I: exact for cubic f.

    Args:
        count: Number of points, at least 4 d are taken; None for the larger of 128 and 4 d.
        fresh: True for other points at every step, for gradients that are right on average; False for the same ones, so
            that the steps converge to the last digit.
        seed: Of the scrambling.

    Raises:
        ValueError: If count is no integer >= 2.
    """

    count: int | None = None
    fresh: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count is not None:
            check_integer("count", self.count, 2, hint=", or None")

    @property
    def steady(self) -> bool:
        return not self.fresh

    def others(self) -> Sequence[Points]:
        return [Sobol(self.count, seed=self.seed + SEEDS + k) for k in range(REPLICATES)]

    def at(self, d: int, step: int) -> tuple[Tensor, Tensor]:
        half = max(self.count or 128, 4 * d) // 2
        return _sobol(half, d, self.seed + (step if self.fresh else 0))


@lru_cache(maxsize=4)
def _sobol(half: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    uniform = torch.quasirandom.SobolEngine(d, scramble=True, seed=seed).draw(half, dtype=torch.float64)
    one_side = torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12))
    z = torch.cat([one_side, -one_side])
    factor = require_factor(z.mT @ z / len(z), f"{2 * half} of Sobol's points do not span {d} dimensions: raise count")
    z = torch.linalg.solve_triangular(factor, z.mT, upper=False).mT
    return z, z.new_full((len(z),), 1 / len(z))


@dataclass(frozen=True)
class GaussHermite(Points):
    """The grid of `order` nodes per dimension: exact for polynomials of degree 2 order - 1.

    Args:
        order: Nodes per dimension, 1 to 200.

    Raises:
        ValueError: If the order is out of range, or the grid would have more than 65536 points.
    """

    order: int = 32

    def __post_init__(self) -> None:
        check_range("order", check_integer("order", self.order), "[1, 200]")

    @property
    def steady(self) -> bool:
        return True

    def others(self) -> Sequence[GaussHermite]:
        return [GaussHermite(self.order - k) if self.order > k else GaussHermite(self.order + k) for k in (1, 2)]

    def at(self, d: int, step: int) -> tuple[Tensor, Tensor]:
        if self.order**d > LARGEST_GRID:
            raise ValueError(f"order {self.order} in {d} dimensions has {self.order}^{d} points; use Sobol()")
        return _span_grid(self.order, d)


@lru_cache(maxsize=4)
def _span_grid(order: int, d: int) -> tuple[Tensor, Tensor]:
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(order))
    weights = weights / weights.sum()
    grid = torch.cartesian_prod(*[nodes] * d).view(-1, d)
    return grid, torch.cartesian_prod(*[weights] * d).view(-1, d).prod(1)


@dataclass(frozen=True)
class Draws(Points):
    """Independent draws and their negatives, other ones at every step; the generator is seeded with seed and step.

    Args:
        count: Number of points, even.
        seed: Of the draws.

    Raises:
        ValueError: If count is no even number >= 2.
    """

    count: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 2 or self.count % 2:
            raise ValueError(f"count is {self.count!r}, expected an even number >= 2")

    def at(self, d: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        one_side = torch.randn(self.count // 2, d, generator=generator, device=generator.device, dtype=torch.float64)
        return torch.cat([one_side, -one_side]), one_side.new_full((self.count,), 1 / self.count)


def default_points(d: int) -> Points:
    """A grid in one or two dimensions, Sobol points beyond."""
    return GaussHermite(32) if d <= 2 else Sobol()
