"""Search of bits by independent coins, with PBIL and the compact genetic algorithm as special cases."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import next_seed
from natgrad.applications.search.bits import BitSearch, as_bit_popsize, as_bits
from natgrad.applications.search.monomials import Monomials
from natgrad.applications.search.rank_weights import CGA, PBIL, renew_update
from natgrad.applications.search.relaxation import take_ranked_step

TRUSTED = 0.9  # share of f's variance below which a regression that stands still is no longer followed
DOUBT = 0.3  # rate of the ranks then, for the best quarter


class BernoulliSearch(BitSearch):
    """Minimum over x in {0, 1}^n by independent bits: bit i is 1 with probability p_i.

    The natural gradient by regression trusts the values of f. Where single bits explain less than nine tenths of f and
    no better value came for long, the rest of the run uses ranks instead, as `PBIL(.3)` does. `probabilities` (n,) is
    the present distribution.

    Args:
        n: Number of bits.
        popsize: Candidates per generation; default n / 4, at least 20.
        seed: Of the search's own generator; None for another one each time.
        update: `PBIL(rate)` or `CGA(population)`, which use ranks from the beginning; None for the regression.
        margin: Probabilities stay within [margin, 1 - margin]; default 1 / n.

    Raises:
        ValueError: If n or popsize is too small, or the margin is not between 0 and 1/2.

    Example:
        >>> search = ng.BernoulliSearch(30, seed=0)
        >>> while search.stop() is None and search.best.fun > -30:
        ...     X = search.ask()  # bits, (popsize, 30)
        ...     search.tell(X, -X.sum(1))
        >>> search.best.fun
        -30.0
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
        self.update, self._doubting = update, False
        size = as_bit_popsize(popsize if update is None or popsize is not None else update.popsize(n), n)
        limit = 0.5 * math.log((1 - self.margin) / self.margin)  # p = sigmoid(2 theta)
        super().__init__(n, Monomials.within(n, []), size, seed, limit)

    def renew(self, popsize: int, run: int) -> BernoulliSearch:
        update, size = renew_update(self.update, popsize, self.popsize)
        seed = next_seed(self._generator, run)
        return BernoulliSearch(self._dim(), size, seed, update=update, margin=self.margin)

    @property
    def probabilities(self) -> Tensor:
        """P(x_i = 1), shape (n,)."""
        return torch.sigmoid(2 * self.theta)

    def ask(self) -> Tensor:
        draws = torch.rand(self.popsize, self._dim(), generator=self._generator, dtype=torch.float64)
        return (draws < self.probabilities).to(torch.float64)

    def _move(self, points: Tensor, values: Tensor) -> None:
        self._doubting = self._doubting or (self.update is None and self._stands_still())
        if self.update is None and not self._doubting:
            super()._move(points, values)
            return
        self._count_equal_values(points, values)
        update = PBIL(DOUBT, max(1, self.popsize // 4)) if self.update is None else self.update
        moved = take_ranked_step(self.probabilities, points, values, update, self._dim())
        self.theta = 0.5 * torch.logit(moved.clamp(self.margin, 1 - self.margin))

    def _stands_still(self) -> bool:
        """True if the regression leaves much of f unexplained and has found nothing better for long."""
        since = self.nfev - self.best.nfev
        poor = self.slope is not None and self.slope.explained < TRUSTED
        return poor and since >= max(200, 5 * self._dim())

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"doubting": self._doubting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._doubting = state["doubting"]
