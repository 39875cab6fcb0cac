"""Search of bits by independent coins, with PBIL and the compact genetic algorithm as special cases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.applications.search.bits import BitSearch, as_bit_popsize, as_bits
from natgrad.applications.search.monomials import Monomials
from natgrad.applications.search.rates import CGA, PBIL
from natgrad.applications.search.relaxation import ranked_step


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
        n = as_bits(n)
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
        self._watch(points, values)
        moved = ranked_step(self.probabilities, points, values, self.update, self._dim())
        self.theta = 0.5 * torch.logit(moved.clamp(self.margin, 1 - self.margin))

    def _limited(self, theta: Tensor) -> Tensor:
        return super()._limited(theta).clamp(-self.limit, self.limit)
