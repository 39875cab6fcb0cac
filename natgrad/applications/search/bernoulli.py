"""Search of bits by independent coins, with PBIL and the compact genetic algorithm as special cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.bits import BitSearch, as_bit_popsize, as_bits
from natgrad.applications.search.monomials import Monomials
from natgrad.applications.search.ranking import Ranking


@dataclass(frozen=True)
class PBIL:
    """mu <- (1 - rate) mu + rate (mean of the best), Baluja 1994.

    In expectation coordinates mu the natural gradient of E_p[w] is E_p[w (x - mu)]: this is its step for the weight of
    rank that is 1 for the best and 0 for the rest (Ollivier et al. 2017).   best: how many candidates count.
    """

    rate: float = 0.1
    best: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate is {self.rate}, expected 0 < rate <= 1: means then stay within [0, 1]")
        if self.best < 1:
            raise ValueError(f"best is {self.best}, expected a number of candidates >= 1")

    def popsize(self, n: int) -> int:
        """Candidates per generation by default."""
        return max(10, n // 4)

    def weights(self, popsize: int) -> Tensor:
        """By place, (popsize,)."""
        count = min(self.best, popsize)
        return self.rate * (torch.arange(popsize) < count).to(torch.float64) / count


@dataclass(frozen=True)
class CGA:
    """mu <- mu + (winner - loser) / population, the compact genetic algorithm, Harik et al. 1999.

    The natural gradient in expectation coordinates for the weights +-1 of two candidates.   population: of the genetic
    algorithm that it stands for, None for 4 sqrt(n).
    """

    population: float | None = None

    def __post_init__(self) -> None:
        if self.population is not None and not self.population > 0:
            raise ValueError(f"population is {self.population}, expected a number > 0, or None for 4 sqrt(n)")

    def popsize(self, n: int) -> int:
        """Two."""
        return 2

    def weights(self, popsize: int) -> Tensor:
        """+1 for the best, -1 for the worst; divided by the population once the number of bits is known."""
        found = torch.zeros(popsize, dtype=torch.float64)
        found[0], found[-1] = 1.0, -1.0
        return found


class BernoulliSearch(BitSearch):
    """Minimum over x in {0, 1}^n by independent bits, each 1 with a probability of its own.

    n: bits.   popsize: default n / 4, at least 20.   seed: of its own generator.   update: None for the natural
    gradient by regression, which takes f's values at their word, or `PBIL(rate)`, `CGA(population)`, which rank.
    margin: probabilities stay within [margin, 1 - margin], default 1 / n.

    `probabilities` (n,) is the present distribution.
    """

    def __init__(
        self,
        n: int,
        popsize: int | None = None,
        seed: int | None = None,
        *,
        update: PBIL | CGA | None = None,
        margin: float | None = None,
    ) -> None:
        as_bits(n)
        self.margin = min(0.25, 1 / n) if margin is None else margin
        if not 0 < self.margin < 0.5:
            raise ValueError(f"margin is {margin}, expected 0 < margin < .5: how far from certainty bits stay")
        self.update = update
        size = as_bit_popsize(popsize if update is None or popsize is not None else update.popsize(n), n)
        limit = 0.5 * math.log((1 - self.margin) / self.margin)  # p = sigmoid(2 theta)
        super().__init__(n, Monomials.within(n, []), size, seed, limit)

    @property
    def probabilities(self) -> Tensor:
        """P(x_i = 1), (n,)."""
        return torch.sigmoid(2 * self.theta)

    def ask(self) -> Tensor:
        draws = torch.rand(self.popsize, self._dim(), generator=self._generator, dtype=torch.float64)
        return (draws < self.probabilities).to(torch.float64)

    def _move(self, points: Tensor, values: Tensor) -> None:
        if self.update is None:
            super()._move(points, values)
            return
        ranking = Ranking.of(values)
        weights = ranking.share(self.update.weights(len(points)))
        if isinstance(self.update, CGA):
            weights = weights / (
                4 * math.sqrt(self._dim()) if self.update.population is None else self.update.population
            )
        mean = self.probabilities
        moved = mean + weights @ (points[ranking.order] - mean)
        self.theta = 0.5 * torch.logit(moved.clamp(self.margin, 1 - self.margin))
        self._same = self._same + 1 if bool((values == values[0]).all()) else 0

    def _stepped(self, statistics: Tensor, weights: Tensor, slope: Any) -> Tensor:
        moved = super()._stepped(statistics, weights, slope)
        return moved.clamp(-self.limit, self.limit)
