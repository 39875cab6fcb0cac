"""What owners alone remember of their blocks, put together for a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from natgrad.lost_processes import wait_for_all
from natgrad.optim.block_averages import OWNED, BlockAverages
from natgrad.optim.process_messages import send_tree
from natgrad.pure import map_tensors

ALL_CALL = (
    'with share="memory" each process has a part of the state, and state_dict() puts them together: call it on all of '
    "them, and then let one of them write the file"
)


def gather_numbers(blocks: BlockAverages) -> dict[Tensor, dict[str, Any]]:
    """What other processes remember of blocks, by parameter, on the CPU; nothing where this one remembers all.

    Args:
        blocks: All processes ask at the same time.

    Raises:
        ExchangeError: If some process does not ask within five minutes.
    """
    owners, found = blocks.owners, dict[Tensor, dict[str, Any]]()
    if not owners.apart:
        return found
    wait_for_all(owners.ranks.group, "state_dict()", ALL_CALL)
    for owner in range(owners.near.size):
        names = [name for key, block in blocks.all.items() if owners.of[key] == owner for name in block.layout.names]
        own = {name: blocks.state.get(blocks.named[name], {}) for name in names if owner == owners.near.rank}
        tree = {name: {key: numbers[key] for key in OWNED if key in numbers} for name, numbers in own.items()}
        tree = send_tree(owners.near, tree, owner, "checkpoints")
        if owner != owners.near.rank:
            found |= {blocks.named[name]: map_tensors(part, lambda t: t.cpu()) for name, part in tree.items()}
    return found
