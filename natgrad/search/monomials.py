"""Products of bits over cliques: the sufficient statistics of a Markov random field, and draws from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

Clique = tuple[int, ...]
ENUMERATED = 16  # bits of a component up to which its states are listed


@dataclass(frozen=True)
class Monomials:
    """T_k(s) = product of s_i over i in the k-th set, for signs s in {-1, +1}^n."""

    n: int  # number of signs
    sets: tuple[Clique, ...]  # in order of size
    index: Tensor  # the sets as rows (K, order), padded with n, where a column of ones is added

    @staticmethod
    def of(n: int, sets: Iterable[Clique]) -> Monomials:
        """The products over distinct sets, single signs first."""
        chosen = tuple(sorted(set(sets), key=lambda s: (len(s), s)))
        return Monomials(n, chosen, index_sets(n, chosen))

    @staticmethod
    def within(n: int, cliques: Iterable[Sequence[int]]) -> Monomials:
        """All products within each clique, and every single sign."""
        sets: set[Clique] = {(i,) for i in range(n)}
        for clique in cliques:
            members = sorted(set(clique))
            sets.update(s for size in range(1, len(members) + 1) for s in combinations(members, size))
        return Monomials.of(n, sets)

    def __len__(self) -> int:
        return len(self.sets)

    def values(self, signs: Tensor) -> Tensor:
        """T, shape (N, K), at signs s (N, n)."""
        return multiply_signs(self.index, signs).mT

    @cached_property
    def small_components(self) -> tuple[Components, ...]:
        """The components of at most `ENUMERATED` signs, those of one size together."""
        by_size: dict[int, list[list[int]]] = {}
        for group in self.components():
            if len(group) <= ENUMERATED:
                by_size.setdefault(len(group), []).append(group)
        return tuple(Components.of(self, groups) for groups in by_size.values())

    @cached_property
    def gibbs_sites(self) -> tuple[Sites, ...]:
        """The signs whose states are too many for a list, in groups that Gibbs sampling draws at once."""
        rest = [i for group in self.components() if len(group) > ENUMERATED for i in group]
        return tuple(Sites.of(self, group) for group in group_independent_sites(self, rest))

    def components(self) -> list[list[int]]:
        """Groups of signs that no set joins."""
        root = list(range(self.n))

        def find(i: int) -> int:
            while root[i] != i:
                root[i] = root[root[i]]
                i = root[i]
            return i

        for s in self.sets:
            for j in s[1:]:
                root[find(j)] = find(s[0])
        groups: dict[int, list[int]] = {}
        for i in range(self.n):
            groups.setdefault(find(i), []).append(i)
        return list(groups.values())


def index_sets(n: int, sets: Sequence[Clique]) -> Tensor:
    """The sets as rows (K, order), padded with n, where `multiply_signs` adds ones."""
    order = max([1, *map(len, sets)])
    rows = [[*s, *[n] * (order - len(s))] for s in sets]
    return torch.tensor(rows, dtype=torch.long).reshape(len(sets), order)


def multiply_signs(index: Tensor, signs: Tensor) -> Tensor:
    """Products (K, N) of signs (N, n) over sets (K, order)."""
    rows = torch.cat([signs.mT, torch.ones_like(signs[:, :1]).mT])  # rows are gathered faster than columns
    products = rows[index[:, 0]]
    for column in range(1, index.shape[1]):
        products = products.mul_(rows[index[:, column]])
    return products


def draw_signs(monomials: Monomials, theta: Tensor, start: Tensor, sweeps: int, generator: torch.Generator) -> Tensor:
    """Signs (N, n) from p(s) ~ exp(theta T(s))."""
    # components of at most `ENUMERATED` signs are drawn exactly, from the list of their states; the others by Gibbs
    # sampling, while theta is brought up from zero
    signs, groups = start.clone(), monomials.gibbs_sites
    for components in monomials.small_components:
        signs[:, components.sites.flatten()] = components.draw(theta, len(start), generator).to(signs.dtype)
    if not groups:
        return signs
    # signs that share no set do not depend on one another given the rest: they are drawn at once
    sizes = [len(group.sites) for group in groups]
    weights = [group.read_weights(theta) for group in groups]
    padded, unit = torch.cat([signs, torch.ones_like(start[:, :1])], 1), start.new_ones(())
    for sweep in range(sweeps):
        heat = min(1.0, (sweep + 1) / max(1, sweeps - 2))
        # P(s_i = 1) = sigmoid(2 h_i): s_i = 1 where h_i exceeds half the logit of a uniform draw
        draws = torch.rand(len(start), sum(sizes), generator=generator, device=generator.device, dtype=start.dtype)
        levels = draws.logit_().div_(2 * heat).split(sizes, 1)
        for group, weight, level in zip(groups, weights, levels, strict=True):
            padded[:, group.sites] = torch.copysign(unit, group.field(padded, weight) - level)
    return padded[:, : monomials.n]


@dataclass(frozen=True)
class Sites:
    """Signs that share no set, and the fields h_i = sum of theta_k T_k / s_i over the sets with i that they feel."""

    sites: Tensor  # their numbers, shape (c,)
    own: Tensor  # the sets of each sign, shape (c, most), padded with the number of all sets
    others: Tensor  # the other signs of these sets, shape (c, most, order), padded with n

    @staticmethod
    def of(monomials: Monomials, sites: list[int]) -> Sites:
        """The sets of some signs."""
        n, index = monomials.n, monomials.index
        sets = [(index == i).any(1).nonzero().squeeze(1) for i in sites]
        shape = (len(sites), max(len(k) for k in sets))
        own = torch.full(shape, len(index))
        others = torch.full((*shape, index.shape[1]), n)
        for c, (i, k) in enumerate(zip(sites, sets, strict=True)):
            own[c, : len(k)] = k
            others[c, : len(k)] = torch.where(index[k] == i, n, index[k])
        return Sites(torch.tensor(sites), own, others)

    def read_weights(self, theta: Tensor) -> Tensor:
        """theta of each sign's sets (c, most); where no set has more than two signs, J (n + 1, c) with h = s J."""
        weights = torch.cat([theta, theta.new_zeros(1)])[self.own]
        if self.others.shape[2] > 2:
            return weights
        matrix = theta.new_zeros(int(self.others.max()) + 1, len(self.sites))
        columns = torch.arange(len(self.sites)).unsqueeze(1).expand_as(self.own)
        return matrix.index_put_((self.others.amin(2), columns), weights, accumulate=True)

    def field(self, padded: Tensor, weights: Tensor) -> Tensor:
        """h, shape (N, c)."""
        if self.others.shape[2] <= 2:
            return padded @ weights
        return (padded[:, self.others].prod(3) * weights).sum(2)


def group_independent_sites(monomials: Monomials, sites: list[int]) -> list[list[int]]:
    """Sites in groups of which no two share a set: a greedy colouring."""
    near: dict[int, set[int]] = {i: set() for i in range(monomials.n)}
    for s in monomials.sets:
        for i in s:
            near[i].update(s)
    groups: list[list[int]] = []
    for i in sites:
        free = next((group for group in groups if near[i].isdisjoint(group)), None)
        if free is None:
            groups.append([i])
        else:
            free.append(i)
    return groups


@dataclass(frozen=True)
class Components:
    """Components of m signs each, whose 2^m states can be listed."""

    sites: Tensor  # numbers of their signs, shape (c, m)
    own: Tensor  # the sets within them, shape (k,)
    places: Tensor  # of the sets among the 2^m products of each component, in one row for all of them, shape (k,)

    @staticmethod
    def of(monomials: Monomials, groups: list[list[int]]) -> Components:
        """The sets of some components."""
        size = 2 ** len(groups[0])
        first = {i: c * size for c, group in enumerate(groups) for i in group}
        bit = {i: 1 << k for group in groups for k, i in enumerate(group)}
        own = [k for k, s in enumerate(monomials.sets) if s[0] in first]
        places = [first[monomials.sets[k][0]] + sum(bit[i] for i in monomials.sets[k]) for k in own]
        return Components(torch.tensor(groups), torch.tensor(own), torch.tensor(places))

    def draw(self, theta: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Exact draws (count, c m) from p(s) ~ exp(theta T(s))."""
        c, m = self.sites.shape
        coefficients = theta.new_zeros(c * 2**m).index_add_(0, self.places, theta[self.own])
        chances = torch.softmax(sum_products(coefficients.view(c, 2**m)), 1)
        states = torch.multinomial(chances, count, replacement=True, generator=generator)  # (c, count)
        bits = (states.mT.unsqueeze(2) >> torch.arange(m)) & 1
        return (1 - 2 * bits).flatten(1)


def sum_products(coefficients: Tensor) -> Tensor:
    """sum_k c_k prod_{i in k} s_i for all 2^m states, where bit i of a state's number says s_i = -1."""
    # the fast Walsh-Hadamard transform, four bits at a time: the lowest bits are transformed and become the highest,
    # and once all have had their turn they are in order again
    rows, count = coefficients.shape
    values, left = coefficients, count.bit_length() - 1
    while left > 0:
        matrix = build_hadamard(min(left, 4)).to(values.dtype)
        values = (values.reshape(rows, -1, len(matrix)) @ matrix).mT.reshape(rows, count)
        left -= 4
    return values


def build_hadamard(bits: int) -> Tensor:
    """Sylvester's matrix H_jk = (-1)^(number of bits that j and k share), shape (2^bits, 2^bits)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(bits):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix
