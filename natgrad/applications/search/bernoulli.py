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
NOISY = 0.3  # rate of the ranked steps of the best quarter, where a point does not give its value again
WAIT = 5  # evaluations per bit without a better value after which it is not, times the share that it explains
LEAST = 0.5  # of that share
CHILDREN = 6  # candidates per generation then: more of them would be children of a parent that is out of date
STUCK = 10  # evaluations per bit without a better value after which children differ from the parent in more bits
POWER = 1.5  # in how many then: k with a chance of k^-1.5


class BernoulliSearch(BitSearch):
    """Minimum over x in {0, 1}^n by independent bits: bit i is 1 with probability p_i.

    The natural gradient by regression trusts the values of f. Where single bits explain less than nine tenths of f and
    no better value came for long, the rest of the run takes ranked steps at rate 1, with the best point so far among
    the candidates: the means lie at that point, up to the margin, and the search is a (1 + 6)-EA of which no child
    repeats its parent; `popsize` is 6 from then on. Before that the best point is evaluated again; where its value is
    another one, f is noisy and the steps are those of `PBIL(.3)`. `probabilities` (n,) is the present distribution.

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
        self._noisy: bool | None = None  # unknown until the best point has been evaluated again
        self._parent, self._parent_value = torch.zeros(n, dtype=torch.float64), math.inf
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
        if not self._doubting or self._noisy:
            return (draws < self.probabilities).to(torch.float64)
        points = self._draw_children(draws)
        if self._noisy is None:
            points[0] = self._parent
        return points

    def _draw_children(self, draws: Tensor) -> Tensor:
        """Children of the best point: each bit flips with a chance of `margin`, and at least one does.

        Where nothing better came for long, k bits flip with a chance of k^-1.5 (Doerr et al. 2017, heavy tails).
        """
        n = self._dim()
        if self.nfev - self.best.nfev > STUCK * n:  # two local minima may differ in several bits
            sizes = torch.arange(1, max(1, n // 2) + 1, dtype=torch.float64)
            counts = 1 + torch.multinomial(sizes**-POWER, len(draws), replacement=True, generator=self._generator)
            flips = draws.argsort(1).argsort(1) < counts.unsqueeze(1)
        else:
            flips = draws < self.margin
            none = (~flips.any(1)).nonzero().squeeze(1)
            flips[none, draws[none].argmin(1)] = True
        return (self._parent - flips.to(torch.float64)).abs()

    def _move(self, points: Tensor, values: Tensor) -> None:
        if self._doubting and self._noisy is None:
            self._compare_again(points, values)
        self._choose_parent(points, values)
        self._doubting = self._doubting or (self.update is None and self._stands_still())
        if self.update is None and not self._doubting:
            super()._move(points, values)
            return
        self._count_equal_values(points, values)
        if self.update is None and not self._noisy:
            self.theta = self.theta if self._noisy is None else self.limit * (2 * self._parent - 1)
            return
        update = PBIL(NOISY, max(1, self.popsize // 4)) if self.update is None else self.update
        moved = take_ranked_step(self.probabilities, points, values, update, self._dim())
        self.theta = 0.5 * torch.logit(moved.clamp(self.margin, 1 - self.margin))

    def _compare_again(self, points: Tensor, values: Tensor) -> None:
        """Note whether the best point has its value again."""
        again = values[(points == self._parent).all(1)]
        if len(again):
            self._noisy = bool((again != self._parent_value).any())
            self.popsize = self.popsize if self._noisy else min(self.popsize, CHILDREN)

    def _choose_parent(self, points: Tensor, values: Tensor) -> None:
        """The best point so far, and of equal ones the last: so it drifts where values do not change."""
        least = values.min()
        if float(least) <= self._parent_value:
            place = int((values == least).nonzero()[-1])
            self._parent, self._parent_value = points[place].clone(), float(least)

    def _stands_still(self) -> bool:
        """True if the regression leaves much of f unexplained and has found nothing better for long."""
        if self.slope is None or self.slope.explained >= TRUSTED:
            return False
        patience = max(200, WAIT * self._dim()) * max(LEAST, self.slope.explained)
        return self.nfev - self.best.nfev >= patience

    def state_dict(self) -> dict[str, Any]:
        parent = (self._parent, self._parent_value)
        return super().state_dict() | {"doubting": self._doubting, "noisy": self._noisy, "parent": parent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("noisy") is False:
            self.popsize = min(self.popsize, CHILDREN)
        super().load_state_dict(state)
        self._doubting, self._noisy = state["doubting"], state.get("noisy")
        self._parent, self._parent_value = state.get("parent", (self.best.x, self.best.fun))  # older states have none
