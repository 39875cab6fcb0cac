"""What a race is made of: tasks, contestants with their grids, a budget, and the runs that follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.data import Split

Choice = Mapping[str, float]  # one point of a contestant's grid; "batch" is the number of examples per step, 0 for all


class LabError(ValueError):
    """A request that the laboratory cannot meet; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Contestant:
    """An optimiser with the grid over which it is tuned.

    build(model, criterion, choice) returns a `torch.optim.Optimizer`.
    """

    name: str
    grid: tuple[Choice, ...]
    build: Callable[[nn.Module, nn.Module, Choice], torch.optim.Optimizer]

    @property
    def slug(self) -> str:
        """The name, fit for a file."""
        return slug(self.name)


@dataclass(frozen=True)
class Task:
    """A model, data and a loss for the contestants to minimise.

    model(): a fresh model, drawn from torch's global generator, which the frame seeds. data(): (split, targets), where
    targets are those of split.train_x and split.test_x. The loss reported is scale * criterion, in `unit`.
    divergence(outputs, outputs) is KL(before, after), a mean over examples in nats.
    """

    name: str
    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], Examples]
    criterion: nn.Module
    unit: str
    divergence: Callable[[Tensor, Tensor], Tensor]
    contestants: tuple[Contestant, ...]
    scale: float = 1.0
    error: Callable[[Tensor, Tensor], Tensor] | None = None  # share of mistakes, where the task has a notion of one
    share: float = 1.0  # of the settings' seconds


@dataclass(frozen=True)
class Examples:
    """Inputs (n, ...) and targets (n, ...), for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def to(self, device: str) -> Examples:
        """The same examples on another device."""
        return Examples(*(x.to(device) for x in (self.train_x, self.train_y, self.test_x, self.test_y)))


def labelled(split: Split) -> Examples:
    """Targets are the labels."""
    return Examples(split.train_x, split.train_y, split.test_x, split.test_y)


def reconstructed(split: Split) -> Examples:
    """Targets are the inputs themselves."""
    return Examples(split.train_x, split.train_x, split.test_x, split.test_x)


@dataclass(frozen=True)
class Budget:
    """When a run ends, and how often it is evaluated.

    seconds: of training, evaluation and record keeping excluded. steps: an earlier end, or None. evaluations: at
    equal distances of time; more come at steps 1, 2, 3, 4, 6, 9 ... so that curves over steps have points too.
    looked_at: how many training and test examples an evaluation uses at most.
    """

    seconds: float
    steps: int | None = None
    evaluations: int = 40
    looked_at: int = 10_000

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise LabError(f"seconds is {self.seconds}, expected a positive number of training seconds per run")
        if self.steps is not None and self.steps < 1:
            raise LabError(f"steps is {self.steps}, expected a positive number, or none for no bound")
        if self.evaluations < 1 or self.looked_at < 1:
            raise LabError("evaluations and looked_at are counts, expected at least 1")


@dataclass(frozen=True)
class Job:
    """One run: this contestant with this choice, on this task, from this seed."""

    task: Task
    contestant: Contestant
    index: int  # of the choice in the contestant's grid
    seed: int
    phase: str  # "tune" or "race"

    @property
    def choice(self) -> Choice:
        """The point of the grid that this run tries."""
        return self.contestant.grid[self.index]

    @property
    def name(self) -> str:
        """The stem of the run's file, unique within a race."""
        part = f"tune-{self.index}" if self.phase == "tune" else f"seed-{self.seed}"
        return f"{self.task.name}.{self.contestant.slug}.{part}"


@dataclass(frozen=True)
class Race:
    """An experiment in which contestants minimise the same losses on equal seconds.

    settings: a frozen dataclass with the fields seconds, steps, evaluations, looked_at, tuning_seed, threads, device,
    and what else tasks(settings) reads. seeds: how many, where the command does not say.
    """

    name: str
    summary: str
    settings: type
    tasks: Callable[[Any], tuple[Task, ...]]
    seeds: int = 3

    def budget(self, settings: Any, task: Task) -> Budget:
        """Of every run on that task."""
        return Budget(task.share * settings.seconds, settings.steps, settings.evaluations, settings.looked_at)


def plan(race: Race, tasks: tuple[Task, ...], settings: Any) -> dict[str, Any]:
    """What is going to be compared, as plain values: kept beside the records and compared on resuming."""
    return {
        "experiment": race.name,
        "settings": dict(vars(settings)),
        "tasks": [
            {
                "name": task.name,
                "title": task.title,
                "unit": task.unit,
                "contestants": [
                    {"name": c.name, "grid": [dict(choice) for choice in c.grid]} for c in task.contestants
                ],
            }
            for task in tasks
        ],
    }


def slug(name: str) -> str:
    """A name fit for a file: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
