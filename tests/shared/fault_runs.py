"""Runs of several gloo processes that meet an accident, at a moment drawn from a seed, and are launched again.

The long version: `python tests/shared/fault_runs.py --times 100 --patience 10`.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from natgrad.ground import whole_tensors as lost_processes

STEPS, EVERY, ROWS = 8, 3, 6
PATIENCE = 60.0  # seconds that a process waits for another; after six times as many a run counts as hanging
STOPS = ("kill", "stop", "disk")
POISONS = {"nan": math.nan, "infinite": math.inf, "empty": 0.0}
KINDS = (*STOPS, "delay", *POISONS)
RECIPES = {
    "kfac": lambda model: ng.kfac(model, nn.CrossEntropyLoss(), update_every=2, invert_every=2),
    "hessian_free": lambda model: ng.hessian_free(model, nn.CrossEntropyLoss()),
}


@dataclass(frozen=True)
class Accident:
    """What happens.

    Args:
        kind: One of `KINDS`, or "none".
        size: Processes.
        rank: Where.
        step: When.
        moment: Seconds into the step, or that a process is stopped for.
        recipe: The optimizer.
        patience: Seconds that a process waits for another.
    """

    kind: str
    size: int
    rank: int
    step: int
    moment: float
    recipe: str
    patience: float = PATIENCE

    @staticmethod
    def draw(seed: int, patience: float = PATIENCE) -> Accident:
        """The accident of a seed."""
        source = random.Random(seed)
        kind, size, recipe = KINDS[seed % len(KINDS)], source.choice((2, 4)), source.choice(sorted(RECIPES))
        moment = source.choice((0.5, 1.5 * patience)) if kind == "stop" else 0.05 * source.random()
        rank = 0 if kind == "disk" else source.randrange(size)
        return Accident(kind, size, rank, source.randrange(1, STEPS - 2), moment, recipe, patience)

    def without_stop(self) -> Accident:
        """The same data, and nobody is stopped."""
        return self if self.kind in POISONS else replace(self, kind="none")


class Steps:
    """How many steps were taken, as a part of the checkpoint."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def batch(step: int, rank: int, accident: Accident) -> tuple[Tensor, Tensor]:
    """A process's examples of a step."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(ROWS, 5, generator=source), torch.randint(0, 3, (ROWS,), generator=source)
    if accident.kind not in POISONS or (step, rank) != (accident.step, accident.rank):
        return x, y
    if accident.kind == "empty":
        return x[:0], y[:0]
    x[0] = POISONS[accident.kind]
    return x, y


def strike(accident: Accident) -> None:
    """What happens to this process now."""
    if accident.kind == "kill":
        threading.Timer(accident.moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if accident.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if accident.kind == "delay":
        time.sleep(20 * accident.moment)
    if accident.kind == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))


def work(rank: int, folder: str, launch: int, accident: Accident) -> None:
    """One process of a run: from the last checkpoint to the end."""
    torch.set_num_threads(1)
    lost_processes.PAUSE, lost_processes.PATIENCE = 0.1, 2.0
    store = f"file://{folder}/store{launch}"
    distributed.init_process_group(
        "gloo", store, timedelta(seconds=accident.patience), world_size=accident.size, rank=rank
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    # else it sorts its buckets anew after the first backward of a launch, and sums of four numbers round differently
    outer = DistributedDataParallel(model, find_unused_parameters=True)
    opt, steps, file = RECIPES[accident.recipe](outer), Steps(), Path(folder) / "run.pt"
    if file.exists():
        ng.load_checkpoint(file, model=model, optimizer=opt, steps=steps)
    for step in range(steps.count, STEPS):
        if launch == 0 and (step, rank) == (accident.step, accident.rank):
            strike(accident)
        x, y = batch(step, rank, accident)
        opt.zero_grad()
        opt.loss(outer(x), y).backward()
        opt.step()
        steps.count = step + 1
        if rank == 0 and steps.count % EVERY == 0:
            ng.save_checkpoint(file, model=model, optimizer=opt, steps=steps)
    distributed.barrier()
    end = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.save(end, f"{folder}/end{rank}.pt")
    # not by a return: torch 2.13 may then wait for ever, seen under load. The reducer's end joins, with the GIL held, a
    # thread of the group's that lets go of its last sum, and wants the GIL for that
    os._exit(0)


def quiet_work(rank: int, folder: str, launch: int, accident: Accident) -> None:
    """`work`, with its messages in a file; an error ends the process at once."""
    log = os.open(f"{folder}/log{launch}.{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(5 * accident.patience)  # where it hangs
    try:
        work(rank, folder, launch, accident)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this process
        os.write(log, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


def launch_ranks(folder: str, launch: int, accident: Accident) -> list[int | None]:
    """Start all processes, wake one that was stopped, and wait: their exit codes, None for one that hangs."""
    context: Any = multiprocessing.get_context("fork")
    ranks = [context.Process(target=quiet_work, args=(i, folder, launch, accident)) for i in range(accident.size)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 6 * accident.patience
    stopped = None
    while time.monotonic() < end and any(process.is_alive() for process in ranks):
        pid = ranks[accident.rank].pid
        if accident.kind == "stop" and launch == 0 and is_stopped(pid):
            stopped = time.monotonic() if stopped is None else stopped
            if time.monotonic() - stopped > accident.moment:
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    return codes


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def ends(folder: str, size: int) -> list[Tensor]:
    """The parameters that the processes ended with."""
    return [torch.load(f"{folder}/end{rank}.pt") for rank in range(size)]


def meet_accident(accident: Accident) -> str:
    """What came of it: "went on", or "ended and resumed"; anything else is a failure, in words."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as clean:
        if any(launch_ranks(clean, 0, accident.without_stop())):
            return f"the run without an accident failed: {read_logs(clean)}"
        expected, word = ends(clean, accident.size)[0], "went on"
        codes = launch_ranks(folder, 0, accident)
        if None in codes:
            return f"hangs: {codes} {read_logs(folder)}"
        if any(codes):
            if not all(codes):
                return f"some went on: {codes} {read_logs(folder)}"
            word, codes = "ended and resumed", launch_ranks(folder, 1, accident)
            if any(code != 0 for code in codes):
                return f"could not be launched again: {codes} {read_logs(folder)}"
        if not all(torch.equal(end, expected) for end in ends(folder, accident.size)):
            return "other parameters than without the accident"
        return word if bool(expected.isfinite().all()) else "parameters are not finite"


def read_logs(folder: str) -> str:
    """The end of every process's messages."""
    return " | ".join(file.read_text()[-1500:] for file in sorted(Path(folder).glob("log*")))


def main() -> int:
    """Meet the accidents of some seeds. The number of failures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=len(KINDS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--patience", type=float, default=PATIENCE)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    choices = parser.parse_args()
    found: Counter[str] = Counter()
    for seed in range(choices.first, choices.first + choices.times):
        accident = Accident.draw(seed, choices.patience)
        if accident.kind in choices.kinds:
            word = meet_accident(accident)
            found[word if word in ("went on", "ended and resumed") else "failed"] += 1
            print(seed, accident, word, flush=True)
    print(", ".join(f"{word}: {count}" for word, count in found.items()))
    return found["failed"]


if __name__ == "__main__":
    sys.exit(main())
