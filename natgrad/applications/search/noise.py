"""Objectives with noise: evaluated as often as the ranking of the candidates needs to mean something."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import as_count
from natgrad.applications.search.objective import Objective

CHUNK = 4096  # rows handed to f at once


@dataclass(frozen=True)
class NoiseHandling:
    """How often a noisy f is evaluated: Hansen et al. 2009, uncertainty handling for evolution strategies.

    In each generation some of the candidates are evaluated twice. If their places in the ranking differ by more than
    chance would let them where the noise is harmless, the evaluations per point grow, else they shrink.

    share: of the candidates, evaluated twice, at least two of them.   threshold: of the change of places, in (0, 1):
    smaller means more evaluations.   growth: factor of the evaluations per point.   most: bound on them.
    """

    share: float = 0.3
    threshold: float = 0.2
    growth: float = 1.5
    most: int | None = None

    def __post_init__(self) -> None:
        for name in ("share", "threshold"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number in (0, 1]")
        if not self.growth > 1:
            raise ValueError(f"growth is {self.growth}, expected a factor > 1")
        if self.most is not None:
            as_count(self.most, "most", 1, "evaluations per point")


class Repeated:
    """f evaluated several times per point: `F = repeated(X)` are means, and how many it takes is adapted.

    Where `search.ask()` gives X, `search.tell(X, F)`. Evaluations that failed are left out of the means; a point at
    which all did is infinitely bad.

    Args:
        f: Values (N,) of a batch (N, d), or the value of one point (d,); or an `Objective`.
        handling: How.
        vectorized: True if f takes batches, False if it takes a point, None to ask.

    Attributes:
        evaluations: Per point, at present.
        nfev: Calls of f so far.
        change: The last excess of the change of places over its limit.
    """

    def __init__(
        self,
        f: Callable[[Tensor], Any] | Objective,
        handling: NoiseHandling | None = None,
        *,
        vectorized: bool | None = None,
    ) -> None:
        self.objective = f if isinstance(f, Objective) else Objective(f, vectorized)
        self.handling = NoiseHandling() if handling is None else handling
        self.change = 0.0
        self._wanted = 1.0

    @property
    def nfev(self) -> int:
        """Calls of f so far, each row of a batch being one."""
        return self.objective.nfev

    @property
    def evaluations(self) -> int:
        """Evaluations per point at present."""
        return round(self._wanted)

    def cost(self, popsize: int) -> int:
        """Evaluations that the next generation takes."""
        return self.evaluations * (popsize + self._twice(popsize))

    def __call__(self, X: Tensor) -> Tensor:
        values = self.mean(X, self.evaluations)
        twice = self._twice(len(X))
        again = self.mean(X[:twice], self.evaluations)
        self.change = rank_change(values, again, self.handling.threshold)
        growth = self.handling.growth if self.change > 0 else 1 / self.handling.growth
        most = math.inf if self.handling.most is None else self.handling.most
        self._wanted = min(max(1.0, self._wanted * growth), most)
        return torch.cat([(values[:twice] + again) / 2, values[twice:]])

    def mean(self, X: Tensor, count: int) -> Tensor:
        """Means (N,) of `count` evaluations of each point, of those that have a value."""
        rows = X.repeat(count, 1)
        values = torch.cat([self.objective.evaluate(part) for part in rows.split(CHUNK)])
        means = values.reshape(count, len(X)).nanmean(0)
        return torch.where(means.isnan(), torch.inf, means)

    def _twice(self, popsize: int) -> int:
        return min(popsize, max(2, round(self.handling.share * popsize)))

    def state_dict(self) -> dict[str, Any]:
        """What has been learned about the noise."""
        return {"wanted": self._wanted, "change": self.change, "objective": self.objective.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._wanted, self.change = state["wanted"], state["change"]
        self.objective.load_state_dict(state["objective"])


def rank_change(values: Tensor, again: Tensor, threshold: float) -> float:
    """Mean excess of the change of places between two evaluations; above zero, noise decides the ranking.

    values: (N,), first evaluations.   again: (k,), second ones of the first k points. Both are ranked in one list of
    N + k values; a point's change is the number of places between its two values, and its limit the
    threshold-quantile / 2 of the changes that a random place would give. Hansen et al. 2009, table 1.
    """
    places = midranks(torch.cat([values, again]))
    first, second = places[: len(again)], places[len(values) :]
    changes = ((second - first).abs() - 1).clamp(min=0)
    possible = torch.arange(1, len(places), dtype=torch.float64, device=places.device)
    limits = [
        torch.quantile((possible - (mine - (mine > other).to(mine.dtype)).unsqueeze(1)).abs(), threshold / 2, dim=1)
        for mine, other in ((first, second), (second, first))
    ]
    return float((2 * changes - limits[0] - limits[1]).mean())


def midranks(values: Tensor) -> Tensor:
    """Places (N,) from 1 in ascending order; equal values share the mean of theirs."""
    below = (values < values.unsqueeze(1)).sum(1)
    upto = (values <= values.unsqueeze(1)).sum(1)
    return (below + upto + 1).to(torch.float64) / 2
