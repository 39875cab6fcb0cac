"""Tensors that lie in parts on several processes, and processes that are gone."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from natgrad.ground.typed_torch import torch_plain

PAUSE = 1.0
"""Seconds between two looks for a question."""
PATIENCE = 4.0
"""Seconds that an answer may take."""

LISTENERS: weakref.WeakKeyDictionary[Any, PresenceListener] = weakref.WeakKeyDictionary()
"""By `torch.distributed.group.WORLD`, of which there is one at a time."""


class ExchangeError(RuntimeError):
    """An exchange between processes failed. The message names those that do not answer."""


class PresenceListener:
    """Answers when another process asks who is there, from a thread: while this one waits in an exchange, too."""

    def __init__(self, world: Any) -> None:
        self.rank, size = distributed.get_rank(world), distributed.get_world_size(world)
        self.store = world.get_group_store().clone()  # a connection of its own, which no waiting blocks
        turn = (self.store.add("natgrad started", 1) - 1) // size  # a program may initialize its processes again
        self.prefix = f"natgrad {turn} "  # of keys of the store: questions, once something failed, and answers
        self.met: dict[str, int] = {}
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._listen, args=(weakref.ref(world),), daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, which must not be within the store when the interpreter ends."""
        self.done.set()
        self.thread.join()

    def _listen(self, world: weakref.ref[Any]) -> None:
        try:
            while not self.done.wait(PAUSE):
                if world() is None or world() is not distributed.group.WORLD:
                    return  # torch prints a page where a store is asked after its end
                if self.store.check([f"{self.prefix}asked"]):
                    self.store.set(f"{self.prefix}here {self.rank}", "")
                    return
        except RuntimeError:  # the store has ended with the process that held it
            return

    def wait_for_all(self, what: str, members: Sequence[int], seconds: float) -> list[int]:
        """The members that did not come within the time; nobody, as soon as all have."""
        place = f"{self.prefix}{what} {min(members)} {max(members)} {len(members)} "
        self.met[place] = self.met.get(place, 0) + 1
        place += f"{self.met[place]} "
        self.store.set(f"{place}{self.rank}", "")
        if self.store.add(f"{place}count", 1) == len(members):
            self.store.set(f"{place}done", "")
        end = time.monotonic() + seconds
        while not self.store.check([f"{place}done"]):
            if time.monotonic() > end:
                return [rank for rank in members if not self.store.check([f"{place}{rank}"])]
            time.sleep(PAUSE / 50)
        return []

    def find_lost(self, members: Sequence[int]) -> list[int]:
        """The members that do not answer, this process's own number never among them."""
        # what one of them found first holds for all, since those who have answered end soon
        verdict = f"{self.prefix}lost of {min(members)} {max(members)} {len(members)}"
        self.store.set(f"{self.prefix}here {self.rank}", "")
        self.store.set(f"{self.prefix}asked", "")
        waiting, end = set(members), time.monotonic() + PATIENCE
        while waiting and time.monotonic() < end and not self.store.check([verdict]):
            waiting -= {rank for rank in waiting if self.store.check([f"{self.prefix}here {rank}"])}
            time.sleep(PAUSE / 20)
        answer = self.store.compare_set(verdict, "", " ".join(map(str, sorted(waiting))) or "nobody").decode()
        return [int(rank) for rank in answer.split() if rank != "nobody"]


def listen_for_questions() -> None:
    """Let this process answer when others ask who is there. All that train one model call it."""
    world = distributed.group.WORLD
    if world not in LISTENERS:
        LISTENERS[world] = PresenceListener(world)


def wait_for_all(group: Any, what: str, why: str, seconds: float = 300.0) -> None:
    """Wait until all processes of a group are here, before they exchange what nobody could tell apart from a step."""
    listener = LISTENERS.get(distributed.group.WORLD)
    members = distributed.get_process_group_ranks(group)
    missing = [] if listener is None else listener.wait_for_all(what, members, seconds)
    if missing:
        raise ExchangeError(f"{what} was called on {len(members) - len(missing)} of {len(members)} processes, {why}")


@contextmanager
def naming_lost(group: Any) -> Generator[None]:
    """What is exchanged within fails with an `ExchangeError` that names the processes that have ended."""
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        raise ExchangeError(describe_failure(group, error)) from error


def describe_failure(group: Any, error: Exception) -> str:
    """Why an exchange failed, and what to do."""
    mesh = getattr(group, "mesh", None)
    members = distributed.get_process_group_ranks(group) if mesh is None else mesh.flatten().tolist()
    what = f"an exchange between {len(members)} processes failed"
    again = f"Launch all of them again from the last checkpoint. torch's own error: {error}"
    listener = LISTENERS.get(distributed.group.WORLD)
    if listener is None:
        return f"{what}. {again}"
    try:
        lost = listener.find_lost(members)
    except RuntimeError:
        return f"{what}, and the store that they met at has ended with the process that held it, often rank 0. {again}"
    if not lost:
        return (
            f"{what}, though all of them are there: let all call loss and step equally often, or give "
            f"init_process_group a longer timeout. {again}"
        )
    names = ("rank " if len(lost) == 1 else "ranks ") + ", ".join(map(str, lost))
    return f"{what}: {names} ended, or cannot answer. {again}"


# Tensors that several processes hold in parts, `DTensor` as `fully_shard` and tensor parallelism make them; whole


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
    """Write a whole tensor into one that may be split: each process its part. Nothing is sent."""
    if not is_split(target):
        target.copy_(value)
        return
    from torch.distributed.tensor import DTensor, Replicate

    split: Any = target
    mesh = split.device_mesh
    alike = DTensor.from_local(value.to(target.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
    local_part(target).copy_(local_part(alike.redistribute(mesh, split.placements)))


def write_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """`write_whole` of each: by one call where none is split."""
    if any_split(targets):
        for target, value in zip(targets, values, strict=True):
            write_whole(target, value)
    elif targets:
        torch_plain._foreach_copy_(targets, values)


def zeros_whole(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the whole shape."""
    return torch.zeros(like.shape, dtype=dtype or like.dtype, device=like.device)


class WholeTensors(Mapping[str, Tensor]):
    """Tensors by name, each gathered when it is asked for first. All processes ask in the same order."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named, self._any = named, any_split(named.values())
        self._whole: dict[str, Tensor] = {}

    def gather(self) -> None:
        """Gather all of them now, before the processes go different ways."""
        if self._any:
            for name in self.named:
                self[name]

    def __getitem__(self, name: str) -> Tensor:
        p = self.named[name]
        if not (self._any and is_split(p)):
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
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)
