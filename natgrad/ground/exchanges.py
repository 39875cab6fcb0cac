"""Sums and agreements of several processes, by whatever exchanges numbers and tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from natgrad.ground.typed_torch import split_tensor

Exchange = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Solve = Callable[[Callable[[], Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Sums:
    """How what one process's pass gives becomes that of all; as it is where there is only one."""

    add: Exchange | None = None  # this process's sums, by name -> those of all
    add_few: Exchange | None = None  # the same of a few numbers that these sums are made with
    # a function of totals and a tensor like its result -> the result, computed by one process for all
    solve: Solve | None = None

    def total(self, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """Statistics that add over examples, by name, over those of all processes."""
        return fresh if self.add is None else self.add(fresh)

    def total_few(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """A few numbers that add over examples, over all processes, before this one's statistics are made."""
        return numbers if self.add_few is None else self.add_few(numbers)

    def solve_once(self, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        """What `make` computes from totals, a tensor like `like`, by one of the processes for all."""
        return make() if self.solve is None else self.solve(make, like)

    def of_whole(self) -> Sums:
        """The same for what is that of all processes already; what one of them computes still comes to all."""
        return replace(self, add=None, add_few=None)


ALONE = Sums()


class SumExchange(Protocol):
    """Several processes that all make the same calls; one alone exchanges nothing."""

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor."""
        ...

    def share_numbers(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """Every process's numbers, in the order of their ranks."""
        ...


def sum_tensors(processes: SumExchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over the processes of each of some tensors, in one exchange."""
    if processes.size == 1 or not tensors:
        return list(tensors)
    total = processes.sum(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = split_tensor(total, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def sum_numbers(processes: SumExchange, numbers: Sequence[float], device: torch.device) -> list[float]:
    """The sums over the processes of each of some numbers."""
    return [sum(column) for column in zip(*processes.share_numbers(numbers, device), strict=True)]


def share_count(processes: SumExchange, count: int, device: torch.device) -> list[int]:
    """How many each process has."""
    return [int(number) for (number,) in processes.share_numbers([count], device)]


def any_asks(processes: SumExchange, asked: bool, device: torch.device) -> bool:
    """True if some process asks, for instance to end."""
    return any(number for (number,) in processes.share_numbers([asked], device))
