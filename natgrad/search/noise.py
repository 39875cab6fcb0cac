"""Objectives with noise: evaluated as often as a meaningful ranking of the candidates needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_range
from natgrad.ground.messages import write_choices
from natgrad.ground.states import Stateful
from natgrad.search.black_box import BlackBox

CHUNK = 4096  # rows handed to f at once


@dataclass(frozen=True)
class NoiseHandling:
    """How often a noisy f is evaluated: uncertainty handling for evolution strategies.

    In each generation some of the candidates are evaluated twice. If their places in the ranking differ by more than
    they would where the noise is harmless, the evaluations per point grow, else they shrink.

    Args:
        share: Of the candidates that are evaluated twice, in (0, 1]; at least two of them are.
        threshold: Of the change of places, in (0, 1]; smaller means more evaluations.
        growth: Factor by which the evaluations per point grow or shrink.
        most: Bound on the evaluations per point; None for no bound.

    Raises:
        ValueError: If a number is out of its range.

    Reference:
        Hansen et al. 2009.
    """

    share: float = 0.3
    threshold: float = 0.2
    growth: float = 1.5
    most: int | None = None

    def __post_init__(self) -> None:
        for name in ("share", "threshold"):
            check_range(name, getattr(self, name), "(0, 1]")
        check_range("growth", self.growth, "(1, inf)", hint=", a factor")
        if self.most is not None:
            check_integer("most", self.most, 1, hint=": evaluations per point")


class Repeated(Stateful):
    """f evaluated several times per point: `F = repeated(X)` are means, over as many evaluations as it takes.

    For `search.tell(X, repeated(X))`. Evaluations that failed are left out of the means; a point at which all failed is
    infinitely bad.

    Args:
        f: Values (N,) of a batch (N, d), or the value of one point (d,); or a `BlackBox`.
        handling: How often; default `NoiseHandling()`.
        vectorized: True if f takes batches, False if it takes a point, None to find out.

    Attributes:
        change: The last excess of the change of places over its limit.

    Example:
        >>> f = ng.search.Repeated(lambda X: X.square().sum(1) + 0.1 * torch.randn(len(X)))
        >>> search = ng.GaussianSearch([1.0, 1.0], 0.5, seed=0)
        >>> for _ in range(50):
        ...     X = search.ask()
        ...     search.tell(X, f(X))
        >>> f.nfev > 50 * search.popsize
        True
    """

    STATE = ("_wanted", "change", "objective")

    def __init__(
        self,
        f: Callable[[Tensor], Any] | BlackBox,
        handling: NoiseHandling | None = None,
        *,
        vectorized: bool | None = None,
    ) -> None:
        self.objective = f if isinstance(f, BlackBox) else BlackBox(f, vectorized)
        self.handling = NoiseHandling() if handling is None else handling
        self.change = 0.0
        self._wanted = 1.0

    def __repr__(self) -> str:
        return write_choices(self, f=self.objective.f, handling=self.handling, nfev=self.nfev)

    @property
    def nfev(self) -> int:
        """Calls of f so far; each row of a batch is one."""
        return self.objective.nfev

    @property
    def evaluations(self) -> int:
        """Evaluations per point at present."""
        return round(self._wanted)

    def cost(self, popsize: int) -> int:
        """Evaluations that the next generation takes.

        Args:
            popsize: Candidates per generation.
        """
        return self.evaluations * (popsize + self._count_repeated(popsize))

    def __call__(self, X: Tensor) -> Tensor:
        """Means (popsize,) over the evaluations of each point, and the next number of these.

        Args:
            X: Candidates, shape (popsize, d).
        """
        values = self.mean(X, self.evaluations)
        twice = self._count_repeated(len(X))
        again = self.mean(X[:twice], self.evaluations)
        self.change = measure_place_change(values, again, self.handling.threshold)
        growth = self.handling.growth if self.change > 0 else 1 / self.handling.growth
        most = math.inf if self.handling.most is None else self.handling.most
        self._wanted = min(max(1.0, self._wanted * growth), most)
        return torch.cat([(values[:twice] + again) / 2, values[twice:]])

    def mean(self, X: Tensor, count: int) -> Tensor:
        """Means (N,) of `count` evaluations of each point, over those that have a value; infinity if none has.

        Args:
            X: Points, shape (N, d).
            count: Evaluations per point.
        """
        rows = X.repeat(count, 1)
        values = torch.cat([self.objective.evaluate(part) for part in rows.split(CHUNK)])
        means = values.reshape(count, len(X)).nanmean(0)
        return torch.where(means.isnan(), torch.inf, means)

    def _count_repeated(self, popsize: int) -> int:
        return min(popsize, max(2, round(self.handling.share * popsize)))


def measure_place_change(values: Tensor, again: Tensor, threshold: float) -> float:
    """Mean excess of the change of places between two evaluations; above zero, noise decides the ranking."""
    # Both are ranked in one list of N + k values. A point's change is the number of places between its two values, and
    # its limit the threshold-quantile / 2 of the changes that a random place would give. Hansen et al. 2009, table 1.
    both = torch.cat([values, again])
    below, upto = (both < both.unsqueeze(1)).sum(1), (both <= both.unsqueeze(1)).sum(1)
    places = (below + upto + 1).to(torch.float64) / 2  # from 1 on; equal values get the mean of theirs
    first, second = places[: len(again)], places[len(values) :]
    changes = ((second - first).abs() - 1).clamp(min=0)
    possible = torch.arange(1, len(places), dtype=torch.float64, device=places.device)
    limits = [
        torch.quantile((possible - (mine - (mine > other).to(mine.dtype)).unsqueeze(1)).abs(), threshold / 2, dim=1)
        for mine, other in ((first, second), (second, first))
    ]
    return float((2 * changes - limits[0] - limits[1]).mean())
