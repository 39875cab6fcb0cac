"""Search of bits that depend on one another: Markov random fields with given and with learned cliques."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import next_seed
from natgrad.applications.search.bits import LEAST, WAIT, BitSearch, as_bit_popsize, as_bits
from natgrad.applications.search.monomials import Clique, Monomials, draw_signs
from natgrad.applications.search.relaxation import MORE, Relaxation, replace_infinite_values, scale_to_unit_range
from natgrad.applications.search.structure import EXACT, StructureLearner
from natgrad.checks import check_integer

GROWTH = 1.2  # of the draws, until the structure is learned again
PLATEAU = 1 / 3  # of uniform draws: as many with the worst value of all are not worth a structure
STRENGTH = 12.0  # of any coefficient: exp(-24) against 1


class MarkovSearch(BitSearch):
    """Minimum over x in {0, 1}^n by a Markov random field, moved by the exact natural gradient of E_p[f].

    If f is a sum of functions of the cliques, it lies in the span of the statistics. The slope is then exact once there
    are more draws than statistics, and the flow ends nowhere but in the minimum.

    With cliques=None they are learned from uniform draws. Products of pairs, and of known products with one more bit,
    that correlate with the part of f that is not yet explained are tried, as are those within groups of at most
    `largest` bits that sure pairs join; products whose coefficients are no more than noise are left out again. Each
    time there is a fifth more draws this goes on from the structure so far, until that is exact, or explains 95 % of
    the variance and no longer changes, or for `patience` evaluations. Dependence that shows in no pair (parity) is not
    found.

    Args:
        n: Number of bits.
        cliques: Groups of bits that f may depend on jointly, such as [(0, 1), (1, 2)]; all products within each are
            statistics. None to learn them.
        popsize: Candidates per generation; default n / 4, at least 20.
        seed: Of the search's own generator; None for another one each time.
        largest: Most bits of a group that is learned.
        patience: Evaluations after which learning ends; default 200 n.

    Raises:
        ValueError: If a clique names a bit that does not exist, or has more than 12 bits; or a number is too small.

    Reference:
        Malago 2023, on stochastic relaxation.

    Example:
        >>> search = ng.MarkovSearch(12, [(i, i + 1) for i in range(11)], seed=0)
        >>> for _ in range(20):
        ...     X = search.ask()  # bits, (popsize, 12)
        ...     search.tell(X, (X[:, 1:] == X[:, :-1]).sum(1))  # neighbours should differ
        >>> search.best.fun
        0.0
    """

    def __init__(
        self,
        n: int,
        cliques: Iterable[Sequence[int]] | None = None,
        popsize: int | None = None,
        seed: int | None = None,
        *,
        largest: int = 6,
        patience: int | None = None,
    ) -> None:
        n = as_bits(n)
        check_integer("largest", largest, 2, hint=": bits per clique")
        self.largest = largest
        self.patience = 200 * n if patience is None else check_integer("patience", patience, 1, hint=": evaluations")
        self.settled = cliques is not None
        self._next = 0
        self._learner: StructureLearner | None = None  # what it keeps follows from draws and structure
        given = None if cliques is None else as_cliques(cliques, n)
        self._given = given
        monomials = Monomials.within(n, given or [])
        super().__init__(n, monomials, as_bit_popsize(popsize, n), seed, STRENGTH)

    def renew(self, popsize: int, run: int) -> MarkovSearch:
        seed = next_seed(self._generator, run)
        settings = {"largest": self.largest, "patience": self.patience}
        return MarkovSearch(self._dim(), self._given, popsize, seed, **settings)

    @property
    def cliques(self) -> list[Clique]:
        """The largest sets of bits that are joined."""
        sets = [set(s) for s in self.monomials.sets]
        return [s for s in self.monomials.sets if not any(set(s) < other for other in sets)]

    @property
    def margin(self) -> float:
        """The chance with which a child of a climb differs from its parent in a bit."""
        return min(0.25, 1 / self._dim())

    def stop(self) -> str | None:
        why = super().stop()
        learning = not self.settled and not self._climbing
        return None if why and why.startswith("converged") and learning else why

    def _draw_field(self) -> Tensor:
        n = self._dim()
        start = 2.0 * torch.randint(0, 2, (self.popsize, n), generator=self._generator).to(torch.float64) - 1
        if self.theta.any():  # all zeros before the first step: the start is a draw already
            start = draw_signs(self.monomials, self.theta, start, self.sweeps, self._generator)
        return (start + 1) / 2

    def _move_field(self, points: Tensor, values: Tensor) -> None:
        self._note_draws(values)
        Relaxation._move(self, points, values)
        if self._climbing and not self._noisy:  # the end of the field is not that of the search
            self._same, self._collapsed = self._flat // self._size, False

    def _has_ended(self) -> bool:
        """True if the first climb should begin: the structure does not explain f, and its field ends or stands still.

        While cliques are learned, it begins where a large share of the draws has the worst value. These say nothing of
        the other bits, as of points that are not feasible; a structure would be learned of who is among them.
        """
        if not self.settled:
            count = int((self._values == self._values.max()).sum())
            ended = count >= PLATEAU * len(self._values) and bool((self._values != self._values[0]).any())
        elif self.slope is None or self.slope.explained > 1 - EXACT:
            ended = False
        else:
            since = self.nfev - max(self.best.nfev, self._since)
            ended = super().stop() is not None or self._stands_still(since, LEAST)
        if ended:
            self._since, self._same, self._collapsed = self.nfev, 0, False
        return ended

    def _stands_still(self, since: int, least: float) -> bool:
        """Once there are climbs, however much of f is explained at the points that the field draws."""
        explained = 0.0 if self.slope is None else self.slope.explained
        if not self._climbing or explained > 1 - EXACT:
            return super()._stands_still(since, least)
        return since >= max(200, WAIT * self._dim()) * max(least, explained)

    def _update(self) -> None:
        if self.settled:
            super()._update()
            return
        count = len(self._values)
        if count < max(self._next, MORE * (self._dim() + 1)):
            return
        self._next = int(GROWTH * count)
        learner = self._learner or StructureLearner(self._dim(), self.largest, self.monomials.sets)
        values = scale_to_unit_range(replace_infinite_values(self._values))
        self.monomials, self.slope = learner.learn(2 * self._points - 1, values)
        self.theta = torch.zeros(len(self.monomials), dtype=torch.float64)
        self.settled = learner.has_settled(self.slope.explained) or count >= self.patience
        self._learner = None if self.settled else learner
        if self.settled:
            self._since = self.nfev
            super()._update()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"learning": (self.settled, self._next), "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.settled, self._next = state["learning"]
        self._learner, self._since = None, state.get("since", 0)


def as_cliques(cliques: Iterable[Sequence[int]], n: int) -> list[list[int]]:
    """Groups of bits, as lists.

    Args:
        cliques: What the caller gave.
        n: Number of bits.

    Raises:
        ValueError: If a bit does not exist, or a group has more than 12 bits.
    """
    found = []
    for clique in cliques:
        try:
            members = [operator.index(i) for i in clique]
        except TypeError as error:
            raise ValueError(f"cliques has {clique!r}, expected groups of bits, such as [(0, 1), (1, 2)]") from error
        if not members or not all(0 <= i < n for i in members):
            raise ValueError(f"cliques has {tuple(members)}, expected groups of bits numbered 0 to {n - 1}")
        if len(set(members)) > 12:
            raise ValueError(
                f"cliques has a group of {len(members)} bits, with 2^{len(members)} products; expected at most 12: "
                "give overlapping smaller ones, such as all pairs"
            )
        found.append(members)
    return found
