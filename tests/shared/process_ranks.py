"""Scenes played by several gloo processes on this machine: one start of the processes for all scenes of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

Scenes = Mapping[str, Callable[[], Any]]


def play(rank: int, size: int, folder: str, scenes: Scenes) -> None:
    """All scenes, in one of the processes."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, timedelta(seconds=240), world_size=size, rank=rank)
    torch.save({name: scene() for name, scene in scenes.items()}, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def run_ranks(scenes: Scenes, size: int, folder: Path) -> list[dict[str, Any]]:
    """What every process found: scene -> its result. The scenes are functions of a module, of no argument."""
    multiprocessing.start_processes(play, (size, str(folder), dict(scenes)), nprocs=size, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def count_ranks() -> int:
    """The processes; one where there is no group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def own_rank() -> int:
    """This process's number."""
    return distributed.get_rank() if distributed.is_initialized() else 0
