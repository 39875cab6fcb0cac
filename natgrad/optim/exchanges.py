"""What processes send one another besides sums: pieces of vectors, tensors of one of them, columns of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from natgrad.lost_processes import naming_lost
from natgrad.optim.distributed import Ranks
from natgrad.typed_torch import list_numbers, torch_distributed

SLAB = 2**22
"""Numbers that a process receives of a matrix at a time."""


def share_numbers(ranks: Ranks, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
    """Every process's numbers, in the order of their ranks.

    Args:
        ranks: The processes.
        numbers: This one's; as many on all of them.
        device: Where they are exchanged.
    """
    table = torch.zeros(ranks.size, len(numbers), dtype=torch.float64, device=device)
    table[ranks.rank] = torch.tensor(numbers, dtype=torch.float64, device=device)
    return list_numbers(ranks.sum(table))  # adding zeros rounds nothing, and infinities stay in their own entries


@dataclass(frozen=True)
class RankExchange:
    """`natgrad.operators.JoinedRows` between the processes that train one model.

    Args:
        ranks: The processes.
    """

    ranks: Ranks

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.ranks.size

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same bits on each."""
        return self.ranks.sum(tensor)

    def share_objects(self, thing: Any) -> list[Any]:
        """Every process's object, in the order of their ranks. It is pickled: a few plain values."""
        found: list[Any] = [None] * self.size
        with naming_lost(self.ranks.group):
            torch_distributed.all_gather_object(found, thing, group=self.ranks.group)
        return found

    def receive_from(self, source: int, tensor: Tensor) -> Tensor:
        """The tensor of the process `source`; elsewhere `tensor` is of its shape, and is written over."""
        tensor = tensor.contiguous()
        group = self.ranks.group
        with naming_lost(group):
            distributed.broadcast(tensor, group=group, group_src=source)
        return tensor

    def share_columns(self, matrix: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
        """All processes' rows, some columns at a time: of all slabs together each process sees every column once.

        The Gram matrix of all rows is the sum over processes and slabs of S S^T. A process receives its share of all
        rows' entries, and holds `SLAB` of them at a time.

        Args:
            matrix: This process's rows, shape (r, columns).
            counts: Every process's r.

        Yields:
            S, shape (sum of counts, some columns), rows in the order of the ranks.
        """
        columns, size = matrix.shape[1], self.size
        width = max(1, SLAB // max(1, sum(counts))) * size
        for start in range(0, columns, width):
            stop = min(start + width, columns)
            edges = [start + (stop - start) * i // size for i in range(size + 1)]
            widths = [edges[i + 1] - edges[i] for i in range(size)]
            sent = torch.cat([matrix[:, edges[i] : edges[i + 1]].reshape(-1) for i in range(size)])
            own = widths[self.rank]
            received = sent.new_empty(sum(counts) * own)
            sizes = [count * own for count in counts], [len(matrix) * w for w in widths]
            with naming_lost(self.ranks.group):
                torch_distributed.all_to_all_single(received, sent, *sizes, group=self.ranks.group)
            yield received.view(sum(counts), own)
