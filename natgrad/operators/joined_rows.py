"""The columns of U in G = U U^T over the examples of all processes, and their Gram matrix without anyone's Jacobian."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.ground.messages import write_choices
from natgrad.ground.spaces import Space
from natgrad.operators.row_parts import Explicit, Outer, Part, cross_gram
from natgrad.operators.rows import Rows
from natgrad.operators.sample_rows import SampleRows, mirror_gram


class RowExchange(Protocol):
    """What processes send one another. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process's number."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same bits on each."""
        ...

    def share_objects(self, thing: Any) -> list[Any]:
        """Every process's object, in the order of their ranks."""
        ...

    def receive_from(self, source: int, tensor: Tensor) -> Tensor:
        """The tensor of the process `source`; elsewhere `tensor` is of its shape, and is written over."""
        ...

    def share_columns(self, matrix: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
        """All processes' rows (sum of counts, some columns): over all slabs and processes, every column once."""
        ...


class JoinedRows(SampleRows):
    """U = [s_0 U_0, s_1 U_1, ...], with U_i (n, r_i) of process i and s_i^2 its share of the examples.

    A process keeps its own columns. Vectors (n,) and (r,) are the same on all processes; their images are added up. For
    the Gram matrix a linear layer sends what went into it and what came back, in place of their products; what is
    written out as a matrix is exchanged in slabs, so that each process sees its share of the parameters for all
    examples. Then the blocks are added up.

    Args:
        local: U_i; None where this process has no examples.
        space: Of the parameters.
        counts: Every r_i.
        shares: Every s_i^2; they add up to 1.
        exchange: Between the processes.
    """

    def __init__(
        self, local: Rows | None, space: Space, counts: Sequence[int], shares: Sequence[float], exchange: RowExchange
    ) -> None:
        self.local, self.space, self.exchange, self.counts = local, space, exchange, list(counts)
        self.starts = [0, *accumulate(counts)]
        self.rank = self.starts[-1]
        self.shares = list(shares)
        self.own = self._slice(exchange.rank)
        self.scale = shares[exchange.rank] ** 0.5

    def __repr__(self) -> str:
        return write_choices(self, size=self.space.size, rank=self.rank, counts=self.counts)

    def _slice(self, rank: int) -> slice:
        return slice(self.starts[rank], self.starts[rank + 1])

    def mv(self, weights: Tensor) -> Tensor:
        local = self.local
        return self.exchange.sum(self.space.zeros() if local is None else local.mv(self.scale * weights[self.own]))

    def rmv(self, vector: Tensor) -> Tensor:
        found = torch.zeros(self.rank, dtype=self.space.dtype, device=self.space.device)
        if self.local is not None:
            found[self.own] = self.scale * self.local.rmv(vector)
        return self.exchange.sum(found)

    def dense(self) -> Tensor:
        found = torch.zeros(self.space.size, self.rank, dtype=self.space.dtype, device=self.space.device)
        if self.local is not None:
            found[:, self.own] = self.scale * self.local.dense()
        return self.exchange.sum(found)

    def squares(self) -> Tensor:
        """Diagonal of U U^T, shape (n,)."""
        local = self.local
        return self.exchange.sum(
            self.space.zeros() if local is None else self.shares[self.exchange.rank] * local.squares()
        )

    def gram(self) -> Tensor:
        """U^T U, shape (r, r)."""
        return mirror_gram(self.lower_gram())

    def lower_gram(self) -> Tensor:
        own = None if self.local is None else self.local.parts
        tables = self.exchange.share_objects(None if own is None else [describe_part(part) for part in own])
        known = [table for table in tables if table is not None]
        if any(table != known[0] for table in known):  # a model that some process's examples were taken apart otherwise
            own = None if self.local is None else [self._written_out()]
            known = [[("Explicit", [(name, block.size) for name, block in self.space.blocks.items()])]]
        total = torch.zeros(self.rank, self.rank, dtype=self.space.dtype, device=self.space.device)
        for i, table in enumerate(known[0]):
            part = None if own is None else own[i]
            if table[0] == "Outer":
                self._add_outer(total, part, table)
            else:
                self._add_explicit(total, part, sum(size for _, size in table[1]))
        total = self.exchange.sum(total)
        roots = torch.tensor(self.shares, dtype=total.dtype, device=total.device).sqrt()
        scale = roots.repeat_interleave(torch.tensor(self.counts, device=total.device))
        return total.mul_(scale).mul_(scale.unsqueeze(1))

    def _written_out(self) -> Explicit:
        assert self.local is not None
        sizes = {name: block.size for name, block in self.space.blocks.items()}
        return Explicit(self.local.dense().mT.contiguous(), sizes)

    def _add_outer(self, total: Tensor, part: Part | None, table: Any) -> None:
        """Add the blocks of a linear layer that fall to this process: half of its row and column of blocks."""
        _, weight, bias, columns, d, o = table
        for source, count in enumerate(self.counts):
            if not count:
                continue
            mine = part if source == self.exchange.rank else None
            shapes = (count // columns, d), (count // columns, columns, o)
            empty = [torch.empty(shape, dtype=total.dtype, device=total.device) for shape in shapes]
            inputs, deltas = (mine.inputs, mine.deltas) if isinstance(mine, Outer) else empty
            other = Outer(
                self.exchange.receive_from(source, inputs), self.exchange.receive_from(source, deltas), weight, bias
            )
            if isinstance(part, Outer) and computes_block(self.exchange.rank, source, self.exchange.size):
                block, there = cross_gram(part, other), self._slice(source)
                if source <= self.exchange.rank:
                    total[self.own, there] += block
                else:
                    total[there, self.own] += block.mT

    def _add_explicit(self, total: Tensor, part: Part | None, columns: int) -> None:
        """Add the Gram matrix over the columns that fall to this process, all processes' rows."""
        assert part is None or isinstance(part, Explicit)
        matrix = torch.empty(0, columns, dtype=total.dtype, device=total.device) if part is None else part.matrix
        for slab in self.exchange.share_columns(matrix, self.counts):
            Explicit(slab, {}).add_gram(total)


def describe_part(part: Part) -> Any:
    """What must be alike in the parts of all processes, as plain values."""
    if isinstance(part, Outer):
        columns, outputs = part.deltas.shape[1:]
        return ("Outer", part.weight, part.bias, columns, part.inputs.shape[1], outputs)
    assert isinstance(part, Explicit)
    return ("Explicit", list(part.sizes.items()))


def computes_block(rank: int, other: int, size: int) -> bool:
    """Whether the block of the Gram matrix between two processes falls to `rank`: one of them computes it.

    Args:
        rank: One of the two.
        other: The other, or the same.
        size: How many processes there are.

    Example:
        >>> ng.operators.computes_block(0, 1, 2), ng.operators.computes_block(1, 0, 2)
        (True, False)
    """
    ahead = (other - rank) % size
    return 2 * ahead < size or (2 * ahead == size and rank < other)
