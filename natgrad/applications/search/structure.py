"""Which products of bits a function depends on: least squares on a structure that grows and shrinks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import torch
from torch import Tensor

from natgrad.applications.search.monomials import Clique, Monomials
from natgrad.families import Slope
from natgrad.linalg import cholesky, shift_diagonal

EXPLAINED = 0.95  # a structure that explains as much of f is settled, once it grows no longer
EXACT = 1e-9  # share of the variance left, below which it is settled at once
SCREENED = 2.5  # deviations of noise from which on a product is tried
CHANCE = 0.05  # that any product is kept which is noise: Bonferroni's bound
ROUNDS = 4  # of trying and leaving out, each time there are new draws
TRIED = 10  # draws beyond the statistics that there are, per product that is tried at once
ROOM = 0.7  # statistics per draw at most
MORE = 1.2  # draws per statistic from which on all pairs are tried
PAIRS = 1000  # single bits and pairs up to which they are
RIDGE = 1e-10  # of the Gram matrix, in its diagonal's unit: products that are equal on all draws


class StructureLearner:
    """Statistics that explain f at uniform draws; each call starts from those of the last one.

    Products that correlate with the part of f that is not explained are tried together, and those whose coefficients
    are no more than noise are left out again. The Gram matrix of the statistics is kept and extended by new draws and
    by new statistics. Its entries are sums of signs, which are exact whatever their order.

    Args:
        n: Number of bits.
        largest: Most bits of a product.
        sets: Products to start from; all single bits are among them in any case.
    """

    def __init__(self, n: int, largest: int, sets: Iterable[Clique] = ()) -> None:
        self.n, self.largest = n, largest
        self.sets: list[Clique] = [(), *Monomials.of(n, {*((i,) for i in range(n)), *sets}).sets]
        self._rows = torch.zeros(len(self.sets), 0, dtype=torch.float64)
        self._gram = torch.zeros(len(self.sets), len(self.sets), dtype=torch.float64)
        self._grows = True

    def learn(self, signs: Tensor, values: Tensor) -> tuple[Monomials, Slope]:
        """The structure after some draws, with the slope of f on its statistics.

        Args:
            signs: All uniform draws so far, shape (N, n).
            values: f of them, finite, shape (N,).
        """
        self._read_draws(signs)
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
        return self._conclude(coefficients, residual, total)

    def has_settled(self, explained: float) -> bool:
        """True if the structure is exact, or explains enough and did not change in the last call.

        Args:
            explained: From the slope that `learn` gave.
        """
        return explained > 1 - EXACT or (explained >= EXPLAINED and not self._grows)

    def _read_draws(self, signs: Tensor) -> None:
        """Extend rows and Gram matrix by the draws that are new."""
        fresh = multiply_signs(self.n, self.sets, signs[self._rows.shape[1] :])
        self._rows = torch.cat([self._rows, fresh], 1)
        self._gram = self._gram + multiply_rows(fresh, fresh)

    def _add(self, signs: Tensor, sets: list[Clique]) -> None:
        """Extend them by products that are tried."""
        fresh, known = multiply_signs(self.n, sets, signs), len(self.sets)
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
        """Products to try: those that correlate with the residual, the strongest first, and groups of joined pairs.

        A product that is independent of the statistics has a standard normal score if it is noise.

        Args:
            signs: Draws, shape (N, n).
            residual: Shape (N,).
            left: The sum of its squares.
        """
        known, count = set(self.sets), len(residual)
        room = min(int(ROOM * count) - len(known), max(8, (count - len(known)) // TRIED))
        scores = self._score_pairs(signs, residual / left**0.5)
        sure = normal_quantile(CHANCE / max(1.0, self.n * (self.n - 1) / 2))
        strong = sorted((s for s in scores if scores[s] > sure), key=lambda s: -scores[s])
        groups = join_pairs(self.n, [*strong, *(s for s in self.sets if len(s) == 2)], self.largest)
        scores |= self._score_extensions(signs, residual / left**0.5)
        tried = sorted((s for s in scores if s not in known), key=lambda s: -scores[s])[: max(0, room)]
        more = sorted(groups - known - set(tried))
        return [*tried, *more] if len(tried) + len(more) <= room else tried

    def _list_pairs(self, count: int) -> list[Clique]:
        """All pairs that are not known, once there are more draws than these: f may be quadratic, and is then exact."""
        size = self.n * (self.n + 1) // 2
        if not (MORE * size <= count < 2 * MORE * size and size <= PAIRS):
            return []
        new = set(combinations(range(self.n), 2)) - set(self.sets)
        return sorted(new) if len(new) + len(self.sets) < count / 1.1 else []

    def _score_pairs(self, signs: Tensor, unit: Tensor) -> dict[Clique, float]:
        scores = ((signs.mT * unit) @ signs).abs().triu(1)
        return {(i, j): float(scores[i, j]) for i, j in (scores > SCREENED).nonzero().tolist()}

    def _score_extensions(self, signs: Tensor, unit: Tensor) -> dict[Clique, float]:
        """Sets of the structure with one more bit."""
        places = [k for k, s in enumerate(self.sets) if 2 <= len(s) < self.largest]
        if not places:
            return {}
        scores = ((self._rows[places] * unit) @ signs).abs()
        found = [(self.sets[places[k]], j, float(scores[k, j])) for k, j in (scores > SCREENED).nonzero().tolist()]
        return {tuple(sorted((*s, j))): score for s, j, score in found if j not in s}

    def _drop_noise(self, target: Tensor, coefficients: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Leave out the products whose coefficients are no more than noise, and fit again.

        The error of a coefficient is sqrt(left / (N - K)) / sqrt(N - K), that of nearly independent statistics.
        """
        free = max(1, len(target) - len(self.sets))
        error = max(float(residual.norm()) / free, 1e-9 * float(coefficients.abs().max()))
        tested = self.n * (self.n / 2 + len(self.sets))
        large = (coefficients.abs() > normal_quantile(CHANCE / tested) * error).tolist()
        kept = [k for k, s in enumerate(self.sets) if len(s) < 2 or large[k]]
        if len(kept) == len(self.sets):
            return coefficients, residual
        self._select(kept)
        return self._fit(target)

    def _conclude(self, coefficients: Tensor, residual: Tensor, total: float) -> tuple[Monomials, Slope]:
        """The statistics with their slope; what is explained by generalised cross-validation."""
        count, size = len(residual), len(self.sets)
        error = float(residual.square().sum()) * (count / max(1, count - size)) ** 2
        explained = 1 - error / total if total > 0 else 0.0
        order = sorted(range(size), key=lambda k: (len(self.sets[k]), self.sets[k]))  # as a learner is built from sets
        self._select(order)
        return Monomials.of(self.n, self.sets[1:]), Slope(coefficients[order[1:]], explained, 0.0)

    def _select(self, places: list[int]) -> None:
        self.sets = [self.sets[k] for k in places]
        self._rows, self._gram = self._rows[places], self._gram[places][:, places]


def multiply_signs(n: int, sets: Sequence[Clique], signs: Tensor) -> Tensor:
    """Products of signs, a row per set, shape (K, N).

    Args:
        n: Number of signs.
        sets: The empty one gives ones.
        signs: Shape (N, n).
    """
    order = max(1, *map(len, sets))
    index = torch.tensor([[*s, *[n] * (order - len(s))] for s in sets])
    rows = torch.cat([signs.mT, torch.ones_like(signs[:, :1]).mT])
    found = rows[index[:, 0]]
    for column in range(1, order):
        found = found.mul_(rows[index[:, column]])
    return found


def multiply_rows(first: Tensor, second: Tensor) -> Tensor:
    """Inner products of rows of signs, exact in float32 up to 2^24 of them and twice as fast.

    Args:
        first: Shape (K, N).
        second: Shape (L, N).
    """
    return (first.float() @ second.float().mT).double() if first.shape[1] < 2**24 else first @ second.mT


def normal_quantile(chance: float) -> float:
    """The size that a standard normal variable exceeds, in either direction, with the chance given.

    Args:
        chance: Between 0 and 1.
    """
    return float(-torch.special.ndtri(torch.tensor(chance / 2, dtype=torch.float64)))


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
