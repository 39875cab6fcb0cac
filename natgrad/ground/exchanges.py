"""Sums and agreements of several processes, by whatever exchanges numbers and tensors between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from natgrad.ground.typed_torch import split_tensor


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
