"""What processes send one another besides sums: pieces of vectors, tensors of one of them, columns of matrices."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from natgrad.lost_processes import naming_lost
from natgrad.optim.distributed import Ranks, meet
from natgrad.optim.equal_models import describe_settings
from natgrad.optim.guard import NotFiniteError
from natgrad.optim.process_messages import send_tree
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
    if ranks.size == 1:
        return [[float(number) for number in numbers]]
    table = torch.zeros(ranks.size, len(numbers), dtype=torch.float64, device=device)
    table[ranks.rank] = torch.tensor(numbers, dtype=torch.float64, device=device)
    return list_numbers(ranks.sum(table))  # adding zeros rounds nothing, and infinities stay in their own entries


@dataclass(frozen=True)
class RankExchange:
    """What the processes that train one model send one another; `natgrad.operators.JoinedRows` asks for it.

    All of them make the same calls in the same order.

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
        """The sum over all processes, the same bits on each.

        Args:
            tensor: This one's.
        """
        return self.ranks.sum(tensor)

    def share_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """Every process's numbers, in the order of their ranks.

        Args:
            numbers: This one's; as many on all of them.
            device: Where they are exchanged.
        """
        return share_numbers(self.ranks, numbers, device)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all processes, (sum of all b, ...) from (b, ...) each, in the order of their ranks.

        Args:
            rows: This process's.
        """
        if self.size == 1:
            return rows
        counts = [int(count) for (count,) in self.share_numbers([len(rows)], rows.device)]
        found = rows.new_zeros((sum(counts), *rows.shape[1:]))
        start = sum(counts[: self.rank])
        found[start : start + len(rows)] = rows
        return self.sum(found)

    def send_tree(self, tree: Any, source: int, kind: str) -> Any:
        """The source's tree on every process.

        Args:
            tree: Nested dicts and lists of tensors and plain values. Only the source's counts.
            source: Its number.
            kind: Under which name the bytes are counted.
        """
        return send_tree(self.ranks, tree, source, kind)

    @contextmanager
    def failing_together(self, device: torch.device) -> Generator[None]:
        """An error within is an error on all processes, before any of them waits for another.

        Nothing is exchanged within. The process that fails raises its own error.

        Args:
            device: Where numbers are exchanged.

        Raises:
            NotFiniteError: On the others, where one met a number that is not finite.
            RuntimeError: On the others, for any other error.
        """
        trouble: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            trouble = error
        if self.size == 1:
            return
        told = [one[0] for one in self.share_numbers([count_trouble(trouble)], device)]
        if trouble is not None:
            raise trouble
        if any(told):
            rank = next(i for i, one in enumerate(told) if one)
            kind = NotFiniteError if told[rank] == 1 else RuntimeError
            raise kind(
                f"process {rank} of {self.size} met an error, which it reports itself; nothing was changed anywhere"
            )

    def share_objects(self, thing: Any) -> list[Any]:
        """Every process's object, in the order of their ranks. It is pickled: a few plain values.

        Args:
            thing: This one's.
        """
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size
        with naming_lost(self.ranks.group):
            torch_distributed.all_gather_object(found, thing, group=self.ranks.group)
        return found

    def receive_from(self, source: int, tensor: Tensor) -> Tensor:
        """The tensor of one process.

        Args:
            source: Its number.
            tensor: There what is sent; elsewhere one of its shape, which is written over.
        """
        tensor = tensor.contiguous()
        group = self.ranks.group
        with naming_lost(group):
            distributed.broadcast(tensor, group=group, group_src=source)
        return tensor

    def share_columns(self, matrix: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
        """All processes' rows, some columns at a time: each column of the slabs comes to one process.

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


def meet_processes(named: Mapping[str, Tensor], group: Any, *settings: object) -> RankExchange:
    """The processes of a group, after they compared what they train; one alone for no group.

    Args:
        named: What is trained, by name.
        group: Of `torch.distributed`, or None.
        *settings: What must be alike on all of them.

    Raises:
        TypeError: For a group that is none.
        ValueError: For a group that this process is not in; if the processes start from other values.
    """
    if group is None:
        return RankExchange(Ranks())
    ranks = meet(named, group)[1]
    ranks.device = next(iter(named.values())).device
    ranks.compare(named, describe_settings(*settings))
    return RankExchange(ranks)


def count_trouble(trouble: Exception | None) -> float:
    """An error as a number: 0 for none, 1 for a number that is not finite, 2 for any other."""
    if trouble is None:
        return 0.0
    return 1.0 if isinstance(trouble, NotFiniteError) else 2.0
