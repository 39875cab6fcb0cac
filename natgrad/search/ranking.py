"""Weights of the candidates from best to worst, and of equal ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_positive, check_range


def weigh_by_logarithm(popsize: int) -> Tensor:
    """w'_i = ln((popsize + 1) / 2) - ln i, shape (popsize,), best first; the worse half is negative."""
    # Hansen 2016, eq. 49.
    return math.log((popsize + 1) / 2) - torch.arange(1, popsize + 1, dtype=torch.float64).log()


def count_effective(weights: Tensor) -> float:
    """mu_eff = (sum |w|)^2 / sum w^2: how many equally weighted candidates are worth as much."""
    return float(weights.abs().sum().square() / weights.square().sum())


def weigh_better_half(popsize: int) -> tuple[Tensor, float]:
    """The positive weights, with sum 1 and zeros for the worse half, and their mu_eff."""
    positive = weigh_by_logarithm(popsize).clamp(min=0)
    return positive / positive.sum(), count_effective(positive / positive.sum())


@dataclass(frozen=True)
class Ranking:
    """The order of a batch of objective values, best first, and which of them are equal.

    Attributes:
        order: Indices of the candidates, best first, shape (popsize,).
        ties: For each place the number of its group of equal values, shape (popsize,); None if all values differ.
    """

    order: Tensor
    ties: Tensor | None

    @staticmethod
    def of(values: Tensor) -> Ranking:
        """The ranking of objective values.

        Args:
            values: Shape (popsize,); lower is better, NaN counts as infinitely bad.
        """
        ordered, order = torch.sort(torch.where(values.isnan(), torch.inf, values), stable=True)
        new = ordered[1:] != ordered[:-1]
        if bool(new.all()):
            return Ranking(order, None)
        return Ranking(order, torch.cat([new.new_zeros(1), new]).cumsum(0))

    @property
    def flat(self) -> bool:
        """True if all values are equal: a ranking without any information."""
        return self.ties is not None and int(self.ties[-1]) == 0

    def share(self, weights: Tensor) -> Tensor:
        """Weights by place, with equal ones for equal values: their mean.

        Args:
            weights: By place, shape (popsize,).

        Reference:
            Ollivier et al. 2017, eq. 7.
        """
        if self.ties is None:
            return weights
        groups = int(self.ties[-1]) + 1
        total = weights.new_zeros(groups).index_add_(0, self.ties, weights)
        count = weights.new_zeros(groups).index_add_(0, self.ties, torch.ones_like(weights))
        return (total / count)[self.ties]


# Weights for distributions over finitely many points: PBIL and the compact genetic algorithm


@dataclass(frozen=True)
class PBIL:
    """mu <- (1 - rate) mu + rate (mean of the best), population-based incremental learning.

    In expectation coordinates mu the natural gradient of E_p[w] is E_p[w (x - mu)]. This is its step for the weight of
    rank that is 1 for the best and 0 for the rest.

    Args:
        rate: In (0, 1], so that means stay within [0, 1].
        best: How many candidates count.

    Raises:
        ValueError: If a number is out of its range.

    Reference:
        Baluja 1994; Ollivier et al. 2017.
    """

    rate: float = 0.1
    best: int = 1

    def __post_init__(self) -> None:
        check_range("rate", self.rate, "(0, 1]", hint=": means then stay within [0, 1]")
        check_integer("best", self.best, of="a number of candidates")

    def popsize(self, n: int) -> int:
        """Candidates per generation by default.

        Args:
            n: Number of variables.
        """
        return max(10, n // 4)

    def weights(self, popsize: int, n: int) -> Tensor:
        """Weights by place, shape (popsize,).

        Args:
            popsize: Candidates per generation.
            n: Number of variables.
        """
        count = min(self.best, popsize)
        return self.rate * (torch.arange(popsize) < count).to(torch.float64) / count


@dataclass(frozen=True)
class CGA:
    """mu <- mu + (winner - loser) / population, the compact genetic algorithm.

    It is the natural gradient in expectation coordinates for the weights +-1 of two candidates.

    Args:
        population: Of the genetic algorithm that it stands for; None for 4 sqrt(n).
        scale: Multiplies the population, as restarts do.

    Raises:
        ValueError: If a number is not positive.

    Reference:
        Harik et al. 1999.
    """

    population: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.population is not None:
            check_positive("population", self.population, hint=", or None for 4 sqrt(n)")
        check_positive("scale", self.scale, hint=", which multiplies the population")

    def popsize(self, n: int) -> int:
        """Two candidates per generation.

        Args:
            n: Number of variables.
        """
        return 2

    def weights(self, popsize: int, n: int) -> Tensor:
        """1 / population for the best, minus that for the worst, shape (popsize,).

        Args:
            popsize: Candidates per generation.
            n: Number of variables.
        """
        signs = torch.zeros(popsize, dtype=torch.float64)
        signs[0], signs[-1] = 1.0, -1.0
        return signs / (self.scale * (4 * math.sqrt(n) if self.population is None else self.population))


def renew_update(update: PBIL | CGA | None, popsize: int, first: int) -> tuple[PBIL | CGA | None, int]:
    """The update and popsize of a restart."""
    # the population of the compact genetic algorithm is in its update: that one grows, and its two candidates stay
    if not isinstance(update, CGA):
        return update, popsize
    return CGA(update.population, scale=update.scale * popsize / first), first
