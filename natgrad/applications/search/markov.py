"""Search of bits that depend on one another: Markov random fields with given and with learned cliques."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.search.base import next_seed
from natgrad.applications.search.bits import BitSearch, as_bit_popsize, as_bits
from natgrad.applications.search.monomials import Clique, Monomials
from natgrad.applications.search.regression import Slope, natural_slope
from natgrad.applications.search.relaxation import replace_infinite_values
from natgrad.checks import check_integer

EXPLAINED = 0.95  # a structure that explains as much of f is settled
STRENGTH = 12.0  # of any coefficient: exp(-24) against 1


class MarkovSearch(BitSearch):
    """Minimum over x in {0, 1}^n by a Markov random field, moved by the exact natural gradient of E_p[f].

    If f is a sum of functions of the cliques, it lies in the span of the statistics. The slope is then exact once there
    are more draws than statistics, and the flow ends nowhere but in the minimum.

    With cliques=None they are learned from uniform draws. Pairs whose product correlates with the part of f that is not
    yet explained are joined, the strongest first, to groups of at most `largest` bits. Groups grow by a bit whose
    product with theirs correlates with that part, and products whose coefficients are no more than noise are left out
    again. When there are enough draws, all pairs at once are tried too. This goes on until the statistics explain 95 %
    of the variance of left-out draws, or for `patience` evaluations. Dependence that shows in no pair (parity) is not
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

    def stop(self) -> str | None:
        why = super().stop()
        return None if why and why.startswith("converged") and not self.settled else why  # it is still learning

    def _update(self) -> None:
        if self.settled:
            super()._update()
            return
        count = len(self._values)
        if count < self._next:
            return
        self._next = int(1.15 * count)
        self.monomials, self.slope = learn_structure(
            2 * self._points - 1, replace_infinite_values(self._values), self.largest
        )
        self.theta = torch.zeros(len(self.monomials), dtype=torch.float64)
        if self.slope.explained >= EXPLAINED or count >= self.patience:
            self.settled = True
            super()._update()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"learning": (self.settled, self._next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.settled, self._next = state["learning"]


def learn_structure(signs: Tensor, values: Tensor, largest: int) -> tuple[Monomials, Slope]:
    """The structure whose statistics explain f best at left-out draws, out of a few.

    Args:
        signs: Uniform draws, shape (N, n).
        values: f of them, shape (N,).
        largest: Most bits of a group.

    Returns:
        The statistics, and the slope of f on them.
    """
    n = signs.shape[1]
    found = [fit_structure(Monomials.within(n, []), signs, values)]
    for _ in range(3):  # what is explained no longer hides the rest
        monomials, slope = max(found, key=lambda pair: pair[1].explained)
        residual = values - monomials.values(signs) @ slope.value
        pairs = find_correlated_pairs(signs, residual) + [s for s in monomials.sets if len(s) == 2]
        longer = find_correlated_extensions(monomials, signs, residual, largest)
        candidate = Monomials.of(n, {*monomials.sets, *join_pairs(n, pairs, largest), *longer})
        if candidate.sets == monomials.sets or len(candidate) > 2 * len(values):
            break
        found.append(fit_structure(candidate, signs, values))
        found.append(fit_structure(drop_noise(*found[-1], values), signs, values))
    everything = n + n * (n - 1) // 2
    if 1.2 * everything < len(values) < 2 * everything and everything <= 1000:  # more draws would change little
        found.append(fit_structure(Monomials.within(n, combinations(range(n), 2)), signs, values))
    return max(found, key=lambda pair: pair[1].explained)


def fit_structure(monomials: Monomials, signs: Tensor, values: Tensor) -> tuple[Monomials, Slope]:
    """A structure with the slope of f on its statistics.

    Args:
        monomials: The structure.
        signs: Draws, shape (N, n).
        values: f of them, shape (N,).
    """
    return monomials, natural_slope(monomials.values(signs), values)


def drop_noise(monomials: Monomials, slope: Slope, values: Tensor, chance: float = 0.05) -> Monomials:
    """The statistics whose coefficients are more than noise, and all single bits.

    The error of a coefficient is that of independent statistics, as in `shrink_slope`; by Bonferroni's bound.

    Args:
        monomials: The structure that was fitted.
        slope: Of f on its statistics.
        values: f of uniform draws, shape (N,).
        chance: That any coefficient which is noise is kept.
    """
    left = (1 - min(1.0, max(0.0, slope.explained))) * float(values.var())
    error = max((left / len(values)) ** 0.5, 1e-9 * float(slope.value.abs().max()))
    kept = (slope.value.abs() > normal_quantile(chance / len(monomials)) * error).tolist()
    sets = [s for s, more in zip(monomials.sets, kept, strict=True) if more or len(s) == 1]
    return Monomials.of(monomials.n, sets)


def normal_quantile(chance: float) -> float:
    """The size that a standard normal variable exceeds, in either direction, with the chance given.

    Args:
        chance: Between 0 and 1.
    """
    return float(-torch.special.ndtri(torch.tensor(chance / 2, dtype=torch.float64)))


def find_correlated_pairs(signs: Tensor, residual: Tensor, chance: float = 0.05) -> list[Clique]:
    """Pairs of bits whose product correlates with the residual, the strongest first; by Bonferroni's bound.

    Args:
        signs: Draws, shape (N, n).
        residual: The part of f that is not explained, shape (N,).
        chance: That any pair is found where none correlates.
    """
    count, n = signs.shape
    centred = residual - residual.mean()
    deviation = float(centred.square().mean().sqrt())
    if deviation == 0:
        return []
    scores = ((signs.mT * centred) @ signs).abs().triu(1) / (deviation * count**0.5)
    places = (scores > normal_quantile(chance / max(1.0, n * (n - 1) / 2))).nonzero()
    order = scores[places[:, 0], places[:, 1]].argsort(descending=True)
    return [(int(i), int(j)) for i, j in places[order].tolist()]


def find_correlated_extensions(
    monomials: Monomials, signs: Tensor, residual: Tensor, largest: int, chance: float = 0.05
) -> list[Clique]:
    """Sets of the structure with one more bit, whose product correlates with the residual; by Bonferroni's bound.

    Args:
        monomials: The structure.
        signs: Draws, shape (N, n).
        residual: The part of f that is not explained, shape (N,).
        largest: Most bits of a set.
        chance: That any set is found where none correlates.
    """
    places = [k for k, s in enumerate(monomials.sets) if 2 <= len(s) < largest]
    centred = residual - residual.mean()
    deviation = float(centred.square().mean().sqrt())
    if not places or deviation == 0:
        return []
    products = monomials.values(signs)[:, places]
    scores = ((products.mT * centred) @ signs).abs() / (deviation * len(signs) ** 0.5)
    found = (scores > normal_quantile(chance / scores.numel())).nonzero().tolist()
    wider = ({*monomials.sets[places[k]], j} for k, j in found if j not in monomials.sets[places[k]])
    return [tuple(sorted(s)) for s in wider]


def join_pairs(n: int, pairs: Sequence[Clique], largest: int) -> set[Clique]:
    """The pairs, and all products within the groups that they form.

    Args:
        n: Number of bits.
        pairs: In the order in which they are joined.
        largest: Most bits of a group; a pair that would make a larger one joins nothing.
    """
    group = {i: {i} for i in range(n)}
    for i, j in pairs:
        union = group[i] | group[j]
        if len(union) <= largest:
            for k in union:
                group[k] = union
    groups = {tuple(sorted(members)) for members in group.values() if len(members) > 1}
    return {*pairs, *(s for g in groups for size in range(2, len(g) + 1) for s in combinations(g, size))}


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
