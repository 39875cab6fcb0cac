"""A race as an experiment: every contestant over its grid, the best choice of each over several seeds.

The protocol, the same for all: each choice of the grid is trained once from the tuning seed for the full budget; the
choice with the lowest training loss at the end, or the lowest validation error where the task says so, is then trained
from every seed. Tuning and racing use different seeds. A contestant with one choice has nothing to tune and only races.
A run that is stopped half way goes on from its checkpoint, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from natgrad_lab.data import Split
from natgrad_lab.experiments.base import Budget, Contestant, Job, LabError, Task, slug
from natgrad_lab.experiments.frame import Experiment, Findings, Interrupted, Piece, PieceRun
from natgrad_lab.experiments.race_story import tell_race, write_choice
from natgrad_lab.experiments.race_summary import choose, read_runs
from natgrad_lab.experiments.records import FinishedPiece, Numbers
from natgrad_lab.experiments.training import Training, warm_up

CHECKPOINT_EVERY = 10.0  # seconds between checkpoints of a run under way


def race(
    name: str, summary: str, settings: type, tasks: Callable[[Any], tuple[Task, ...]], title: str = "", **others: Any
) -> Experiment:
    """An experiment in which contestants minimise the same losses on equal seconds, or on a number of steps each.

    Args:
        name: As the command line takes it.
        summary: One sentence for the list of experiments.
        settings: A frozen dataclass such as `RaceSettings`; without `seconds`, steps alone end the runs.
        tasks: The settings -> what is raced on.
        title: Of the page.
        **others: Of `Experiment`.
    """

    def pieces(chosen: Any) -> tuple[Piece, ...]:
        return tuple(piece for task in tasks(chosen) for piece in Course(task, chosen).pieces())

    def tell(findings: Findings) -> Any:
        return tell_race(name, title, tasks(findings.settings), findings.settings.steps, findings.finished)

    return Experiment(name, summary, settings, pieces, tell, tasks=tasks, **others)


@dataclass(frozen=True)
class RaceSettings:
    """What every race on equal seconds can be told."""

    seconds: float = 20.0  # of training per run
    steps: int | None = None  # an earlier end of every run
    evaluations: int = 8  # at equal distances of time
    looked_at: int = 10_000  # examples of each part per evaluation, at most
    tuning_seed: int = 100  # of the runs over the grids; the race has seeds 0, 1, 2 ...
    threads: int | None = 1  # of torch; none: as many as it takes
    device: str = "cpu"  # or a name such as cuda


def find_budget(task: Task, settings: Any) -> Budget:
    """The budget of every run on a task, unless its contestant has a number of steps of its own."""
    seconds = task.share * getattr(settings, "seconds", math.inf)
    return Budget(seconds, settings.steps, settings.evaluations, settings.looked_at)


@dataclass(eq=False)
class Course:
    """The runs of one task as pieces; they share the examples, which are read when the first run needs them."""

    task: Task
    settings: Any
    warm: set[str] = field(default_factory=set)  # contestants whose first slow calls are over

    def __post_init__(self) -> None:
        self.budget = find_budget(self.task, self.settings)
        self.pool: Callable[[], Split] = cache(lambda: self.task.data().to(self.settings.device))

    def pieces(self) -> list[Piece]:
        """Every choice of every grid, contestants taking turns, then everybody's best from every seed."""
        tuned = [contestant for contestant in self.task.contestants if contestant.has_choices]
        sizes = {contestant.name: len(contestant.grid) for contestant in tuned}
        if len(set(sizes.values())) > 1:
            raise LabError(
                f"the grids of {self.task.name} have sizes {sizes}, expected the same number for every contestant "
                "that is tuned"
            )
        places = range(max(sizes.values(), default=0))
        return [self.tuning(c, place) for place in places for c in tuned] + [*map(self.racing, self.task.contestants)]

    def tuning(self, contestant: Contestant, index: int) -> Piece:
        """One choice of a contestant, from the tuning seed."""
        job = Job(self.task, contestant, index, self.settings.tuning_seed, "tune")
        title = f"{contestant.name} ({write_choice(job.choice)}), tuning {index + 1}/{len(contestant.grid)}"
        work = partial(self.work, job)
        return Piece(self.name(contestant, index), f"{self.task.name}, {title}", work, repeated=False)

    def racing(self, contestant: Contestant, index: int | None = None) -> Piece:
        """A choice of a contestant, by default the best of those that were tried, from every seed."""

        def work(run: PieceRun) -> Numbers:
            best = index if index is not None else self.best(contestant, run.earlier) if contestant.has_choices else 0
            return self.work(Job(self.task, contestant, best, run.seed, "race"), run)

        return Piece(self.name(contestant), f"{self.task.name}, {contestant.name}", work)

    def name(self, contestant: Contestant, index: int | None = None) -> str:
        """Of a piece."""
        return f"{self.task.name}-{slug(contestant.name)}" + ("" if index is None else f"-tune-{index}")

    def best(self, contestant: Contestant, earlier: Mapping[str, Numbers]) -> int:
        """Index of the choice that races."""
        names = [self.name(contestant, index) for index in range(len(contestant.grid))]
        return choose(read_runs([FinishedPiece({}, earlier[name]) for name in names]), self.task.tuned_on)

    def work(self, job: Job, run: PieceRun) -> Numbers:
        """The rows of a run, from its checkpoint on where it was stopped."""
        pool, device = self.pool(), self.settings.device
        if self.budget.is_timed and job.contestant.name not in self.warm:
            warm_up(job, self.budget, pool, device)
            self.warm.add(job.contestant.name)
        training, rows = Training(job, self.budget, pool, device), list[Numbers]()
        if run.checkpoint is not None and run.checkpoint.exists():
            state = torch.load(run.checkpoint, weights_only=True)
            training.load_state_dict(state["training"])
            rows = state["rows"]
        loss, saved = next((row["train_loss"] for row in reversed(rows) if "train_loss" in row), None), time.monotonic()
        for row in training:
            rows.append(row)
            loss = row.get("train_loss", loss)
            part = training.budget.spent_part(training.steps, training.seconds)
            try:
                now = "-" if loss is None else f"{loss:.4g}"
                run.advance(part, f"training loss {now} after {training.steps} steps")
            except Interrupted:
                if not training.is_finished:
                    save(run, training, rows)
                    raise
            if time.monotonic() - saved > CHECKPOINT_EVERY:
                save(run, training, rows)
                saved = time.monotonic()
        in_time = training.budget.steps is not None and training.steps >= training.budget.steps
        why = "not finite" if not training.finite else "steps" if in_time else "seconds"
        end = {"end": why, "steps": training.steps, "seconds": training.seconds}
        return {"run": describe_run(job, training), "rows": rows, "end": end}


def save(run: PieceRun, training: Training, rows: list[Numbers]) -> None:
    """The state of a run, with the rows so far."""
    if run.checkpoint is not None:
        scratch = run.checkpoint.with_suffix(".checkpoint-new")
        torch.save({"training": training.state_dict(), "rows": rows}, scratch)
        scratch.replace(run.checkpoint)


def describe_run(job: Job, training: Training) -> Numbers:
    """What was run."""
    return {
        "task": job.task.name,
        "contestant": job.contestant.name,
        "choice": dict(job.choice),
        "index": job.index,
        "phase": job.phase,
        "seed": job.seed,
        "parameters": sum(p.numel() for p in training.model.parameters() if p.requires_grad),
        "examples": len(training.examples.train_x),
        "budget": training.budget.seconds,
    }
