"""Pieces of a study done beside one another, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class WorkerTask:
    """work(tell) does the piece and writes its record; tell(fraction) says how far it is."""

    name: str
    work: Callable[[Callable[[float], None]], None]


def choose_start() -> str:
    """How a process starts: from a server that has imported this package, on Linux; as a fresh interpreter elsewhere.

    A fork of the running program would also copy its threads' locks and its devices, which no child can use.
    """
    return "forkserver" if sys.platform == "linux" else "spawn"


def beside(
    tasks: Sequence[WorkerTask],
    processes: int,
    watch: Callable[[str, float], None],
    stopped: Callable[[], bool],
    start: str | None = None,
) -> None:
    """Do all tasks, `processes` at a time; as many as fail are left undone.

    watch(name, fraction): called while it is under way. Ends the processes and returns early once `stopped()` is true.
    start: a start method of multiprocessing; None for the platform's.
    """
    context = multiprocessing.get_context(start or choose_start())
    context.set_forkserver_preload([__name__])
    fractions = context.Array("d", len(tasks))
    before = set(multiprocessing.active_children())
    begin = (fractions, str(Path.cwd()), dict(os.environ))
    pool = ProcessPoolExecutor(min(processes, len(tasks)), context, begin_worker, begin)
    finished = False
    try:
        # pieces are closures: cloudpickle sends them, pickle would not
        left: set[Future[None]] = {
            pool.submit(carry_out, place, cloudpickle.dumps(task.work)) for place, task in enumerate(tasks)
        }
        while left and not stopped():
            _, left = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
            for place, task in enumerate(tasks):
                if 0 < fractions[place] < 1:
                    watch(task.name, fractions[place])
        finished = not left
    finally:
        if not finished:
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


PROGRESS: list[Any] = []  # in a worker: the fractions of all tasks


def begin_worker(fractions: Any, folder: str, environment: dict[str, str]) -> None:
    """What a process does first. The server has the folder and the environment of the moment when it was started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    PROGRESS[:] = [fractions]


def carry_out(place: int, work: bytes) -> None:
    """Do one task, in a worker."""

    def tell(value: float) -> None:
        PROGRESS[0][place] = value

    cloudpickle.loads(work)(tell)
    tell(1.0)
