"""Weights of the rank for distributions over finitely many points: PBIL and the compact genetic algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate is {self.rate}, expected 0 < rate <= 1: means then stay within [0, 1]")
        if self.best < 1:
            raise ValueError(f"best is {self.best}, expected a number of candidates >= 1")

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
        if self.population is not None and not self.population > 0:
            raise ValueError(f"population is {self.population}, expected a number > 0, or None for 4 sqrt(n)")
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}, expected a number > 0 that multiplies the population")

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
        found = torch.zeros(popsize, dtype=torch.float64)
        found[0], found[-1] = 1.0, -1.0
        return found / (self.scale * (4 * math.sqrt(n) if self.population is None else self.population))


def renew_update(update: PBIL | CGA | None, popsize: int, first: int) -> tuple[PBIL | CGA | None, int]:
    """The update and popsize of a restart.

    The population of the compact genetic algorithm is in its update: that one grows, and its two candidates stay.
    """
    if not isinstance(update, CGA):
        return update, popsize
    return CGA(update.population, scale=update.scale * popsize / first), first
