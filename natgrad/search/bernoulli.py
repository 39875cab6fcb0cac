"""Search of bits by independent coins, with PBIL and the compact genetic algorithm as special cases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.ground.checks import check_range
from natgrad.search.base import derive_seed, spell_arguments
from natgrad.search.bits import LEAST, SECOND, BitSearch, as_bit_popsize, as_bits
from natgrad.search.monomials import Monomials
from natgrad.search.ranking import CGA, PBIL, renew_update
from natgrad.search.relaxation import Relaxation, take_ranked_step

NOISY = 0.3  # rate of the ranked steps of the best quarter, where a point does not give its value again
PENDING = 8  # points of the regression's least value that were asked for and may still be told


class BernoulliSearch(BitSearch):
    """Minimum over x in {0, 1}^n by independent bits: bit i is 1 with probability p_i.

    The natural gradient by regression trusts the values of f. One candidate of each generation is the point at which
    the regression is least, which does not count as a draw. Where single bits explain less than nine tenths of f and no
    better value came for long, the climbs of `BitSearch` begin: PBIL's step at rate 1, with the means at the best point
    up to the margin. Before, the best point is evaluated again; where its value is another one, f is noisy, and all
    further steps are those of `PBIL(.3)`. `popsize` differs between generations.

    Args:
        n: Number of bits.
        popsize: Candidates per generation; default n / 4, at least 20.
        seed: Of the search's own generator; None for another one each time.
        update: `PBIL(rate)` or `CGA(population)`, which use ranks from the beginning; None for the regression.
        margin: Probabilities stay within [margin, 1 - margin]; default 1 / n, and 1/4 at most.

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

    STATE = ("_tried", "_pending")

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
        margin = min(0.25, 1 / n) if margin is None else margin
        check_range("margin", margin, "(0, .5)", hint=": how far from certainty bits stay")
        self.update = update
        self._tried = self._pending = torch.zeros(0, n, dtype=torch.float64)  # candidates that p did not draw
        size = as_bit_popsize(popsize if update is None or popsize is not None else update.popsize(n), n)
        limit = 0.5 * math.log((1 - margin) / margin)  # p = sigmoid(2 theta)
        super().__init__(n, Monomials.within(n, []), size, seed, limit, margin, climbs=update is None)
        self.arguments = spell_arguments(n=n, popsize=size, update=update, margin=margin, seed=seed)

    def renew(self, popsize: int, run: int) -> BernoulliSearch:
        update, size = renew_update(self.update, popsize, self._size)
        seed = derive_seed(self._generator, run)
        return BernoulliSearch(self._dim(), size, seed, update=update, margin=self.margin)

    @property
    def probabilities(self) -> Tensor:
        """P(x_i = 1), shape (n,)."""
        if self._climbing and self._noisy is False and not self._elsewhere:
            return self._main.parent.clamp(self.margin, 1 - self.margin)
        return torch.sigmoid(2 * self.theta)

    def _draw_field(self) -> Tensor:
        """Points from p, and for one of them the point at which the regression is least."""
        draws = self._draw_uniform()
        points = (draws < torch.sigmoid(2 * self.theta)).to(torch.float64)
        if self.update is not None or self._noisy or self.slope is None:
            return points
        least = (self.slope.value < 0).to(torch.float64)
        if not bool((self._tried == least).all(1).any()):
            points[0] = least
            self._tried = torch.cat([self._tried, least.unsqueeze(0)])
            self._pending = torch.cat([self._pending[-PENDING:], least.unsqueeze(0)])
        return points

    def _move_field(self, points: Tensor, values: Tensor) -> None:
        if self.update is None and not self._noisy:
            drawn = torch.ones(len(values), dtype=torch.bool)
            for row in self._pending:
                places = (points == row).all(1).nonzero()
                if len(places):  # p may have drawn it too
                    drawn[places[0]] = False
                    self._pending = self._pending[(self._pending != row).any(1)]
            if bool(drawn.any()):
                self._note_draws(values[drawn])
                Relaxation._move(self, points[drawn], values[drawn])
            return
        self._count_equal_values(points, values)
        update = PBIL(NOISY, max(1, self.popsize // 4)) if self.update is None else self.update
        moved = take_ranked_step(self.probabilities, points, values, update, self._dim())
        self.theta = 0.5 * torch.logit(moved.clamp(self.margin, 1 - self.margin))

    def _has_ended(self) -> bool:
        """True if the first climb should begin."""
        # while the point at which the regression is least is the best so far, the regression has all its patience
        if bool((self._tried == self.best.x).all(1).any()):
            return self._stands_still(self._draws - self._drawn_at, SECOND)
        return self._stands_still(self.nfev - self.best.nfev, LEAST)
