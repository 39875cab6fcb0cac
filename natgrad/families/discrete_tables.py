"""Variables of finitely many values and functions of a few of them as tables: sums over all states, and draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from natgrad.families.event_checks import check_width
from natgrad.ground.messages import show_shape

Clique = tuple[int, ...]
LARGEST = 2**22
"""Entries of the largest table that elimination makes."""


class Tables:
    """Functions T_c of cliques written out at every state, the positions of the values, integers (..., n)."""

    def __init__(
        self,
        values: Sequence[Sequence[float]],
        cliques: Sequence[Clique],
        functions: Sequence[Callable[[Tensor], Tensor]],
    ) -> None:
        self.values, self.cliques = [torch.tensor(v, dtype=torch.float64) for v in values], list(cliques)
        self.counts = [len(v) for v in values]
        self.shapes = [tuple(self.counts[i] for i in clique) for clique in self.cliques]
        tables = [self._write_out(*pair) for pair in zip(self.cliques, functions, strict=True)]
        self.flat = torch.cat(tables)
        sizes = [len(table) for table in tables]
        self.sizes, self.owner = sizes, torch.repeat_interleave(torch.tensor(sizes))
        self.offset = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        order = max(len(clique) for clique in self.cliques)
        padded = [(*clique, *[0] * (order - len(clique))) for clique in self.cliques]
        steps = [(*strides(shape), *[0] * (order - len(shape))) for shape in self.shapes]
        self.members, self.steps = torch.tensor(padded), torch.tensor(steps)
        self.order, self.largest = elimination_order(self.counts, self.cliques)

    @property
    def states(self) -> int:
        """How many there are."""
        return math.prod(self.counts)

    def statistics(self, places: Tensor) -> Tensor:
        """T (..., m) at states (..., n)."""
        steps = self.steps.to(places.device)
        entries = (places[..., self.members.to(places.device)] * steps).sum(-1) + self.offset.to(places.device)
        return self.flat.to(places.device)[entries]

    def every_state(self) -> Tensor:
        """All states (S, n), the last variable changing fastest."""
        return torch.cartesian_prod(*(torch.arange(count) for count in self.counts)).view(-1, len(self.counts))

    def points(self, places: Tensor, like: Tensor) -> Tensor:
        """The values (..., n) of states."""
        padded = torch.nn.utils.rnn.pad_sequence(self.values, batch_first=True).to(like)
        return padded[torch.arange(len(self.counts), device=like.device), places]

    def places(self, x: Tensor) -> Tensor:
        """The states (..., n) of values x. ValueError where x is none of the values."""
        check_width(x, len(self.counts), "a value of every variable")
        padded = torch.nn.utils.rnn.pad_sequence(self.values, batch_first=True, padding_value=torch.nan).to(x.device)
        same = x.unsqueeze(-1).to(padded.dtype) == padded
        if not bool(same.any(-1).all()):
            wrong = int((~same.any(-1)).reshape(-1, len(self.counts)).any(0).nonzero()[0])
            raise ValueError(f"x has values of variable {wrong} that are not among {self.values[wrong].tolist()}")
        return same.to(torch.uint8).argmax(-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        """log sum exp(theta . T) over all states, (..., m) -> (...), by eliminating one variable after the other."""
        constant = theta.new_zeros(theta.shape[:-1])
        for scope, _, joined in self._eliminations(theta):
            if len(scope) == 1:
                constant = constant + joined.logsumexp(-1)
        return constant

    def joint(self, theta: Tensor) -> Tensor:
        """theta . T at all states, (..., S)."""
        scope = tuple(range(len(self.counts)))
        total = sum((self._align_factor(f, s, scope) for s, f in self._factors(theta)), theta.new_zeros(()))
        assert isinstance(total, Tensor)
        return total.expand(*theta.shape[:-1], *self.counts).reshape(*theta.shape[:-1], -1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Independent states (count, ..., n): variables against the order of elimination, each given those before."""
        flat = theta.reshape(theta.shape[:-1].numel(), theta.shape[-1])
        rows = torch.arange(len(flat), device=theta.device)
        states = torch.zeros(count, len(flat), len(self.counts), dtype=torch.long, device=theta.device)
        if states.numel() == 0:
            return states.view(count, *theta.shape[:-1], len(self.counts))
        for scope, variable, joined in reversed(list(self._eliminations(flat))):
            others = tuple(i for i in scope if i != variable)
            last = joined.movedim(1 + scope.index(variable), -1).reshape(len(flat), -1, self.counts[variable])
            steps = torch.tensor(strides([self.counts[i] for i in others]), dtype=torch.long, device=theta.device)
            place = (states[..., list(others)] * steps).sum(-1)
            share = last[rows, place].softmax(-1).reshape(-1, self.counts[variable])
            chosen = torch.multinomial(share, 1, generator=generator)
            states[..., variable] = chosen.view(count, len(flat))
        return states.view(count, *theta.shape[:-1], len(self.counts))

    def _factors(self, theta: Tensor) -> list[tuple[Clique, Tensor]]:
        energies = theta[..., self.owner.to(theta.device)] * self.flat.to(theta)
        pieces = energies.split(self.sizes, dim=-1)
        return [(c, p.unflatten(-1, s)) for c, p, s in zip(self.cliques, pieces, self.shapes, strict=True)]

    def _align_factor(self, factor: Tensor, scope: Clique, wider: Clique) -> Tensor:
        batch = factor.shape[: factor.dim() - len(scope)]
        return factor.reshape(*batch, *(self.counts[i] if i in scope else 1 for i in wider))

    def _eliminations(self, theta: Tensor) -> list[tuple[Clique, int, Tensor]]:
        """What is summed over at every variable: the scope, the variable, the table over the scope."""
        waiting: dict[int, list[tuple[Clique, Tensor]]] = {i: [] for i in self.order}
        rank = {variable: place for place, variable in enumerate(self.order)}
        for scope, factor in self._factors(theta):
            waiting[min(scope, key=rank.__getitem__)].append((scope, factor))
        sums = []
        for variable in self.order:
            scope = tuple(sorted({variable, *(i for s, _ in waiting[variable] for i in s)}))
            joined = theta.new_zeros(*theta.shape[:-1], *(self.counts[i] for i in scope))
            for s, factor in waiting.pop(variable):
                joined = joined + self._align_factor(factor, s, scope)
            sums.append((scope, variable, joined))
            rest = tuple(i for i in scope if i != variable)
            if rest:
                reduced = joined.logsumexp(theta.dim() - 1 + scope.index(variable))
                waiting[min(rest, key=rank.__getitem__)].append((rest, reduced))
        return sums

    def _write_out(self, clique: Clique, function: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.cartesian_prod(*(self.values[i] for i in clique)).view(-1, len(clique))
        table = function(x)
        if not isinstance(table, Tensor) or table.shape != x.shape[:1] or not bool(torch.isfinite(table).all()):
            raise ValueError(
                f"the function of clique {clique} gives {show_shape(table)} for x {tuple(x.shape)}, expected finite "
                f"numbers ({len(x)},): one for every row"
            )
        return table.to(torch.float64)


def strides(shape: Sequence[int]) -> list[int]:
    """Of a table in row-major order."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def list_neighbours(n: int, cliques: Sequence[Clique]) -> list[set[int]]:
    """Of every variable those with which it shares a clique."""
    near: list[set[int]] = [set() for _ in range(n)]
    for clique in cliques:
        for i in clique:
            near[i].update(j for j in clique if j != i)
    return near


def elimination_order(counts: Sequence[int], cliques: Sequence[Clique]) -> tuple[list[int], int]:
    """Variables in the order that makes the smallest table next, and the entries of the largest table on the way."""
    near = list_neighbours(len(counts), cliques)
    weight = [count * math.prod(counts[j] for j in near[i]) for i, count in enumerate(counts)]
    left, order, largest = set(range(len(counts))), [], 1
    while left:
        best = min(left, key=lambda i: (weight[i], i))
        largest = max(largest, weight[best])
        if largest > LARGEST:  # a lower bound will do, and any order
            return list(range(len(counts))), largest
        order.append(best)
        left.remove(best)
        for i in near[best]:
            near[i] |= near[best]
            near[i] -= {i, best}
            weight[i] = counts[i] * math.prod(counts[j] for j in near[i])
    return order, largest
