"""What owners alone remember of their blocks, put together for a checkpoint."""

from __future__ import annotations

from typing import Any

from natgrad.lost_processes import wait_for_all
from natgrad.optim.block_owners import Owners
from natgrad.optim.process_messages import send_tree
from natgrad.optim.state import OWNED, State
from natgrad.pure import map_tensors

ALL_CALL = (
    'with share="memory" each process has a part of the state, and state_dict() puts them together: call it on all of '
    "them, and then let one of them write the file"
)


def gather_numbers(owners: Owners, state: State) -> dict[str, dict[str, Any]]:
    """What other processes remember of blocks, by parameter, on the CPU; nothing where this one remembers all.

    All processes ask at the same time. ExchangeError if some process does not ask within five minutes.
    """
    gathered = dict[str, dict[str, Any]]()
    if not owners.apart:
        return gathered
    wait_for_all(owners.ranks.group, "state_dict()", ALL_CALL)
    kept = state.by_parameter()
    for owner in range(owners.ranks.size):
        names = [name for key, block in state.blocks.items() if owners.of[key] == owner for name in block.layout.names]
        own = {name: kept.get(name, {}) for name in names if owner == owners.ranks.rank}
        tree = {name: {key: numbers[key] for key in OWNED if key in numbers} for name, numbers in own.items()}
        tree = send_tree(owners.ranks, tree, owner, "checkpoints")
        if owner != owners.ranks.rank:
            gathered |= {name: map_tensors(part, lambda t: t.cpu()) for name, part in tree.items()}
    return gathered
