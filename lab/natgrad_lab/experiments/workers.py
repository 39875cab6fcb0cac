"""Pieces of a study done beside one another, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class WorkerTask:
    """work(tell) does the piece and writes its record; tell(fraction) says how far it is."""

    name: str
    work: Callable[[Callable[[float], None]], None]


def beside(
    tasks: Sequence[WorkerTask], processes: int, watch: Callable[[str, float], None], stopped: Callable[[], bool]
) -> None:
    """Do all tasks, `processes` at a time, by forking; as many as fail are left undone.

    watch(name, fraction): called while it is under way. Ends the processes and returns early once `stopped()` is true.
    Does nothing where a process cannot fork: the caller then finds the tasks undone.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    context = multiprocessing.get_context("fork")
    waiting, running = list(tasks), []
    try:
        while (waiting or running) and not stopped():
            while waiting and len(running) < processes:
                running.append(_Running(context, waiting.pop(0)))
            time.sleep(POLL)
            for one in running:
                watch(one.task.name, one.fraction.value)
            running = [one for one in running if one.process.is_alive()]
    finally:
        for one in running:
            one.process.terminate()
            one.process.join()


class _Running:
    def __init__(self, context: Any, task: WorkerTask) -> None:
        self.task, self.fraction = task, context.Value("d", 0.0)
        self.process = context.Process(target=_carry_out, args=(task, self.fraction), daemon=True)
        self.process.start()


def _carry_out(task: WorkerTask, fraction: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def tell(value: float) -> None:
        fraction.value = value

    task.work(tell)
