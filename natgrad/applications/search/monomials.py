"""Products of bits over cliques: the sufficient statistics of a Markov random field, and draws from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

Clique = tuple[int, ...]
ENUMERATED = 12  # bits of a component up to which its states are listed


@dataclass(frozen=True)
class Monomials:
    """T_k(s) = product of s_i over i in the k-th set, for signs s in {-1, +1}^n.

    Attributes:
        n: Number of signs.
        sets: In order of size.
        index: The sets as rows (K, order), padded with n, where a column of ones is added.
    """

    n: int
    sets: tuple[Clique, ...]
    index: Tensor

    @staticmethod
    def of(n: int, sets: Iterable[Clique]) -> Monomials:
        """The products over distinct sets, single signs first.

        Args:
            n: Number of signs.
            sets: Of the numbers of signs.
        """
        chosen = tuple(sorted(set(sets), key=lambda s: (len(s), s)))
        order = max((len(s) for s in chosen), default=1)
        rows = [[*s, *[n] * (order - len(s))] for s in chosen]
        return Monomials(n, chosen, torch.tensor(rows, dtype=torch.long).reshape(len(chosen), order))

    @staticmethod
    def within(n: int, cliques: Iterable[Sequence[int]]) -> Monomials:
        """All products within each clique, and every single sign.

        Args:
            n: Number of signs.
            cliques: Groups of the numbers of signs.
        """
        sets: set[Clique] = {(i,) for i in range(n)}
        for clique in cliques:
            members = sorted(set(clique))
            sets.update(s for size in range(1, len(members) + 1) for s in combinations(members, size))
        return Monomials.of(n, sets)

    def __len__(self) -> int:
        return len(self.sets)

    def values(self, signs: Tensor) -> Tensor:
        """T, shape (N, K).

        Args:
            signs: s, shape (N, n).
        """
        padded = torch.cat([signs, torch.ones_like(signs[:, :1])], 1)
        found = padded[:, self.index[:, 0]]
        for column in range(1, self.index.shape[1]):
            found = found * padded[:, self.index[:, column]]
        return found

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


def draw_signs(monomials: Monomials, theta: Tensor, start: Tensor, sweeps: int, generator: torch.Generator) -> Tensor:
    """Signs (N, n) from p(s) ~ exp(theta T(s)).

    Components of at most `ENUMERATED` signs are drawn exactly, from the list of their states; the others by Gibbs
    sampling, while theta is brought up from zero.

    Args:
        monomials: T.
        theta: Shape (K,).
        start: Signs at which Gibbs sampling starts, shape (N, n).
        sweeps: Rounds of Gibbs sampling over all signs.
        generator: Of the draws.
    """
    signs = start.clone()
    rest: list[int] = []
    for group in monomials.components():
        if len(group) <= ENUMERATED:
            signs[:, group] = draw_from_list(monomials, theta, group, len(start), generator)
        else:
            rest += group
    own = {i: (monomials.index == i).any(1).nonzero().squeeze(1) for i in rest}
    others = {i: torch.where(monomials.index[k] == i, monomials.n, monomials.index[k]) for i, k in own.items()}
    padded = torch.cat([signs, torch.ones_like(signs[:, :1])], 1)
    for sweep in range(sweeps if rest else 0):
        heat = min(1.0, (sweep + 1) / max(1, sweeps - 2))
        for i in rest:
            # P(s_i = 1) = sigmoid(2 h), h the sum of theta_k T_k / s_i over the sets with i
            field = padded[:, others[i]].prod(2) @ theta[own[i]]
            chance = torch.sigmoid(2 * heat * field)
            padded[:, i] = 2.0 * (torch.rand(len(signs), generator=generator, dtype=signs.dtype) < chance) - 1
    return padded[:, : monomials.n]


def draw_from_list(
    monomials: Monomials, theta: Tensor, group: list[int], count: int, generator: torch.Generator
) -> Tensor:
    """Exact draws (count, len(group)) of one component, from the list of its states.

    Args:
        monomials: T.
        theta: Shape (K,).
        group: The numbers of its signs.
        count: How many draws.
        generator: Of the draws.
    """
    states = list_signs(len(group))
    place = {i: k for k, i in enumerate(group)}
    own = [k for k, s in enumerate(monomials.sets) if s[0] in place]
    local = Monomials.of(len(group), [tuple(place[i] for i in monomials.sets[k]) for k in own])
    weights = dict(zip((tuple(sorted(place[i] for i in monomials.sets[k])) for k in own), theta[own], strict=True))
    coefficients = torch.stack([weights[tuple(sorted(s))] for s in local.sets])
    probabilities = torch.softmax(local.values(states) @ coefficients, 0)
    return states[torch.multinomial(probabilities, count, replacement=True, generator=generator)]


def list_signs(n: int) -> Tensor:
    """The 2^n states as signs, shape (2^n, n).

    Args:
        n: Number of signs.
    """
    bits = (torch.arange(2**n).unsqueeze(1) >> torch.arange(n)) & 1
    return 2.0 * bits.to(torch.float64) - 1
