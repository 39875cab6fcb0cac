"""Search of bits: what the independent model and Markov random fields have in common."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import Best, Search, as_popsize, new_generator
from natgrad.applications.search.monomials import Monomials, draw
from natgrad.applications.search.regression import Slope, natural_slope, reuse

MORE = 1.2  # draws per statistic before the first step
SAME = 20  # generations of equal values after which nothing more is expected
KEPT = 1e-3  # draws whose weight fell below this share of the largest are forgotten


class BitSearch(Search):
    """A Markov random field p(s) ~ exp(theta T(s)) over bits, moved by the natural gradient of E_p[f] in theta.

    theta <- theta - rate b with the slope b of f on T over the draws so far, reweighted to the present p. The rate
    gives the step the length 1/2 rate^2 Var(b T) = n ln 2 exp(-6 (1 - explained)) nats: where T explains f, it goes for
    the minimum at once, where it explains half of it the step is a twentieth of that.
    """

    def __init__(self, n: int, monomials: Monomials, popsize: int, seed: int | None, limit: float) -> None:
        self.popsize, self.limit = popsize, limit
        self.monomials = monomials
        self.theta = torch.zeros(len(monomials), dtype=torch.float64)
        self.nfev = self.nit = 0
        self.best = Best(torch.zeros(n, dtype=torch.float64), torch.inf, 0)
        self.slope: Slope | None = None
        self.sweeps = 20
        self._generator = new_generator(seed, torch.device("cpu"))
        self._signs = torch.zeros(0, n, dtype=torch.float64)
        self._values = torch.zeros(0, dtype=torch.float64)
        self._log_q = torch.zeros(0, dtype=torch.float64)
        self._born = torch.zeros(0, dtype=torch.long)
        self._same = 0

    @property
    def archive(self) -> int:
        """How many evaluated points are still in use."""
        return len(self._values)

    def ask(self) -> Tensor:
        n = self._dim()
        start = 2.0 * torch.randint(0, 2, (self.popsize, n), generator=self._generator).to(torch.float64) - 1
        return (draw(self.monomials, self.theta, start, self.sweeps, self._generator) + 1) / 2

    def stop(self) -> str | None:
        if self._same >= SAME:
            return f"flat: all values were equal for {self._same} generations"
        return None

    def measures(self) -> dict[str, float]:
        """`explained`, the share of f's variance that the statistics explain, and the number of `statistics`."""
        explained = 0.0 if self.slope is None else self.slope.explained
        return {"explained": explained, "statistics": float(len(self.monomials))}

    def _dim(self) -> int:
        return len(self.best.x)

    def _checked(self, X: Any, F: Any) -> tuple[Tensor, Tensor]:
        points, values = super()._checked(X, F)
        if not bool(((points == 0) | (points == 1)).all()):
            raise ValueError("X has entries other than 0 and 1, expected the bits that ask() gave")
        return points, values

    def _move(self, points: Tensor, values: Tensor) -> None:
        signs = 2 * points - 1
        self._same = self._same + 1 if bool((values == values[0]).all()) else 0
        self._remember_draws(signs, values)
        self._update()

    def _remember_draws(self, signs: Tensor, values: Tensor) -> None:
        self._signs = torch.cat([self._signs, signs])
        self._values = torch.cat([self._values, values])
        self._log_q = torch.cat([self._log_q, self.monomials.values(signs) @ self.theta])
        self._born = torch.cat([self._born, torch.full((len(values),), self.nit)])

    def _update(self) -> None:
        """One natural gradient step."""
        statistics = self.monomials.values(self._signs)
        if not self._enough(statistics.shape[1]):
            return
        weights = self._weights(statistics)
        self.slope = natural_slope(*merged(self._signs, statistics, bounded(self._values), weights))
        self.theta = self._stepped(statistics, weights, self.slope)
        self._forget(statistics)

    def _enough(self, count: int) -> bool:
        """Whether the first, uniform draws are more than the statistics: below that the slope is not exact.

        Steps on fewer were seen to concentrate on patterns that happened to be drawn, and to end there.
        """
        return self.slope is not None or len(torch.unique(self._signs, dim=0)) >= min(
            MORE * count, 0.9 * 2.0 ** self._dim()
        )

    def _weights(self, statistics: Tensor) -> Tensor:
        log_ratio = statistics @ self.theta - self._log_q
        sizes = torch.unique_consecutive(self._born, return_counts=True)[1].tolist()
        return reuse(list(log_ratio.split(sizes)))

    def _stepped(self, statistics: Tensor, weights: Tensor, slope: Slope) -> Tensor:
        image = statistics @ slope.value
        variance = float(weights @ (image - weights @ image).square())
        if variance <= 1e-18:
            return self.theta
        radius = self._dim() * math.log(2) * math.exp(-6 * (1 - min(1.0, max(0.0, slope.explained))))
        moved = self.theta - math.sqrt(2 * radius / variance) * slope.value
        return moved * min(1.0, self.limit / max(float(moved.abs().max()), 1e-300))

    def _forget(self, statistics: Tensor) -> None:
        weights = self._weights(statistics)
        kept = (weights > KEPT * weights.max()) | (self._born == self.nit)
        self._signs, self._values = self._signs[kept], self._values[kept]
        self._log_q, self._born = self._log_q[kept], self._born[kept]

    def state_dict(self) -> dict[str, Any]:
        return {
            "theta": self.theta,
            "sets": list(self.monomials.sets),
            "archive": (self._signs, self._values, self._log_q, self._born),
            "generator": self._generator.get_state(),
            "best": (self.best.x, self.best.fun, self.best.nfev),
            "counts": (self.nfev, self.nit, self.popsize, self._same),
            "slope": None if self.slope is None else (self.slope.value, self.slope.explained, self.slope.ridge),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["best"][0]) != self._dim() or state["counts"][2] != self.popsize:
            raise ValueError(
                f"the state is of a search with {len(state['best'][0])} bits and popsize {state['counts'][2]}, "
                f"this one has {self._dim()} and {self.popsize}: build it with the same arguments"
            )
        self.theta = state["theta"]
        self.monomials = Monomials.of(self._dim(), [tuple(s) for s in state["sets"]])
        self._signs, self._values, self._log_q, self._born = state["archive"]
        self._generator.set_state(state["generator"])
        self.best = Best(*state["best"])
        self.nfev, self.nit, _, self._same = state["counts"]
        self.slope = None if state["slope"] is None else Slope(*state["slope"])


def merged(signs: Tensor, statistics: Tensor, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One row per distinct point, with the sum of its weights and the mean of its values.

    A point that was drawn twice would predict itself when one of the two is left out.
    """
    distinct, place = torch.unique(signs, dim=0, return_inverse=True)
    if len(distinct) == len(signs):
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


def as_bits(n: int) -> int:
    """The number of bits. ValueError unless it is one."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n is {n!r}, expected the number of bits, an integer >= 1")
    return n


def as_bit_popsize(popsize: int | None, n: int) -> int:
    """Default: a quarter of the bits, at least 20."""
    return as_popsize(popsize, max(20, n // 4))
