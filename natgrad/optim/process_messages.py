"""Trees of tensors from one process to all: what they look like first, then all numbers of a dtype in one message."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from natgrad.lost_processes import naming_lost
from natgrad.optim.distributed import Ranks
from natgrad.pure import leaves, map_tensors
from natgrad.typed_torch import split_tensor


def send_tree(ranks: Ranks, tree: Any, source: int, kind: str) -> Any:
    """The source's tree on every process, the source too: each tensor lies as the source's, in storage of its own.

    Products round by how a matrix lies in memory.

    Args:
        ranks: The processes.
        tree: Nested dicts and lists of tensors and plain values. Only the source's counts.
        source: Its number.
        kind: Under which name the bytes are counted.
    """
    device = ranks.device
    box = [map_tensors(tree, lambda t: t.to("meta")) if ranks.rank == source else None]
    with naming_lost(ranks.group):
        distributed.broadcast_object_list(box, group=ranks.group, group_src=source, device=device)
    shapes = box[0]
    wanted = list(leaves(shapes))
    own = list(leaves(tree)) if ranks.rank == source else []
    made: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in wanted):
        places = [i for i, t in enumerate(wanted) if t.dtype == dtype]
        sizes = [wanted[i].numel() for i in places]
        if own:
            flat = torch.cat([own[i].reshape(-1) for i in places])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = split_tensor(ranks.broadcast(flat, source, kind), sizes)
        for i, part in zip(places, parts, strict=True):
            made[i] = torch.empty_like(wanted[i], device=device).copy_(part.view(wanted[i].shape))
    numbers = iter(range(len(wanted)))
    return map_tensors(shapes, lambda t: made[next(numbers)])
