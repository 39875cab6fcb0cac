"""Scenes played by several gloo processes on this machine.

Importing torch costs a process seconds, so one process imports what is needed, and forks for every call: itself it
never computes anything, which makes that safe. Nothing of a call outlives it, and so no crash reaches the next one.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_close
from torch import Tensor, distributed, multiprocessing, nn

PATIENCE = 240
"""Seconds that a process waits for another."""
needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
)


def run_ranks(module: str, size: int, factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every process found: scene -> its result. A module is run once, whichever of pytest's processes ask for it.

    Args:
        module: Its name. In every process, all functions in its `SCENES` are called, in their order.
        size: The processes.
        factory: Of the folder that results are in.
    """
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"{size} ranks of {module}"
    folder.mkdir(exist_ok=True)
    with lock_folder(folder):
        files = [folder / f"{rank}.pt" for rank in range(size)]
        if not all(file.exists() for file in files):
            call_apart(__name__, "start_ranks", size, str(folder), __name__, "play", (module,), needed=[module])
        return [torch.load(file) for file in files]


def wrap_model(model: nn.Module, **options: Any) -> nn.Module:
    """As users train on several processes; the same model where there is one."""
    return nn.parallel.DistributedDataParallel(model, **options) if count_ranks() > 1 else model


def take_part(sizes: Sequence[int]) -> slice:
    """This process's examples, of parts of these sizes; all where there is one process."""
    if count_ranks() == 1:
        return slice(None)
    first = sum(sizes[: own_rank()])
    return slice(first, first + sizes[own_rank()])


def flat_whole(model: nn.Module) -> Tensor:
    """All parameters, put together where processes hold parts of them."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in map(Tensor.detach, model.parameters())]
    return torch.cat([p.reshape(-1) for p in found]).double()


def catch(error: type[Exception] | tuple[type[Exception], ...], action: Callable[[], Any]) -> str:
    """The words of the error that an action ends with; none where it ends well."""
    try:
        action()
    except error as trouble:
        return str(trouble)
    return ""


def assert_joined(ranks: list[dict[str, Any]], alone: dict[str, Any], rtol: float = 1e-9) -> None:
    """All processes have the same parameters bit for bit, and found what one process with all examples did."""
    for rank in ranks:
        assert torch.equal(rank["flat"], ranks[0]["flat"])
    assert_close(ranks[0]["flat"], alone["flat"], rtol)
    for name in alone.keys() - {"flat"}:
        if isinstance(alone[name], float):
            assert ranks[0][name] == pytest.approx(alone[name], rel=1e-7, nan_ok=True)
        else:
            assert all(rank[name] == alone[name] for rank in ranks)


def play(module: str) -> dict[str, Any]:
    """All scenes of a module."""
    return {name: scene() for name, scene in import_module(module).SCENES.items()}


def call_ranks(module: str, function: str, size: int, folder: Path, *args: Any) -> list[Any]:
    """What a function of a module returns in every process, called in all of them with the same arguments.

    Args:
        module: Its name.
        function: Its name there.
        size: The processes.
        folder: For their files.
        *args: Of the function.
    """
    call_apart(__name__, "start_ranks", size, str(folder), module, function, args, needed=[module])
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """One process at a time."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start_ranks(size: int, folder: str, *call: Any) -> None:
    """Make a call in several processes, until all have ended or one failed."""
    Path(folder, "store").unlink(missing_ok=True)  # of a run that failed
    starting: Any = multiprocessing
    starting.start_processes(enter, (size, folder, *call), nprocs=size, start_method="fork")


def enter(rank: int, size: int, folder: str, module: str, function: str, args: tuple[Any, ...]) -> None:
    """The call, in one of the processes; what it returns goes to a file."""
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, timedelta(seconds=PATIENCE), world_size=size, rank=rank)
    found = getattr(import_module(module), function)(*args)
    distributed.barrier()
    distributed.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.part")
    Path(f"{folder}/{rank}.part").rename(f"{folder}/{rank}.pt")


SERVERS: list[Connection] = []
"""The connection to this process's server, once there is one."""


def call_apart(module: str, function: str, *args: Any, needed: Sequence[str] = ()) -> Any:
    """What a function of a module returns, called in a process of its own. RuntimeError with its traceback.

    Args:
        module: Its name.
        function: Its name there.
        *args: Of the function.
        needed: Modules that are imported before the process is forked.
    """
    if not SERVERS:
        context: Any = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        context.Process(target=serve, args=(there,)).start()
        there.close()
        SERVERS.append(here)
        atexit.register(here.close)  # which ends the server
    try:
        SERVERS[0].send((module, function, args, needed))
        trouble, found = SERVERS[0].recv()
    except (EOFError, OSError) as error:
        SERVERS.clear()  # the next call starts another
        raise RuntimeError("the process that forks has ended") from error
    if trouble:
        raise RuntimeError(trouble)
    return found


def serve(calls: Connection) -> None:
    """Fork for one call after another, until the other end of the connection is closed."""
    torch.set_num_threads(1)
    for late in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        import_module(late)
    torch.compiler.reset()  # imports what `fully_shard` does at its first call
    context: Any = multiprocessing.get_context("fork")
    while True:
        try:
            module, function, args, needed = calls.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            for name in [module, *needed]:
                import_module(name)
        except Exception:  # noqa: BLE001 - told where the call was made
            calls.send((traceback.format_exc(), None))
            continue
        gc.freeze()  # forks share what is there, rather than copy it at their first collection
        child = context.Process(target=answer, args=(calls, module, function, args))
        child.start()
        child.join()
        if child.exitcode:
            calls.send((f"{module}.{function} ended with the exit code {child.exitcode}", None))


def answer(calls: Connection, module: str, function: str, args: tuple[Any, ...]) -> None:
    """One call, in a process of its own."""
    trouble, found = "", None
    try:
        found = getattr(import_module(module), function)(*args)
    except Exception:  # noqa: BLE001 - told where the call was made
        trouble = traceback.format_exc()
    calls.send((trouble, found))


def count_ranks() -> int:
    """The processes; one where there is no group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def own_rank() -> int:
    """This process's number."""
    return distributed.get_rank() if distributed.is_initialized() else 0
