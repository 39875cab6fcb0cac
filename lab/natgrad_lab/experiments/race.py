"""Runs a race: every contestant over its grid, the best choice of each over several seeds, resumable throughout.

The protocol, the same for all: each choice of the grid is trained once from the tuning seed for the full budget; the
choice with the lowest training loss at the end, or the lowest validation error where the task says so, is then trained
from every seed. Tuning and racing use different seeds. A contestant with one choice has nothing to tune and only races.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from natgrad_lab.experiments.base import Budget, Job, LabError, Race, Task, TaskData, plan
from natgrad_lab.experiments.records import Folder, Record, Row, Writer, restore, versions
from natgrad_lab.experiments.training import Training, count, warm_up

CHECKPOINT_EVERY = 10.0  # seconds between checkpoints of a run under way
OVERTIME = 1.01  # of the budget: a last step may end a little late
FLUSH_EVERY = 500  # rows kept back at most


class Interrupted(Exception):
    """The race was asked to stop; what is finished is kept, and the same command goes on from here."""


class Watcher(Protocol):
    """What is told of the progress of a race."""

    def show_plan(self, runs: Mapping[str, tuple[int, Budget]]) -> None:
        """Before the first run."""
        ...

    def show_start(self, job: Job) -> None:
        """A run begins."""
        ...

    def show_step(self, job: Job, row: Row) -> None:
        """A step was taken."""
        ...

    def show_end(self, job: Job, record: Record, fresh: bool) -> None:
        """A run is over."""
        ...


class Silence(Watcher):
    """A watcher that says nothing."""

    def show_plan(self, runs: Mapping[str, tuple[int, Budget]]) -> None: ...

    def show_start(self, job: Job) -> None: ...

    def show_step(self, job: Job, row: Row) -> None: ...

    def show_end(self, job: Job, record: Record, fresh: bool) -> None: ...


@dataclass
class Runner:
    """Carries out the jobs of one race in one folder."""

    folder: Folder
    race: Race
    settings: Any
    watcher: Watcher
    stopped: Callable[[], bool]
    warm: set[tuple[str, str]] = field(default_factory=set)

    def carry_out(self, job: Job, pool: TaskData) -> Record:
        """The record of a job: read where it is finished, continued where it was put down, run where it is new."""
        fresh = not self.folder.has_finished(job.name)
        if fresh:
            if self.stopped():
                raise Interrupted
            self._warm_up(job, pool)
            self.watcher.show_start(job)
            self._train(job, pool)
        record = self.folder.read(job.name)
        self.watcher.show_end(job, record, fresh)
        return record

    def _warm_up(self, job: Job, pool: TaskData) -> None:
        pair, budget = (job.task.name, job.contestant.name), self.race.budget(self.settings, job.task)
        if budget.is_timed and pair not in self.warm:
            warm_up(job, budget, pool, self.settings.device)
            self.warm.add(pair)

    def _train(self, job: Job, pool: TaskData) -> None:
        training = Training(job, self.race.budget(self.settings, job.task), pool, self.settings.device)
        kept = restore(self.folder, job.name)
        if kept is not None:
            training.load_state_dict(kept["training"])
        writer = Writer(self.folder, job.name, self._header(training), None if kept is None else kept["length"])
        try:
            self._write(training, writer)
        except Interrupted:
            writer.save(training.state_dict())
            raise
        finally:
            writer.close()

    def _write(self, training: Training, writer: Writer) -> None:
        saved, rows = time.monotonic(), []
        for row in training:
            rows.append(row)
            self.watcher.show_step(training.job, row)
            late = time.monotonic() - saved > CHECKPOINT_EVERY
            stop = self.stopped() and not training.is_finished
            if late or stop or len(rows) >= FLUSH_EVERY:
                writer.rows(rows)
                rows = []
            if stop:
                raise Interrupted
            if late:
                writer.save(training.state_dict())
                saved = time.monotonic()
        writer.rows(rows)
        writer.finish(ending(training))

    def _header(self, training: Training) -> Row:
        job = training.job
        return {
            "run": job.name,
            "experiment": self.race.name,
            "task": job.task.name,
            "contestant": job.contestant.name,
            "choice": dict(job.choice),
            "index": job.index,
            "phase": job.phase,
            "seed": job.seed,
            "parameters": count(training.model),
            "examples": len(training.examples.train_x),
            "budget": training.budget.seconds,
            "settings": dict(vars(self.settings)),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "device": self.settings.device,
        }


def execute(
    race: Race,
    settings: Any,
    seeds: Sequence[int],
    path: Path,
    watcher: Watcher | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Folder:
    """Run what is not yet finished in the folder. Interrupted when `stopped()` turns true between two steps."""
    watcher = watcher or Silence()
    if not seeds or len(set(seeds)) < len(seeds) or settings.tuning_seed in seeds:
        raise LabError(f"seeds are {list(seeds)}, expected different numbers, none of them {settings.tuning_seed}")
    check_device(settings.device)
    tasks = race.tasks(settings)
    runs = {task.name: (count_runs(task, len(seeds)), race.budget(settings, task)) for task in tasks}
    folder = Folder(path)
    folder.settle(plan(race, tasks, settings))
    watcher.show_plan(runs)
    runner = Runner(folder, race, settings, watcher, stopped)
    with threads(settings.threads):
        for task in tasks:
            _race(runner, task, seeds)
    return folder


def _race(runner: Runner, task: Task, seeds: Sequence[int]) -> None:
    pool = task.data().to(runner.settings.device)
    tried: dict[str, list[Record]] = {contestant.name: [] for contestant in task.contestants}
    for job in tuning(task, runner.settings.tuning_seed):
        tried[job.contestant.name].append(runner.carry_out(job, pool))
    for seed in seeds:
        for contestant in task.contestants:
            best = choose(tried[contestant.name], task.tuned_on) if tried[contestant.name] else 0
            runner.carry_out(Job(task, contestant, best, seed, "race"), pool)


def tuning(task: Task, seed: int) -> Iterator[Job]:
    """Every choice of every grid, contestants taking turns; none of a contestant with a single choice.

    LabError when the grids of those that are tuned differ in size.
    """
    tuned = [contestant for contestant in task.contestants if contestant.has_choices]
    sizes = {contestant.name: len(contestant.grid) for contestant in tuned}
    if len(set(sizes.values())) > 1:
        raise LabError(
            f"the grids of {task.name} have sizes {sizes}, expected the same number for every contestant that is tuned"
        )
    for index in range(max(sizes.values(), default=0)):
        for contestant in tuned:
            yield Job(task, contestant, index, seed, "tune")


def count_runs(task: Task, seeds: int) -> int:
    """How many runs a task has: the grids, and every contestant from every seed."""
    return sum((len(contestant.grid) if contestant.has_choices else 0) + seeds for contestant in task.contestants)


def choose(tried: Sequence[Record], by: str = "train_loss") -> int:
    """Index of the choice with the lowest number of that name at the end of its run; a run that broke down counts last.

    Equal validation errors are told apart by the validation loss.
    """
    return min(tried, key=lambda record: (final(record, by), final(record, by.replace("error", "loss")))).header[
        "index"
    ]


def final_row(record: Record) -> Row:
    """The last evaluation within the budget: what a long last step won after the time was over does not count."""
    budget = record.header["budget"]  # None where no time ended the run
    in_time = [row for row in record.rows if budget is None or row["seconds"] <= OVERTIME * budget]
    return [row for row in in_time if "train_loss" in row][-1]


def final(record: Record, name: str) -> float:
    """A number at the end of the budget, infinite if the run broke down."""
    value = final_row(record).get(name)
    return math.inf if value is None or record.end["end"] == "not finite" else value


def final_loss(record: Record) -> float:
    """Training loss at the end of the budget, infinite if the run broke down."""
    return final(record, "train_loss")


def ending(training: Training) -> Row:
    """The last line of a record: why it ended, after how much."""
    in_time = training.budget.steps is not None and training.steps >= training.budget.steps
    why = "not finite" if not training.finite else "steps" if in_time else "seconds"
    return {"end": why, "steps": training.steps, "seconds": training.seconds}


def check_device(name: str) -> None:
    """LabError for a device that torch does not know or cannot use here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise LabError(
            f"device is {name!r}, which torch cannot use here: expected cpu, or cuda on a machine with one"
        ) from error


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Let torch use so many threads meanwhile; None leaves its own choice."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that turns true on Ctrl-C or a termination signal; a second Ctrl-C stops at once.

    A step under way is finished first, so that its state can be saved whole.
    """
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
