"""Search of bits: what the independent model and Markov random fields have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer
from natgrad.ground.states import Stateful
from natgrad.search.base import as_popsize
from natgrad.search.monomials import Monomials
from natgrad.search.relaxation import Relaxation

TRUSTED = 0.9  # share of f's variance below which a regression that stands still is no longer followed
WAIT = 5  # evaluations per bit without a better value after which it is not, times the share that it explains
LEAST = 0.1  # of that share, before the first climb
SECOND = 0.5  # of that share, once the first climb is stuck
CHILDREN = 1  # candidates per generation of a climb: more would be children of a parent that a neutral step replaced
STUCK = 5  # evaluations per bit without a better value after which children differ from the parent in more bits
LONELY = 5  # likewise, after which half of the evaluations go elsewhere
GAPS = 4  # which takes as many times the longest wait that ended well
FRESH = 5  # evaluations per bit without a better value after which a second climb begins anew elsewhere
POWER = 1.5  # in how many bits children of a stuck parent differ from it: k with a chance of k^-1.5


class BitSearch(Relaxation):
    """A Markov random field p(s) ~ exp(theta T(s)) over bits x, with products of the signs s = 2 x - 1 as T.

    Where the field has nothing more to tell, a climb goes on from the best point, a (1 + 1)-EA of which no child
    repeats its parent. Where it is stuck, half of the evaluations go elsewhere: to the field, and once this stands
    still too, to climbs from other points. Until two values differ, as where no point so far is feasible, candidates
    have any share of ones.

    Args:
        n: Number of bits.
        monomials: The products of signs T.
        popsize: Candidates per generation; one in climbs.
        seed: Of the search's own generator.
        limit: Largest absolute value of any parameter.
        margin: The chance with which a child differs from its parent in a bit.
        climbs: False for the field alone.
    """

    STATE = (
        "_size", "_climbing", "_noisy", "_main", "_second", "_regressing", "_elsewhere", "_draws", "_drawn_best",
        "_drawn_at", "_flat", "_shared", "_range",
    )  # fmt: skip

    def __init__(
        self,
        n: int,
        monomials: Monomials,
        popsize: int,
        seed: int | None,
        limit: float,
        margin: float,
        *,
        climbs: bool = True,
    ) -> None:
        self.limit, self.margin, self.monomials = limit, margin, monomials
        self.sweeps = 20
        self._size, self._climbs, self._climbing = popsize, climbs, False
        self._noisy: bool | None = None if climbs else True  # unknown until the best point has been evaluated again
        self._main = Climb(torch.zeros(n, dtype=torch.float64))
        self._second: Climb | None = None
        self._regressing, self._elsewhere = True, False
        self._draws, self._drawn_best, self._drawn_at = 0, math.inf, 0
        self._flat = 0  # evaluations in a row that gave the value of the parent
        self._shared = 0  # evaluations of the main climb less those elsewhere, since it was stuck
        self._range = (math.inf, -math.inf)  # of all values
        super().__init__(n, len(monomials), popsize, seed, n * math.log(2))

    def ask(self) -> Tensor:
        if self._is_blind():
            shares = torch.rand(
                self.popsize, 1, generator=self._generator, device=self._generator.device, dtype=torch.float64
            )
            return (self._draw_uniform() < shares).to(torch.float64)
        if not self._climbing or self._noisy or self._asks_field:
            return self._draw_field()
        draws = self._draw_uniform()
        if self._elsewhere:
            return self._draw_second(draws)
        stuck = self._main.since > STUCK * self._dim()
        points = self._main.draw_children(draws, self.margin, stuck, self._generator)
        if self._noisy is None:
            points[0] = self._main.parent
        return points

    @property
    def _asks_field(self) -> bool:
        """True where the evaluations that go elsewhere are the field's."""
        return self._elsewhere and self._regressing

    @abstractmethod
    def _draw_field(self) -> Tensor:
        """Candidates drawn from the field."""

    @abstractmethod
    def _move_field(self, points: Tensor, values: Tensor) -> None:
        """Move the field by points that it drew."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """True if the first climb should begin."""

    def _is_blind(self) -> bool:
        """True if there were values, all of them equal, infinite ones included: they tell nothing of the bits."""
        return self._climbs and not self._climbing and self._range[0] == self._range[1]

    def _draw_uniform(self) -> Tensor:
        return torch.rand(
            self.popsize, self._dim(), generator=self._generator, device=self._generator.device, dtype=torch.float64
        )

    def _draw_second(self, draws: Tensor) -> Tensor:
        """Children of the second climb, which begins anew elsewhere where it is stuck, or at no value."""
        # it begins at a random point; where some points have no value, some of the bits are those of the best one
        second = self._second
        if second is not None and second.since <= FRESH * self._dim() and (second.value < math.inf or not second.spent):
            return second.draw_children(draws, self.margin, False, self._generator)
        start = (draws[0] < 0.5).to(torch.float64)
        if self._range[1] == math.inf:
            share, chances = torch.rand(
                2, self._dim(), generator=self._generator, device=self._generator.device, dtype=torch.float64
            ).unbind()
            start = torch.where(chances < share[0], start, self._main.parent)
        self._second = Climb(start)
        points = self._second.draw_children(draws, self.margin, False, self._generator)
        points[0] = self._second.parent
        return points

    def _move(self, points: Tensor, values: Tensor) -> None:
        blind = self._is_blind()
        least, largest = self._range
        self._range = min(least, float(values.min())), max(largest, float(values.max()))
        if not self._climbs or self._noisy:
            self._move_field(points, values)
        elif blind or self._is_blind():
            self._count_equal_values(points, values)
            self._main.accept(points, values)
        elif not self._climbing:
            self._main.accept(points, values)
            self._move_field(points, values)
            if self._has_ended():
                self._climbing = True
                self._main.begin_counts()
                self._draws = self._drawn_at = 0
        elif self._noisy is None:
            again = values[(points == self._main.parent).all(1)]
            if len(again):  # the best point has its value again, or f is noisy
                self._noisy = bool((again != self._main.value).any())
                self.popsize = self.popsize if self._noisy else min(self.popsize, CHILDREN)
            self._main.accept(points, values)
        else:
            self._climb(points, values)
            # half of the evaluations go elsewhere where the main climb waits for much longer than it ever had to
            lonely = self._main.since > max(LONELY * self._dim(), GAPS * self._main.gap)
            self._shared = self._shared if lonely else 0
            self._elsewhere = lonely and self._shared >= 0
            self.popsize = self._size if self._asks_field else min(self._size, CHILDREN)

    def _note_draws(self, values: Tensor) -> None:
        """Count values of points that the field drew."""
        self._draws += len(values)
        if float(values.min()) < self._drawn_best:
            self._drawn_best, self._drawn_at = float(values.min()), self._draws

    def _climb(self, points: Tensor, values: Tensor) -> None:
        """Give the points to the climb, or to the field, that they come from."""
        self._flat = self._flat + len(values) if bool((values == self._main.value).all()) else 0
        self._same, self._collapsed = self._flat // self._size, False
        if self._asks_field:
            self._move_field(points, values)
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

    def _stands_still(self, since: int, least: float) -> bool:
        """True if the field leaves much of f unexplained and has found nothing better for long."""
        if self.slope is None or self.slope.explained >= TRUSTED:
            return False
        return since >= max(200, WAIT * self._dim()) * max(least, self.slope.explained)

    def statistics(self, points: Tensor) -> Tensor:
        return self.monomials.values(2 * points - 1)

    def _limit_parameters(self, theta: Tensor) -> Tensor:
        return theta.clamp(-self.limit, self.limit)

    def _drop_limited(self, direction: Tensor) -> Tensor:
        at_limit = self.theta.abs() >= self.limit * (1 - 1e-9)
        return torch.where(at_limit & (self.theta * direction < 0), 0.0, direction)

    def _check_candidates(self, X: Any, F: Any) -> tuple[Tensor, Tensor]:
        points, values = super()._check_candidates(X, F)
        if not bool(((points == 0) | (points == 1)).all()):
            raise ValueError("X has entries other than 0 and 1, expected the bits that ask() gave")
        return points, values

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"sets": list(self.monomials.sets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self._second = None if state["_second"] is None else Climb(self._main.parent)
        super().load_state_dict(state)
        self.monomials = Monomials.of(self._dim(), [tuple(s) for s in state["sets"]])


def as_bits(n: int) -> int:
    """The number of bits."""
    return check_integer("n", n, 1, hint=": the number of bits")


def as_bit_popsize(popsize: int | None, n: int) -> int:
    """Candidates per generation; default a quarter of the bits, at least 20."""
    return as_popsize(popsize, max(20, n // 4))


# Climbs from the best point


class Climb(Stateful):
    """A (1 + lambda)-EA of bits, none of whose children repeats its parent."""

    STATE = ("parent", "value", "spent", "gap", "_gained")

    def __init__(self, parent: Tensor) -> None:
        self.parent, self.value = parent, math.inf
        self.begin_counts()

    @property
    def since(self) -> int:
        """Evaluations since the last better value."""
        return self.spent - self._gained

    def draw_children(self, draws: Tensor, margin: float, stuck: bool, generator: torch.Generator) -> Tensor:
        """Children of the parent: each bit flips with a chance of `margin`, and at least one does."""
        # where the climb is stuck, k bits flip with a chance of k^-1.5 (Doerr et al. 2017, heavy tails)
        n = draws.shape[1]
        if stuck:
            sizes = torch.arange(1, max(1, n // 2) + 1, dtype=torch.float64)
            counts = 1 + torch.multinomial(sizes**-POWER, len(draws), replacement=True, generator=generator)
            flips = draws.argsort(1).argsort(1) < counts.unsqueeze(1)
        else:
            flips = draws < margin
            none = (~flips.any(1)).nonzero().squeeze(1)
            flips[none, draws[none].argmin(1)] = True
        return (self.parent - flips.to(torch.float64)).abs()

    def accept(self, points: Tensor, values: Tensor) -> None:
        """Go on from the best of some points, if it is no worse than the parent; of equal ones from the last."""
        self.spent += len(values)
        if not len(values) or float(least := values.min()) > self.value:
            return
        if float(least) < self.value:
            self.gap, self._gained = max(self.gap, self.since), self.spent
        place = int((values == least).nonzero()[-1])
        self.parent, self.value = points[place].clone(), float(least)

    def begin_counts(self) -> None:
        """Forget the evaluations so far, but not the parent."""
        self.spent = self.gap = self._gained = 0
