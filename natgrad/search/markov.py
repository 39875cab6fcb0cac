"""Search of bits that depend on one another: Markov random fields with given and with learned cliques."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from natgrad.families import Slope
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import cholesky, shift_diagonal
from natgrad.search.base import derive_seed, spell_arguments
from natgrad.search.bits import LEAST, WAIT, BitSearch, as_bit_popsize, as_bits
from natgrad.search.monomials import Clique, Monomials, draw_signs, index_sets, multiply_signs
from natgrad.search.relaxation import MORE, Relaxation, replace_infinite_values, scale_to_unit_range

GROWTH = 1.2  # of the draws, until the structure is learned again
PLATEAU = 1 / 3  # of uniform draws: as many with the worst value of all are not worth a structure
STRENGTH = 12.0  # of any coefficient: exp(-24) against 1
EXACT = 1e-9  # share of the variance left, below which it is settled at once


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

    STATE = ("settled", "_next")

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
        self._given = given = None if cliques is None else as_cliques(cliques, n)
        monomials = Monomials.within(n, given or [])
        super().__init__(n, monomials, as_bit_popsize(popsize, n), seed, STRENGTH, margin=min(0.25, 1 / n))
        self.arguments = spell_arguments(n=n, cliques=given, popsize=self.popsize, largest=largest, seed=seed)

    def renew(self, popsize: int, run: int) -> MarkovSearch:
        seed = derive_seed(self._generator, run)
        settings = {"largest": self.largest, "patience": self.patience}
        return MarkovSearch(self._dim(), self._given, popsize, seed, **settings)

    @property
    def cliques(self) -> list[Clique]:
        """The largest sets of bits that are joined."""
        sets = [set(s) for s in self.monomials.sets]
        return [s for s in self.monomials.sets if not any(set(s) < other for other in sets)]

    def stop(self) -> str | None:
        why = super().stop()
        learning = not self.settled and not self._climbing
        return None if why and why.startswith("converged") and learning else why

    def _draw_field(self) -> Tensor:
        n = self._dim()
        start = (
            2.0
            * torch.randint(0, 2, (self.popsize, n), generator=self._generator, device=self._generator.device).to(
                torch.float64
            )
            - 1
        )
        if self.theta.any():  # all zeros before the first step: the start is a draw already
            start = draw_signs(self.monomials, self.theta, start, self.sweeps, self._generator)
        return (start + 1) / 2

    def _move_field(self, points: Tensor, values: Tensor) -> None:
        self._note_draws(values)
        Relaxation._move(self, points, values)
        if self._climbing and not self._noisy:  # the end of the field is not that of the search
            self._same, self._collapsed = self._flat // self._size, False

    def _has_ended(self) -> bool:
        """True if the first climb should begin: the structure does not explain f, and its field ends or stands."""
        # While cliques are learned, it begins where a large share of the draws has the worst value. These say nothing
        # of the other bits, as of points that are not feasible; a structure would be learned of who is among them.
        if not self.settled:
            worst = self._archive.values == self._archive.values.max()
            ended = int(worst.sum()) >= PLATEAU * len(worst) and not bool(worst.all())
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
        count = len(self._archive.values)
        if count < max(self._next, MORE * (self._dim() + 1)):
            return
        self._next = int(GROWTH * count)
        learner = self._learner or StructureLearner(self._dim(), self.largest, self.monomials.sets)
        values = scale_to_unit_range(replace_infinite_values(self._archive.values))
        self.monomials, self.slope = learner.learn(2 * self._archive.points - 1, values)
        self.theta = torch.zeros(len(self.monomials), dtype=torch.float64)
        self.settled = learner.has_settled(self.slope.explained) or count >= self.patience
        self._learner = None if self.settled else learner
        if self.settled:
            self._since = self.nfev
            super()._update()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._learner = None


def as_cliques(cliques: Iterable[Sequence[int]], n: int) -> list[list[int]]:
    """Groups of bits, as lists."""
    groups: list[list[int]] = []
    for clique in cliques:
        try:
            members = [operator.index(i) for i in clique]
        except TypeError:
            members = []
        if not members or not all(0 <= i < n for i in members):
            came = tuple(members) or repr(clique)
            raise ValueError(f"cliques has {came}, expected groups of bits from 0 to {n - 1}, such as [(0, 1), (1, 2)]")
        if len(set(members)) > 12:
            raise ValueError(
                f"cliques has a group of {len(members)} bits, with 2^{len(members)} products; expected at most 12: "
                "give overlapping smaller ones, such as all pairs"
            )
        groups.append(members)
    return groups


# The structure, learned from uniform draws

EXPLAINED = 0.95  # a structure that explains as much of f is settled, once it grows no longer
SCREENED = 2.5  # deviations of noise from which on a product is tried
CHANCE = 0.05  # that any product is kept which is noise: Bonferroni's bound
ROUNDS = 4  # of trying and leaving out, each time there are new draws
TRIED = 10  # draws beyond the statistics that there are, per product that is tried at once
ROOM = 0.7  # statistics per draw at most
ALL_PAIRS = 1.2  # draws per statistic from which on all pairs are tried
PAIRS = 1000  # single bits and pairs up to which they are
RIDGE = 1e-10  # of the Gram matrix, in its diagonal's unit: products that are equal on all draws


class StructureLearner:
    """Statistics that explain f at uniform draws; each call starts from those of the last one."""

    # The Gram matrix of the statistics is kept, and extended by new draws and new statistics: sums of signs are exact
    # whatever their order.

    def __init__(self, n: int, largest: int, sets: Iterable[Clique] = ()) -> None:
        self.n, self.largest = n, largest
        self.sets: list[Clique] = [(), *Monomials.of(n, {*((i,) for i in range(n)), *sets}).sets]
        self._rows = torch.zeros(len(self.sets), 0, dtype=torch.float64)
        self._gram = torch.zeros(len(self.sets), len(self.sets), dtype=torch.float64)
        self._grows = True

    def learn(self, signs: Tensor, values: Tensor) -> tuple[Monomials, Slope]:
        """The structure after some draws, with the slope of f on its statistics."""
        fresh = multiply_signs(index_sets(self.n, self.sets), signs[self._rows.shape[1] :])  # the draws that are new
        self._rows = torch.cat([self._rows, fresh], 1)
        self._gram = self._gram + multiply_rows(fresh, fresh)
        target = values - values.mean()
        total = float(target.square().sum())
        before = set(self.sets)
        coefficients, residual = self._fit(target)
        for k in range(ROUNDS):
            left = float(residual.square().sum())
            if left <= 1e-20 * total:
                break
            tried = (self._list_pairs(len(values)) if k == 0 else []) or self._screen(signs, residual, left)
            if not tried:
                break
            self._add(signs, tried)
            coefficients, residual = self._drop_noise(target, *self._fit(target))
            if float(residual.square().sum()) > 0.98 * left:
                break
        self._grows = set(self.sets) != before
        # what is explained, by generalised cross-validation
        count, size = len(residual), len(self.sets)
        error = float(residual.square().sum()) * (count / max(1, count - size)) ** 2
        explained = 1 - error / total if total > 0 else 0.0
        order = sorted(range(size), key=lambda k: (len(self.sets[k]), self.sets[k]))  # as a learner is built from sets
        self._select(order)
        return Monomials.of(self.n, self.sets[1:]), Slope(coefficients[order[1:]], explained, 0.0)

    def has_settled(self, explained: float) -> bool:
        """True if the structure is exact, or explains enough and did not change in the last call."""
        return explained > 1 - EXACT or (explained >= EXPLAINED and not self._grows)

    def _add(self, signs: Tensor, sets: list[Clique]) -> None:
        """Extend rows and Gram matrix by products that are tried."""
        fresh, known = multiply_signs(index_sets(self.n, sets), signs), len(self.sets)
        gram = self._gram.new_empty(known + len(sets), known + len(sets))
        gram[:known, :known] = self._gram
        gram[known:, :known] = multiply_rows(fresh, self._rows)
        gram[:known, known:] = gram[known:, :known].mT
        gram[known:, known:] = multiply_rows(fresh, fresh)
        self.sets, self._rows, self._gram = [*self.sets, *sets], torch.cat([self._rows, fresh]), gram

    def _fit(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Least squares: coefficients (K,), and what they leave of the values (N,)."""
        factor = cholesky(shift_diagonal(self._gram, RIDGE * len(target)))
        coefficients, residual = torch.zeros_like(self._gram[0]), target
        for _ in range(2):  # the second time takes away what the ridge and round-off did
            coefficients = coefficients + factor.solve((self._rows @ residual).unsqueeze(1)).squeeze(1)
            residual = target - coefficients @ self._rows
        return coefficients, residual

    def _screen(self, signs: Tensor, residual: Tensor, left: float) -> list[Clique]:
        """Products to try: those that correlate with the residual, the strongest first, and groups of joined pairs."""
        # A product that is independent of the statistics has a standard normal score if it is noise.
        known, count = set(self.sets), len(residual)
        room = min(int(ROOM * count) - len(known), max(8, (count - len(known)) // TRIED))
        unit = residual / left**0.5
        products = ((signs.mT * unit) @ signs).abs().triu(1)
        scores = {(i, j): float(products[i, j]) for i, j in (products > SCREENED).nonzero().tolist()}
        sure = find_two_sided_quantile(CHANCE / max(1.0, self.n * (self.n - 1) / 2))
        strong = sorted((s for s in scores if scores[s] > sure), key=lambda s: -scores[s])
        groups = join_pairs(self.n, [*strong, *(s for s in self.sets if len(s) == 2)], self.largest)
        scores |= self._score_extensions(signs, unit)
        tried = sorted((s for s in scores if s not in known), key=lambda s: -scores[s])[: max(0, room)]
        more = sorted(groups - known - set(tried))
        return [*tried, *more] if len(tried) + len(more) <= room else tried

    def _list_pairs(self, count: int) -> list[Clique]:
        """All pairs that are not known, once there are more draws than these: f may be quadratic, and is then exact."""
        size = self.n * (self.n + 1) // 2
        if not (ALL_PAIRS * size <= count < 2 * ALL_PAIRS * size and size <= PAIRS):
            return []
        new = set(combinations(range(self.n), 2)) - set(self.sets)
        return sorted(new) if len(new) + len(self.sets) < count / 1.1 else []

    def _score_extensions(self, signs: Tensor, unit: Tensor) -> dict[Clique, float]:
        """Sets of the structure with one more bit."""
        places = [k for k, s in enumerate(self.sets) if 2 <= len(s) < self.largest]
        if not places:
            return {}
        scores = ((self._rows[places] * unit) @ signs).abs()
        strong = [(self.sets[places[k]], j, float(scores[k, j])) for k, j in (scores > SCREENED).nonzero().tolist()]
        return {tuple(sorted((*s, j))): score for s, j, score in strong if j not in s}

    def _drop_noise(self, target: Tensor, coefficients: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Leave out the products whose coefficients are no more than noise, and fit again."""
        # the error of a coefficient is sqrt(left / (N - K)) / sqrt(N - K), that of nearly independent statistics
        free = max(1, len(target) - len(self.sets))
        error = max(float(residual.norm()) / free, 1e-9 * float(coefficients.abs().max()))
        tested = self.n * (self.n / 2 + len(self.sets))
        large = (coefficients.abs() > find_two_sided_quantile(CHANCE / tested) * error).tolist()
        places = [k for k, s in enumerate(self.sets) if len(s) < 2 or large[k]]
        if len(places) == len(self.sets):
            return coefficients, residual
        self._select(places)
        return self._fit(target)

    def _select(self, places: list[int]) -> None:
        self.sets = [self.sets[k] for k in places]
        self._rows, self._gram = self._rows[places], self._gram[places][:, places]


def multiply_rows(first: Tensor, second: Tensor) -> Tensor:
    """Inner products of rows of signs, exact in float32 up to 2^24 of them and twice as fast."""
    return (first.float() @ second.float().mT).double() if first.shape[1] < 2**24 else first @ second.mT


def find_two_sided_quantile(chance: float) -> float:
    """The size that a standard normal variable exceeds, in either direction, with the chance given."""
    return float(-torch.special.ndtri(torch.tensor(chance / 2, dtype=torch.float64)))


def join_pairs(n: int, pairs: Sequence[Clique], largest: int) -> set[Clique]:
    """The pairs, and all products within the groups that they form."""
    group = {i: {i} for i in range(n)}
    for i, j in pairs:
        union = group[i] | group[j]
        if len(union) <= largest:
            for k in union:
                group[k] = union
    groups = {tuple(sorted(members)) for members in group.values() if len(members) > 1}
    return {*pairs, *(s for g in groups for size in range(2, len(g) + 1) for s in combinations(g, size))}
