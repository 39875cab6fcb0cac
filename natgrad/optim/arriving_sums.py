"""Sums over processes that are on their way: statistics in flat messages, sent while other work goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from natgrad.lost_processes import naming_lost
from natgrad.optim.distributed import Ranks
from natgrad.typed_torch import split_tensor, torch_distributed

BUCKET = 2**25
"""Bytes of a message, about: what comes while one is full goes into the next."""
AHEAD = 2**28
"""Bytes that are on their way at most. Then a process waits for the first of them, whose memory it frees."""
STRIPS = 4
"""Strips of rows that a symmetric matrix is sent in, each up to its diagonal block: 5/8 of its entries."""
SMALL = 64
"""Rows of a symmetric matrix below which it is sent as it is: strips would take longer than its bytes."""

Wait = Callable[[], Tensor]


@dataclass
class Message:
    """Entries of one dtype and device for one owner, or for all.

    Attributes:
        kind: The owner (None: all), the dtype and the device.
        entries: Block, entry, the shape that comes out, and its numbers in this message.
        parts: What is sent, in pieces that follow one another.
        numbers: How many there are.
    """

    kind: tuple[int | None, torch.dtype, torch.device]
    entries: list[tuple[str, str, torch.Size, int]] = field(default_factory=list[tuple[str, str, torch.Size, int]])
    parts: list[Tensor] = field(default_factory=list[Tensor])
    numbers: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return self.numbers * self.kind[1].itemsize

    def pack(self) -> Tensor:
        """All parts in one flat tensor; they are let go."""
        flat = torch.empty(self.numbers, dtype=self.kind[1], device=self.kind[2])
        for part, place in zip(self.parts, split_tensor(flat, [p.numel() for p in self.parts]), strict=True):
            place.view(part.shape).copy_(part)
        self.parts.clear()
        return flat


class ArrivingSums:
    """Statistics of one pass on their way to all processes, or to their blocks' owners.

    All processes send the same blocks in the same order. Waiting sends nothing: each may do that when it likes.

    Args:
        ranks: The processes.
        symmetric: The entries whose matrices are symmetric: a part of them is sent.
        deliver: Takes a block's sums, once they are known to be good.
        fine: Whether this process's own part is finite.
    """

    def __init__(
        self,
        ranks: Ranks,
        symmetric: frozenset[str],
        deliver: Callable[[str, dict[str, Tensor]], None],
        fine: bool,
    ) -> None:
        self.ranks, self.symmetric, self.deliver = ranks, symmetric, deliver
        self.bad = start_sum(ranks, torch.tensor(float(not fine), device=ranks.device), "scalars")
        self.taken: bool | None = None
        self.open: dict[Any, Message] = {}
        self.going: deque[tuple[Message, Wait]] = deque()
        self.missing: dict[str, tuple[list[str], dict[str, Tensor]]] = {}

    def send(self, key: str, fresh: Mapping[str, Tensor], owner: int | None) -> None:
        """Send a block's part, with those that come after it.

        Args:
            key: The block.
            fresh: This process's sums by name, in the same shapes on all.
            owner: The only process that gets them; None: all.
        """
        self.missing[key] = list(fresh), {}
        for name, tensor in fresh.items():
            kind = owner, tensor.dtype, tensor.device
            message = self.open.setdefault(kind, Message(kind))
            parts = list(cut_strips(tensor)) if name in self.symmetric else [tensor]
            numbers = sum(part.numel() for part in parts)
            message.entries.append((key, name, tensor.shape, numbers))
            message.parts += parts
            message.numbers += numbers
            if message.size >= BUCKET:
                self._start(self.open.pop(kind))

    def finish(self) -> None:
        """Send what is left."""
        while self.open:
            self._start(self.open.pop(next(iter(self.open))))

    def wait(self) -> bool:
        """Deliver all that is on its way; False where some part was not finite: then nothing is delivered."""
        while self.going:
            self._receive()
        return self._is_good()

    def _start(self, message: Message) -> None:
        self.going.append((message, start_sum(self.ranks, message.pack(), "statistics", message.kind[0])))
        while sum(one.size for one, _ in self.going) > AHEAD and len(self.going) > 1:
            self._receive()

    def _receive(self) -> None:
        message, wait = self.going.popleft()
        flat = wait()
        if not self._is_good():
            return
        parts = split_tensor(flat, [numbers for *_, numbers in message.entries])
        for (key, name, shape, _), part in zip(message.entries, parts, strict=True):
            names, found = self.missing[key]
            found[name] = join_strips(part, shape) if name in self.symmetric else part.clone().view(shape)
            if len(found) == len(names):  # entries of several dtypes come one after the other
                self.deliver(key, {one: found[one] for one in names})
                del self.missing[key]

    def _is_good(self) -> bool:
        if self.taken is None:
            self.taken = not bool(self.bad())
        return self.taken


def start_sum(ranks: Ranks, tensor: Tensor, kind: str, owner: int | None = None) -> Wait:
    """Start `ranks.sum` of a tensor, which is written over. What comes back waits for it.

    Args:
        ranks: The processes.
        tensor: Contiguous.
        kind: Under which name the bytes are counted.
        owner: The only process that gets it, if there is one.
    """
    ranks.count(kind, tensor)
    with naming_lost(ranks.group):
        if owner is None:
            work: Any = torch_distributed.all_reduce(tensor, group=ranks.group, async_op=True)
        else:
            work = torch_distributed.reduce(tensor, group=ranks.group, group_dst=owner, async_op=True)

    def wait() -> Tensor:
        with naming_lost(ranks.group):
            work.wait()
        return tensor

    return wait


def list_strips(shape: Sequence[int]) -> list[tuple[int, int]]:
    """First and last row, excluded, of the strips of a symmetric matrix (..., n, n); one strip of a small one."""
    n = shape[-1] if len(shape) > 1 else 0
    count = STRIPS if n >= SMALL else 1
    return [(n * i // count, n * (i + 1) // count) for i in range(count)]


def cut_strips(matrix: Tensor) -> Iterator[Tensor]:
    """The rows of symmetric matrices (..., n, n) in a few strips, each without what lies right of its diagonal block.

    Views of them: nothing is copied.
    """
    if matrix.dim() < 2:
        yield matrix
        return
    for first, last in list_strips(matrix.shape):
        yield matrix[..., first:last, :last]


def join_strips(flat: Tensor, shape: torch.Size) -> Tensor:
    """The symmetric matrices whose strips follow one another.

    Args:
        flat: Shape (numbers of all strips,).
        shape: (..., n, n); a vector's comes back as it is.
    """
    if len(shape) < 2:
        return flat.clone().view(shape)
    matrix, lead, start = flat.new_empty(shape), shape[:-2], 0
    for first, last in list_strips(shape):
        size = lead.numel() * (last - first) * last
        strip = flat[start : start + size].view(*lead, last - first, last)
        matrix[..., first:last, :last] = strip
        matrix[..., :first, first:last] = strip[..., :first].mT
        start += size
    return matrix
