"""Processes that train one model together hold the same one: compared once, before they add anything up."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from natgrad.lost_processes import naming_lost
from natgrad.typed_torch import list_numbers, torch_distributed

MODULUS = 2**61 - 1


def check_equal_models(named: Mapping[str, Tensor], group: Any, *, values: bool = False, settings: str = "") -> None:
    """Check that all processes of a group train parameters of the same names, shapes and dtypes.

    All of them call it at the same time. Two numbers a process are exchanged; the names only where these differ.

    Args:
        named: The parameters by name.
        group: The process group.
        values: True to compare their entries too, bit for bit: where nobody has broadcast them.
        settings: What else must be alike, as text.

    Raises:
        ValueError: On all processes, with the first parameter that differs and the rank that holds it.
    """
    device = next(iter(named.values())).device
    numbers = [hash_names(named), hash_values(named) if values else 0, hash_text(settings)]
    own = torch.tensor(numbers, device=device)
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    with naming_lost(group):
        torch_distributed.all_gather(found, own, group=group)
    hashes: list[list[int]] = list_numbers(torch.stack(found))
    if any(names != hashes[0][0] for names, _, _ in hashes):
        tables: list[Any] = [None] * len(found)
        torch_distributed.all_gather_object(tables, describe_parameters(named), group=group)
        rank = next(i for i, table in enumerate(tables) if table != tables[0])
        first = next(name for name in {**tables[0], **tables[rank]} if tables[0].get(name) != tables[rank].get(name))
        raise ValueError(
            f"the {len(found)} processes hold different models: parameter {first!r} is "
            f"{tables[0].get(first, 'missing')} on rank 0 and {tables[rank].get(first, 'missing')} on rank {rank}. "
            "Build the same model on all of them, or give each model a group of its own processes"
        )
    rank = next((i for i, one in enumerate(hashes) if one[2] != hashes[0][2]), None)
    if rank is not None:
        texts: list[Any] = [None] * len(found)
        torch_distributed.all_gather_object(texts, settings, group=group)
        raise ValueError(
            f"the {len(found)} processes were given different settings, {texts[0]} on rank 0 and {texts[rank]} on rank "
            f"{rank}: build the optimizer alike on all of them"
        )
    rank = next((i for i, one in enumerate(hashes) if one[1] != hashes[0][1]), None)
    if rank is not None:
        raise ValueError(
            f"the parameters have other values on rank {rank} than on rank 0, and would never meet: seed all processes "
            "alike before the model is built, load one checkpoint on all, or wrap it in a DistributedDataParallel"
        )


def describe_parameters(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape and dtype by name, as text."""
    return {name: f"{tuple(p.shape)} of {p.dtype}" for name, p in named.items()}


def hash_names(named: Mapping[str, Tensor]) -> int:
    """A number that differs where a name, a shape, a dtype or their order does."""
    text = "\n".join(f"{name}: {what}" for name, what in describe_parameters(named).items())
    return hash_text(text)


def hash_text(text: str) -> int:
    """A number that differs where a text does, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % MODULUS


def describe_settings(*settings: object) -> str:
    """Choices as they are printed, without the addresses of functions, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", ", ".join(map(repr, settings)))


def hash_values(named: Mapping[str, Tensor]) -> int:
    """A number that differs where an entry does, but for rare chance."""
    device = next(iter(named.values())).device
    sums: list[int] = list_numbers(torch.stack([sum_bits(p.detach()).to(device) for p in named.values()]))
    found = 0
    for one in sums:
        found = (found * 1_000_003 + one) % MODULUS
    return found


def sum_bits(tensor: Tensor) -> Tensor:
    """The sum of all entries' bits as integers, a scalar tensor."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return plain.contiguous().view(kinds[plain.element_size()]).sum(dtype=torch.int64)
