"""Tensors that several processes hold in parts, `DTensor` as `fully_shard` and tensor parallelism make them; whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.lost_processes import naming_lost


def is_split(tensor: Any) -> bool:
    """True for a `DTensor`. Nothing is imported for that: who has none never loaded the module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fully_sharded(module: nn.Module) -> bool:
    """True for a module that `fully_shard` was called on. Nothing is imported for that either."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole tensor; that of a `DTensor` from all processes that hold a part, who all must ask."""
    if not is_split(tensor):
        return tensor
    with naming_lost(tensor.device_mesh):  # type: ignore[attr-defined]
        return tensor.full_tensor()  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, in its own storage."""
    return tensor.to_local() if is_split(tensor) else tensor  # type: ignore[attr-defined]


def write_whole(target: Tensor, value: Tensor) -> None:
    """Write a whole tensor into one that may be split: each process its part. Nothing is sent.

    value: In the whole shape.
    """
    if not is_split(target):
        target.copy_(value)
        return
    from torch.distributed.tensor import DTensor, Replicate

    split: Any = target
    mesh = split.device_mesh
    alike = DTensor.from_local(value.to(target.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
    local_part(target).copy_(local_part(alike.redistribute(mesh, split.placements)))


def zeros_whole(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the whole shape.

    like: Says shape, device and dtype.
    """
    return torch.zeros(like.shape, dtype=dtype or like.dtype, device=like.device)


class WholeTensors(Mapping[str, Tensor]):
    """Tensors by name, each gathered when it is asked for first. All processes ask in the same order.

    Args:
        named: Some may be split.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named = named
        self._whole: dict[str, Tensor] = {}

    def gather(self) -> None:
        """Gather all of them now, before the processes go different ways."""
        for name in self.named:
            self[name]

    def __getitem__(self, name: str) -> Tensor:
        p = self.named[name]
        if not is_split(p):
            return p
        if name not in self._whole:
            self._whole[name] = gather_whole(p.detach())
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)


def any_split(tensors: Iterable[Tensor]) -> bool:
    """True if one of them is a `DTensor`."""
    return any(is_split(tensor) for tensor in tensors)
