"""Weights of the candidates from best to worst, and of equal ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def default_popsize(d: int) -> int:
    """4 + floor(3 ln d), Hansen's default."""
    return 4 + int(3 * math.log(d))


def log_weights(popsize: int) -> Tensor:
    """w'_i = ln((popsize + 1) / 2) - ln i, shape (popsize,), best first; the worse half is negative.

    Reference:
        Hansen 2016, eq. 49.
    """
    return math.log((popsize + 1) / 2) - torch.arange(1, popsize + 1, dtype=torch.float64).log()


def effective_count(weights: Tensor) -> float:
    """mu_eff = (sum |w|)^2 / sum w^2: how many equally weighted candidates are worth as much.

    weights: (popsize,).
    """
    return float(weights.abs().sum().square() / weights.square().sum())


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
