"""Search of finitely many points by the natural gradient of E_p[f] itself: f counts by its values, not by ranks."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from natgrad.families import Slope as Slope
from natgrad.families import natural_slope as natural_slope
from natgrad.ground.linalg import all_finite
from natgrad.search.base import Best, Search, build_generator
from natgrad.search.ranking import CGA, PBIL, Ranking

MORE = 1.2  # draws per statistic before the first step
SAME = 20  # generations of equal values after which nothing more is expected
COLLAPSED = 3  # likewise, of one candidate alone
PATIENCE = 100  # evaluations per bit without a better value, likewise
NATS = 1.0  # that the draws of a generation are worth, per free statistic, where half of f is explained
EXACT = 1e-22  # share of the variance of values that a slope leaves unexplained by round-off
LIGHT = 1e-3  # draws whose weight fell below this share of the largest are forgotten
SEARCHED = tuple(10.0**k for k in (-13, -10, *range(-7, 3)))
"""Ridges, with small ones: coefficients of one f may lie ten orders of magnitude apart."""


class Relaxation(Search):
    """An exponential family p(x) ~ exp(theta T(x)) over finitely many points, moved by the natural gradient of E_p[f].

    theta <- theta - rate b with the slope b of f on T over the draws so far, reweighted to the present p. The rate
    gives the step the length 1/2 rate^2 Var(b T) = entropy exp(-6 (1 - explained)) nats, where `explained` is the share
    of f's variance that T explains. If T explains f, the step goes for the minimum at once; if it explains half of it,
    the step is a twentieth of that. The step is never longer than what a generation tells, popsize / statistics *
    explained / (1 - explained) nats. Coefficients that may be noise are shrunk. Those that push a parameter beyond its
    limit do not count in the length, so that light weights move once the heavy ones are settled.

    Args:
        d: Number of variables.
        statistics: Number of statistics K.
        popsize: Candidates per generation.
        seed: Of the search's own generator.
        entropy: Of the uniform distribution, in nats.
    """

    STATE = ("theta", "slope", "_generator", "_archive", "_same", "_collapsed", "_since")
    entropy: float

    def __init__(self, d: int, statistics: int, popsize: int, seed: int | None, entropy: float) -> None:
        self.popsize, self.entropy = popsize, entropy
        self.theta = torch.zeros(statistics, dtype=torch.float64)
        self.nfev = self.nit = 0
        self.best = Best(torch.zeros(d, dtype=torch.float64), torch.inf, 0)
        self.slope: Slope | None = None
        self._generator = build_generator(seed, self.theta.device)
        empty = torch.zeros(0, dtype=torch.float64)
        self._archive = Archive(torch.zeros(0, d, dtype=torch.float64), empty, empty, empty.long())
        self._same, self._collapsed = 0, False
        self._since = 0  # evaluations after which another way to search began, with patience of its own

    def tell(self, X: Tensor, F: Tensor) -> None:
        before = self.theta
        super().tell(X, F)
        if not all_finite(self.theta):  # a step that is not finite is not taken
            self.theta = before if before.shape == self.theta.shape else torch.zeros_like(self.theta)

    @abstractmethod
    def statistics(self, points: Tensor) -> Tensor:
        """T, shape (N, K).

        Args:
            points: Shape (N, d).
        """

    @abstractmethod
    def _limit_parameters(self, theta: Tensor) -> Tensor:
        """Parameters (K,) brought back to where no probability is too close to 0 or 1."""

    @property
    def archive(self) -> int:
        """How many evaluated points are still in use."""
        return len(self._archive.values)

    def stop(self) -> str | None:
        if self._same >= COLLAPSED and self._collapsed:
            return f"converged: all candidates were the same, with equal values for {self._same} generations"
        if self._same >= SAME:
            return f"flat: all values were equal for {self._same} generations"
        since = self.nfev - max(self.best.nfev, self._since)
        if since >= PATIENCE * max(10.0, self.entropy / math.log(2)):
            return f"converged: no better value in {since} evaluations"
        return None

    def measures(self) -> dict[str, float]:
        """`explained`, the share of f's variance that the statistics explain, and the number of `statistics`."""
        explained = 0.0 if self.slope is None else self.slope.explained
        return {"explained": explained, "statistics": float(len(self.theta))}

    def _move(self, points: Tensor, values: Tensor) -> None:
        self._count_equal_values(points, values)
        draws = points, values, self.statistics(points) @ self.theta, torch.full((len(values),), self.nit)
        self._archive = Archive(*map(torch.cat, zip(self._archive, draws, strict=True)))
        self._update()

    def _count_equal_values(self, points: Tensor, values: Tensor) -> None:
        self._same = self._same + 1 if bool((values == values[0]).all()) else 0
        self._collapsed = bool((points == points[0]).all())

    def _update(self) -> None:
        """One natural gradient step."""
        if not self._has_enough_draws(self._count_free()):
            return
        statistics = self.statistics(self._archive.points)
        weights = self._weigh_draws(statistics)
        values = scale_to_unit_range(replace_infinite_values(self._archive.values))
        self.slope = self._rescale_exact_slope(statistics, values) or natural_slope(
            *merge_repeated_points(self._archive.points, statistics, values, weights), ridges=SEARCHED
        )
        self.theta = self._take_step(statistics, values, weights, self.slope)
        weights = self._weigh_draws(statistics)
        heavy = (weights > LIGHT * weights.max()) | (self._archive.born == self.nit)
        self._archive = Archive(*(column[heavy] for column in self._archive))

    def _rescale_exact_slope(self, statistics: Tensor, values: Tensor) -> Slope | None:
        """The last slope in the present unit, if it predicts every draw: f lies in the span, and it stays exact."""
        # A new fit would know less, since most draws from before the first step have been forgotten.
        if self.slope is None or len(self.slope.value) != statistics.shape[1]:
            return None
        image = statistics @ self.slope.value
        image, values = image - image.mean(), values - values.mean()
        unit = float(image @ values) / max(float(image @ image), 1e-300)
        if not float((values - unit * image).square().sum()) <= EXACT * float(values.square().sum()):
            return None
        return Slope(unit * self.slope.value, self.slope.explained, self.slope.ridge)

    def _count_free(self) -> int:
        """How many of the statistics are independent."""
        return len(self.theta)

    def _has_enough_draws(self, count: int) -> bool:
        """True if the first, uniform draws are more than the statistics; otherwise the slope is not exact."""
        # Steps on fewer draws were seen to concentrate on patterns that happened to be drawn, and to end there.
        if self.slope is not None:
            return True
        everything = 0.9 * math.exp(min(self.entropy, 700.0))
        needed = min(MORE * count, everything)
        points = self._archive.points
        return len(points) >= needed and len(torch.unique(points, dim=0)) >= needed

    def _weigh_draws(self, statistics: Tensor) -> Tensor:
        return weigh_past_draws(statistics @ self.theta - self._archive.log_q, self._archive.born)

    def _take_step(self, statistics: Tensor, values: Tensor, weights: Tensor, slope: Slope) -> Tensor:
        direction = self._drop_limited(shrink_slope(slope, statistics, values, weights))
        share = weights / weights.sum()
        image = statistics @ direction
        variance = float(share @ (image - share @ image).square())
        if not variance > 0:
            return self.theta
        left = 1 - min(1.0, max(0.0, slope.explained))
        nats = NATS * self.popsize / self._count_free() * (1 - left) / max(left, 1e-12)
        # at least the step at which nothing is explained, or symmetric functions would have none
        radius = self.entropy * min(math.exp(-6 * left), max(math.exp(-6), nats / self.entropy))
        rate = math.sqrt(2 * radius / variance)  # so that 1/2 rate^2 Var(b T) = radius
        return self._limit_parameters(self.theta - rate * direction)

    def _drop_limited(self, direction: Tensor) -> Tensor:
        """The direction without the parameters that it pushes against their limit: they would use up the step."""
        return direction

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.slope = None if state["slope"] is None else Slope(*state["slope"])


class Archive(NamedTuple):
    """The draws that are still in use, N of them."""

    points: Tensor  # (N, d)
    values: Tensor  # f of them, (N,)
    log_q: Tensor  # log-probability where they were drawn, up to a constant of the generation, (N,)
    born: Tensor  # the number of their generation, ascending, (N,)


def shrink_slope(slope: Slope, statistics: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """b_k t_k^2 / (1 + t_k^2) with t_k the coefficient b_k in units of its standard error, shape (K,)."""
    # A coefficient that hardly differs from noise hardly moves; where f lies in the span of T, the errors are zero. The
    # error is that of a regression whose statistics do not correlate: residual variance / (effective draws * Var T_k).
    share = weights / weights.sum()  # E_p by reweighted draws
    spread = share @ (statistics - share @ statistics).square()
    variance = float(share @ (values - share @ values).square())
    left = (1 - min(1.0, max(0.0, slope.explained))) * variance
    error = left * share.square().sum() / spread.clamp(min=1e-12)
    size = slope.value.square()
    return slope.value * (size / (size + error).clamp(min=1e-300))


def weigh_past_draws(log_ratios: Tensor, generation: Tensor) -> Tensor:
    """Weights (N,) of draws from earlier distributions q_g, for expectations under the present p."""
    # Within a generation they are normalised, so that no partition function is needed. A generation counts for its
    # effective number of draws.
    place, counts = torch.unique_consecutive(generation, return_inverse=True, return_counts=True)[1:]
    zeros = log_ratios.new_zeros(len(counts))
    largest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, place, log_ratios, "amax")
    odds = (log_ratios - largest[place]).exp()
    share = odds / zeros.index_add(0, place, odds)[place]
    concentration = zeros.index_add(0, place, share.square())
    return share / concentration[place] / concentration.reciprocal().sum()


def take_ranked_step(mean: Tensor, samples: Tensor, values: Tensor, update: PBIL | CGA, n: int) -> Tensor:
    """mean + sum_i w_i (T_i - mean), a natural gradient step on the expected weight of the rank."""
    ranking = Ranking.of(values)
    weights = ranking.share(update.weights(len(values), n))
    return mean + weights @ (samples[ranking.order] - mean)


def merge_repeated_points(
    points: Tensor, statistics: Tensor, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One row per distinct point, with the sum of its weights and the mean of its values."""
    # A point that was drawn twice would predict itself when one of the two is left out.
    distinct, place = torch.unique(points, dim=0, return_inverse=True)
    if len(distinct) == len(points):
        return statistics, values, weights
    zeros = values.new_zeros(len(distinct))
    mass = zeros.index_add(0, place, weights.clamp(min=1e-300))
    mean = zeros.index_add(0, place, weights.clamp(min=1e-300) * values) / mass
    rows = torch.empty_like(statistics[: len(distinct)])
    rows[place] = statistics
    return rows, mean, mass


def scale_to_unit_range(values: Tensor) -> Tensor:
    """Values brought to the range 0 to 1, so that a search does not depend on the unit of f."""
    values = values / values.abs().max().clamp(min=torch.finfo(values.dtype).tiny)  # differences of huge ones overflow
    least = values.min()
    return (values - least) / (values.max() - least).clamp(min=torch.finfo(values.dtype).tiny)


def replace_infinite_values(values: Tensor) -> Tensor:
    """Infinitely bad values replaced by one standard deviation above the worst finite one."""
    finite = torch.isfinite(values)
    fine = values[finite]
    if not len(fine) or len(fine) == len(values):
        return torch.where(finite, values, 0.0)
    worst = fine.max() + (fine.std() if len(fine) > 1 else 1.0)
    return torch.where(finite, values, torch.where(values > 0, worst, fine.min()))
