"""Search of bits by independent coins, with PBIL and the compact genetic algorithm as special cases."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import next_seed
from natgrad.applications.search.bits import BitSearch, as_bit_popsize, as_bits
from natgrad.applications.search.climb import Climb
from natgrad.applications.search.monomials import Monomials
from natgrad.applications.search.rank_weights import CGA, PBIL, renew_update
from natgrad.applications.search.relaxation import take_ranked_step

TRUSTED = 0.9  # share of f's variance below which a regression that stands still is no longer followed
NOISY = 0.3  # rate of the ranked steps of the best quarter, where a point does not give its value again
WAIT = 5  # evaluations per bit without a better value after which it is not, times the share that it explains
LEAST = 0.1  # of that share, before the first climb
SECOND = 0.5  # of that share, once the first climb is stuck
CHILDREN = 1  # candidates per generation of a climb: more would be children of a parent that a neutral step replaced
STUCK = 5  # evaluations per bit without a better value after which children differ from the parent in more bits
LONELY = 5  # likewise, after which half of the evaluations go elsewhere
GAPS = 4  # which takes as many times the longest wait that ended well
PENDING = 8  # points of the regression's least value that were asked for and may still be told
FRESH = 5  # evaluations per bit without a better value after which a second climb begins anew elsewhere


class BernoulliSearch(BitSearch):
    """Minimum over x in {0, 1}^n by independent bits: bit i is 1 with probability p_i.

    The natural gradient by regression trusts the values of f. One candidate of each generation is the point at which
    the regression is least, which does not count as a draw.

    Where single bits explain less than nine tenths of f and no better value came for long, a climb begins: a (1 + 1)-EA
    from the best point, of which no child repeats its parent; that is PBIL's step at rate 1, with the means at the best
    point up to the margin. Where it is stuck, half of the evaluations go elsewhere: first back to the regression, and
    once this stands still too, to climbs from random points. The better climb is gone on with. Before the first climb
    the best point is evaluated again; where its value is another one, f is noisy, and all further steps are those of
    `PBIL(.3)`. `probabilities` (n,) is the present distribution; `popsize` differs between generations.

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
        self.update, self._climbing = update, False
        self._noisy: bool | None = None  # unknown until the best point has been evaluated again
        self._main = Climb(torch.zeros(n, dtype=torch.float64))
        self._second: Climb | None = None
        self._regressing, self._seconds_turn = True, False
        self._draws, self._drawn_best, self._drawn_at = 0, math.inf, 0
        self._flat = 0  # evaluations in a row that gave the value of the parent
        self._shared = 0  # evaluations of the main climb less those elsewhere, since it was stuck
        self._tried = self._pending = torch.zeros(0, n, dtype=torch.float64)  # candidates that p did not draw
        self._size = as_bit_popsize(popsize if update is None or popsize is not None else update.popsize(n), n)
        limit = 0.5 * math.log((1 - self.margin) / self.margin)  # p = sigmoid(2 theta)
        super().__init__(n, Monomials.within(n, []), self._size, seed, limit)

    def renew(self, popsize: int, run: int) -> BernoulliSearch:
        update, size = renew_update(self.update, popsize, self._size)
        seed = next_seed(self._generator, run)
        return BernoulliSearch(self._dim(), size, seed, update=update, margin=self.margin)

    @property
    def probabilities(self) -> Tensor:
        """P(x_i = 1), shape (n,)."""
        if self._climbing and self._noisy is False and not self._seconds_turn:
            return self._main.parent.clamp(self.margin, 1 - self.margin)
        return torch.sigmoid(2 * self.theta)

    def ask(self) -> Tensor:
        draws = torch.rand(self.popsize, self._dim(), generator=self._generator, dtype=torch.float64)
        if not self._climbing or self._noisy or (self._seconds_turn and self._regressing):
            return self._draw_points(draws)
        if self._seconds_turn:
            return self._draw_second(draws)
        stuck = self._main.since > STUCK * self._dim()
        points = self._main.draw_children(draws, self.margin, stuck, self._generator)
        if self._noisy is None:
            points[0] = self._main.parent
        return points

    def _draw_points(self, draws: Tensor) -> Tensor:
        """Points from p, and for one of them the point at which the regression is least."""
        points = (draws < torch.sigmoid(2 * self.theta)).to(torch.float64)
        if self.update is not None or self._noisy or self.slope is None:
            return points
        least = (self.slope.value < 0).to(torch.float64)
        if not bool((self._tried == least).all(1).any()):
            points[0] = least
            self._tried = torch.cat([self._tried, least.unsqueeze(0)])
            self._pending = torch.cat([self._pending[-PENDING:], least.unsqueeze(0)])
        return points

    def _draw_second(self, draws: Tensor) -> Tensor:
        """Children of the second climb, which begins anew at a random point where it is stuck."""
        if self._second is not None and self._second.since <= FRESH * self._dim():
            return self._second.draw_children(draws, self.margin, False, self._generator)
        self._second = Climb((draws[0] < 0.5).to(torch.float64))
        points = self._second.draw_children(draws, self.margin, False, self._generator)
        points[0] = self._second.parent
        return points

    def _move(self, points: Tensor, values: Tensor) -> None:
        if self.update is not None or self._noisy:
            self._count_equal_values(points, values)
            update = PBIL(NOISY, max(1, self.popsize // 4)) if self.update is None else self.update
            moved = take_ranked_step(self.probabilities, points, values, update, self._dim())
            self.theta = 0.5 * torch.logit(moved.clamp(self.margin, 1 - self.margin))
        elif not self._climbing:
            self._main.accept(points, values)
            self._regress(points, values)
            if self._has_ended():
                self._climbing = True
                self._main.begin_counts()
                self._draws = self._drawn_at = 0
        elif self._noisy is None:
            self._compare_again(points, values)
        else:
            self._climb(points, values)
            self._choose_turn()

    def _has_ended(self) -> bool:
        """True if the first climb should begin.

        While the point at which the regression is least is the best so far, the regression has all its patience.
        """
        led = bool((self._tried == self.best.x).all(1).any())
        if led:
            return self._stands_still(self._draws - self._drawn_at, SECOND)
        return self._stands_still(self.nfev - self.best.nfev, LEAST)

    def _regress(self, points: Tensor, values: Tensor) -> None:
        """A step of the regression on the points that p drew."""
        drawn = torch.ones(len(values), dtype=torch.bool)
        for row in self._pending:
            places = (points == row).all(1).nonzero()
            if len(places):  # p may have drawn it too
                drawn[places[0]] = False
                self._pending = self._pending[(self._pending != row).any(1)]
        points, values = points[drawn], values[drawn]
        if not len(values):
            return
        self._draws += len(values)
        if float(values.min()) < self._drawn_best:
            self._drawn_best, self._drawn_at = float(values.min()), self._draws
        super()._move(points, values)

    def _climb(self, points: Tensor, values: Tensor) -> None:
        """Give the points to the climb, or to the regression, that they come from."""
        self._flat = self._flat + len(values) if bool((values == self._main.value).all()) else 0
        self._same, self._collapsed = self._flat // self._size, False
        if self._seconds_turn and self._regressing:
            self._regress(points, values)
            if float(values.min()) < self._main.value:
                self._main.accept(points, values)
            self._shared -= len(values)
            self._regressing = not self._stands_still(self._draws - self._drawn_at, SECOND)
            return
        theirs = torch.zeros(len(values), dtype=torch.bool)
        if self._second is not None:
            theirs = (points - self._second.parent).abs().sum(1) < (points - self._main.parent).abs().sum(1)
            self._second.accept(points[theirs], values[theirs])
        self._main.accept(points[~theirs], values[~theirs])
        self._shared += len(values) - 2 * int(theirs.sum())
        if self._second is not None and self._second.value < self._main.value:
            self._main, self._second = self._second, None
            self._main.begin_counts()

    def _choose_turn(self) -> None:
        """Half of the evaluations go elsewhere where the main climb is stuck for twice the time that it once was."""
        lonely = self._main.since > max(LONELY * self._dim(), GAPS * self._main.gap)
        if not lonely:
            self._shared = 0
        self._seconds_turn = lonely and self._shared >= 0
        self.popsize = self._size if self._seconds_turn and self._regressing else min(self._size, CHILDREN)

    def _compare_again(self, points: Tensor, values: Tensor) -> None:
        """Note whether the best point has its value again."""
        again = values[(points == self._main.parent).all(1)]
        if len(again):
            self._noisy = bool((again != self._main.value).any())
            self.popsize = self.popsize if self._noisy else min(self.popsize, CHILDREN)
        self._main.accept(points, values)

    def _stands_still(self, since: int, least: float) -> bool:
        """True if the regression leaves much of f unexplained and has found nothing better for long.

        Args:
            since: Evaluations without a better value.
            least: Of the share that it explains, times which it has patience.
        """
        if self.slope is None or self.slope.explained >= TRUSTED:
            return False
        return since >= max(200, WAIT * self._dim()) * max(least, self.slope.explained)

    def state_dict(self) -> dict[str, Any]:
        second = None if self._second is None else self._second.state_dict()
        return super().state_dict() | {
            "phase": (self._climbing, self._noisy, self._regressing, self._seconds_turn, self._shared),
            "climbs": (self._main.state_dict(), second),
            "drawn": (self._draws, self._drawn_best, self._drawn_at),
            "flat": self._flat,
            "foreign": (self._tried, self._pending),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _, noisy, regressing, seconds_turn, _ = state["phase"]
        climbs = noisy is False and not (seconds_turn and regressing)
        self.popsize = min(self._size, CHILDREN) if climbs else self._size
        super().load_state_dict(state)
        self._climbing, self._noisy, self._regressing, self._seconds_turn, self._shared = state["phase"]
        main, second = state["climbs"]
        self._main.load_state_dict(main)
        self._second = None
        if second is not None:
            self._second = Climb(self._main.parent)
            self._second.load_state_dict(second)
        self._draws, self._drawn_best, self._drawn_at = state["drawn"]
        self._flat = state.get("flat", 0)
        self._tried, self._pending = state["foreign"]
