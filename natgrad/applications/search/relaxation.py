"""Search of finitely many points by the natural gradient of E_p[f] itself, f's values taken at their word."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import Best, Search, new_generator
from natgrad.applications.search.ranking import Ranking
from natgrad.applications.search.rates import CGA, PBIL
from natgrad.applications.search.regression import Slope, natural_slope, reuse

MORE = 1.2  # draws per statistic before the first step
SAME = 20  # generations of equal values after which nothing more is expected
PATIENCE = 100  # evaluations per bit without a better value, likewise
KEPT = 1e-3  # draws whose weight fell below this share of the largest are forgotten


class Relaxation(Search):
    """An exponential family p(x) ~ exp(theta T(x)) over finitely many points, moved by the natural gradient of E_p[f].

    theta <- theta - rate b with the slope b of f on T over the draws so far, reweighted to the present p. The rate
    gives the step the length 1/2 rate^2 Var(b T) = entropy exp(-6 (1 - explained)) nats, the entropy being that of the
    uniform distribution: where T explains f, it goes for the minimum at once, where it explains half of it the step is
    a twentieth of that.
    """

    entropy: float

    def __init__(self, d: int, statistics: int, popsize: int, seed: int | None, entropy: float) -> None:
        self.popsize, self.entropy = popsize, entropy
        self.theta = torch.zeros(statistics, dtype=torch.float64)
        self.nfev = self.nit = 0
        self.best = Best(torch.zeros(d, dtype=torch.float64), torch.inf, 0)
        self.slope: Slope | None = None
        self._generator = new_generator(seed, torch.device("cpu"))
        self._points = torch.zeros(0, d, dtype=torch.float64)
        self._values = torch.zeros(0, dtype=torch.float64)
        self._log_q = torch.zeros(0, dtype=torch.float64)
        self._born = torch.zeros(0, dtype=torch.long)
        self._same, self._collapsed = 0, False

    @abstractmethod
    def statistics(self, points: Tensor) -> Tensor:
        """T (N, K) of points (N, d)."""

    @abstractmethod
    def _limited(self, theta: Tensor) -> Tensor:
        """Parameters (K,) brought back to where no probability is too close to 0 or 1."""

    @property
    def archive(self) -> int:
        """How many evaluated points are still in use."""
        return len(self._values)

    def stop(self) -> str | None:
        if self._same >= SAME and self._collapsed:
            return f"converged: all candidates were the same, with equal values for {self._same} generations"
        if self._same >= SAME:
            return f"flat: all values were equal for {self._same} generations"
        since = self.nfev - self.best.nfev
        if since >= PATIENCE * max(10.0, self.entropy / math.log(2)):
            return f"converged: no better value in {since} evaluations"
        return None

    def measures(self) -> dict[str, float]:
        """`explained`, the share of f's variance that the statistics explain, and the number of `statistics`."""
        explained = 0.0 if self.slope is None else self.slope.explained
        return {"explained": explained, "statistics": float(len(self.theta))}

    def _dim(self) -> int:
        return len(self.best.x)

    def _move(self, points: Tensor, values: Tensor) -> None:
        self._watch(points, values)
        self._points = torch.cat([self._points, points])
        self._values = torch.cat([self._values, values])
        self._log_q = torch.cat([self._log_q, self.statistics(points) @ self.theta])
        self._born = torch.cat([self._born, torch.full((len(values),), self.nit)])
        self._update()

    def _watch(self, points: Tensor, values: Tensor) -> None:
        self._same = self._same + 1 if bool((values == values[0]).all()) else 0
        self._collapsed = bool((points == points[0]).all())

    def _update(self) -> None:
        """One natural gradient step."""
        statistics = self.statistics(self._points)
        if not self._enough(self._free()):
            return
        weights = self._weights(statistics)
        self.slope = natural_slope(*merged(self._points, statistics, bounded(self._values), weights))
        self.theta = self._stepped(statistics, weights, self.slope)
        self._forget(statistics)

    def _free(self) -> int:
        """How many of the statistics are independent."""
        return len(self.theta)

    def _enough(self, count: int) -> bool:
        """Whether the first, uniform draws are more than the statistics: below that the slope is not exact.

        Steps on fewer were seen to concentrate on patterns that happened to be drawn, and to end there.
        """
        if self.slope is not None:
            return True
        everything = 0.9 * math.exp(min(self.entropy, 700.0))
        return len(torch.unique(self._points, dim=0)) >= min(MORE * count, everything)

    def _weights(self, statistics: Tensor) -> Tensor:
        log_ratio = statistics @ self.theta - self._log_q
        sizes = torch.unique_consecutive(self._born, return_counts=True)[1].tolist()
        return reuse(list(log_ratio.split(sizes)))

    def _stepped(self, statistics: Tensor, weights: Tensor, slope: Slope) -> Tensor:
        image = statistics @ slope.value
        variance = float(weights @ (image - weights @ image).square())
        if variance <= 1e-18:
            return self.theta
        radius = self.entropy * math.exp(-6 * (1 - min(1.0, max(0.0, slope.explained))))
        return self._limited(self.theta - math.sqrt(2 * radius / variance) * slope.value)

    def _forget(self, statistics: Tensor) -> None:
        weights = self._weights(statistics)
        kept = (weights > KEPT * weights.max()) | (self._born == self.nit)
        self._points, self._values = self._points[kept], self._values[kept]
        self._log_q, self._born = self._log_q[kept], self._born[kept]

    def state_dict(self) -> dict[str, Any]:
        return {
            "theta": self.theta,
            "archive": (self._points, self._values, self._log_q, self._born),
            "generator": self._generator.get_state(),
            "best": (self.best.x, self.best.fun, self.best.nfev),
            "counts": (self.nfev, self.nit, self.popsize, self._same, self._collapsed),
            "slope": None if self.slope is None else (self.slope.value, self.slope.explained, self.slope.ridge),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["best"][0]) != self._dim() or state["counts"][2] != self.popsize:
            raise ValueError(
                f"the state is of a search with {len(state['best'][0])} variables and popsize {state['counts'][2]}, "
                f"this one has {self._dim()} and {self.popsize}: build it with the same arguments"
            )
        self.theta = state["theta"]
        self._points, self._values, self._log_q, self._born = state["archive"]
        self._generator.set_state(state["generator"])
        self.best = Best(*state["best"])
        self.nfev, self.nit, _, self._same, self._collapsed = state["counts"]
        self.slope = None if state["slope"] is None else Slope(*state["slope"])


def ranked_step(mean: Tensor, samples: Tensor, values: Tensor, update: PBIL | CGA, n: int) -> Tensor:
    """mean + sum_i w_i (T_i - mean), a natural gradient step on the expected weight of the rank.

    In expectation coordinates.   mean: E_p[T], (K,).   samples: T (popsize, K).   values: (popsize,).   n: variables.
    """
    ranking = Ranking.of(values)
    weights = ranking.share(update.weights(len(values), n))
    return mean + weights @ (samples[ranking.order] - mean)


def merged(points: Tensor, statistics: Tensor, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One row per distinct point, with the sum of its weights and the mean of its values.

    A point that was drawn twice would predict itself when one of the two is left out.
    """
    distinct, place = torch.unique(points, dim=0, return_inverse=True)
    if len(distinct) == len(points):
        return statistics, values, weights
    zeros = values.new_zeros(len(distinct))
    mass = zeros.index_add(0, place, weights.clamp(min=1e-300))
    mean = zeros.index_add(0, place, weights.clamp(min=1e-300) * values) / mass
    rows = torch.empty_like(statistics[: len(distinct)])
    rows[place] = statistics
    return rows, mean, mass


def bounded(values: Tensor) -> Tensor:
    """Infinitely bad values count as one standard deviation worse than the worst finite one."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return values
    if not bool(finite.any()):
        return torch.zeros_like(values)
    fine = values[finite]
    worst = fine.max() + (fine.std() if len(fine) > 1 else 1.0)
    return torch.where(finite, values, torch.where(values > 0, worst, fine.min()))
