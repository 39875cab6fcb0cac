"""What a race is made of: tasks, contestants with their grids, a budget, and the runs that follow from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from natgrad_lab.data import Split

Choice = Mapping[str, float]  # one point of a contestant's grid; "batch" is the number of examples per step, 0 for all
Rows = Tensor | slice  # which examples: indices, or all of them


class LabError(ValueError):
    """A request that the laboratory cannot meet; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Contestant:
    """An optimiser with the grid over which it is tuned.

    Args:
        name: As reports write it.
        grid: The choices among which the tuning looks.
        build: Model, criterion and choice -> a `torch.optim.Optimizer`.
        steps: The end of its runs, where they are longer or shorter than the settings say.
        schedule: The number of an update, counted from 1 -> the factor on the learning rate.
        falls: The share of the budget that is spent, in steps or in seconds -> a factor that ends as the run does.
        observes: Examples, the gradient's rows, seed and step -> inputs on which natgrad takes the metric of a step,
            drawn from seed and step alone (see `natgrad_lab.experiments.metric_data`). None: the gradient's own batch.
    """

    name: str
    grid: tuple[Choice, ...]
    build: Callable[[nn.Module, nn.Module, Choice], torch.optim.Optimizer]
    steps: int | None = None
    schedule: Callable[[int], float] | None = None
    falls: Callable[[float], float] | None = None
    observes: Callable[[Split, Rows, int, int], Tensor] | None = None

    @property
    def has_choices(self) -> bool:
        """Whether there is anything to choose: one choice races as it is."""
        return len(self.grid) > 1


@dataclass(frozen=True)
class Task:
    """A model, data and a loss for the contestants to minimise.

    Args:
        name: In file names.
        title: As reports write it.
        model: Gives a fresh model, drawn from torch's global generator, which the frame seeds.
        data: Gives the examples.
        criterion: The loss, as a module of torch's.
        unit: Of the reported loss, which is scale * criterion.
        divergence: Outputs before and after -> their KL, a mean over examples in nats.
        contestants: Who races.
        scale: On the criterion.
        error: Outputs and targets -> the share of mistakes, where the task has a notion of one.
        share: Of the settings' seconds.
        draw: Examples and seed -> those of that seed, such as a labelled subset. None: all of them for every seed.
        tuned_on: What the choice of a contestant is made by, lowest at the end: "train_loss", or "valid_loss",
            "valid_error" where the examples have a validation part; then the report compares test errors, seed by seed.
        paper: Contestant -> (training loss, test error as a share) as published, None where nothing was.
        also: Name -> a function of outputs and targets, kept in the records with the losses.
        note: For the report: where the task departs from the paper.
        heard: The model's outputs -> the part that criterion, divergence and error are of. None: all.
        besides: Outputs -> a part of the loss, in `unit`, that does not go through the criterion, so that no metric
            knows of it.
        recalibrated_on: Before an evaluation the running statistics of batch norm are taken anew on so many of the
            first training examples, for every contestant alike; 0 leaves those that training left.
    """

    name: str
    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], Split]
    criterion: nn.Module
    unit: str
    divergence: Callable[[Tensor, Tensor], Tensor]
    contestants: tuple[Contestant, ...]
    scale: float = 1.0
    error: Callable[[Tensor, Tensor], Tensor] | None = None
    share: float = 1.0
    draw: Callable[[Split, int], Split] | None = None
    tuned_on: str = "train_loss"
    paper: Mapping[str, tuple[float | None, float | None]] | None = None
    also: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None
    note: str = ""
    heard: Callable[[Tensor], Tensor] | None = None
    besides: Callable[[Tensor], Tensor] | None = None
    recalibrated_on: int = 0

    def __post_init__(self) -> None:
        if self.tuned_on not in ("train_loss", "valid_loss", "valid_error"):
            raise LabError(f"tuned_on is {self.tuned_on!r}, expected train_loss, valid_loss or valid_error")

    def hear(self, outputs: Tensor) -> Tensor:
        """The outputs that the criterion is of.

        Args:
            outputs: The model's.
        """
        return outputs if self.heard is None else self.heard(outputs)

    def examples(self, pool: Split, seed: int) -> Split:
        """What a run trains on.

        Args:
            pool: All examples.
            seed: Of the run.
        """
        return pool if self.draw is None else self.draw(pool, seed)


def add_channel(split: Split) -> Split:
    """Grey images as (n, 1, h, w)."""
    return replace(split, train_x=split.train_x[:, None], test_x=split.test_x[:, None])


def standardise_pictures(split: Split, many: int | None = None, side: int = 32) -> Split:
    """The first pictures (n, 3, h, h), shrunk, every colour with mean 0 and variance 1 over the training pictures."""
    parts = [avg_pool2d(part, part.shape[-1] // side) for part in (split.train_x[:many], split.test_x)]
    mean, deviation = parts[0].mean((0, 2, 3), keepdim=True), parts[0].std((0, 2, 3), keepdim=True)
    train, test = ((part - mean) / deviation for part in parts)
    return Split(train, split.train_y[:many], test, split.test_y)


def pair_with_inputs(split: Split) -> Split:
    """Examples whose targets are the inputs themselves."""
    return Split(split.train_x, split.train_x, split.test_x, split.test_x)


@dataclass(frozen=True)
class Budget:
    """When a run ends, and how often it is evaluated."""

    # of training, evaluation and record keeping excluded; infinite where steps alone end a run
    seconds: float = math.inf
    steps: int | None = None  # an earlier end, or None
    # their number, at equal distances of time; more come at steps 1, 2, 3, 4, 6, 9 ... so that curves over steps have
    # points too. Where no time ends the run: at equal distances of steps, and at 1, 2, 4, 8 ...
    evaluations: int = 40
    looked_at: int = 10_000  # how many examples of each part an evaluation uses at most

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise LabError(f"seconds is {self.seconds}, expected a positive number of training seconds per run")
        if self.steps is not None and self.steps < 1:
            raise LabError(f"steps is {self.steps}, expected a positive number, or none for no bound")
        if not self.is_timed and self.steps is None:
            raise LabError("steps is none and nothing bounds the seconds: expected a number of one of them")
        if self.evaluations < 1 or self.looked_at < 1:
            raise LabError("evaluations and looked_at are counts, expected at least 1")

    @property
    def is_timed(self) -> bool:
        """Whether seconds end a run."""
        return self.seconds < math.inf

    @property
    def growth(self) -> float:
        """Of the number of steps, from one of the early evaluations to the next."""
        return 1.4 if self.is_timed else 2.0

    def spent_part(self, steps: int, seconds: float) -> float:
        """The share of the run that is over, by what ends it first."""
        return max(seconds / self.seconds, 0.0 if self.steps is None else steps / self.steps)

    def marks(self, steps: int, seconds: float) -> int:
        """How many of the evenly spaced evaluations are due by then."""
        if self.is_timed:
            return int(seconds // (self.seconds / self.evaluations))
        assert self.steps is not None
        return steps * self.evaluations // self.steps


@dataclass(frozen=True)
class Job:
    """One run of a contestant on a task."""

    task: Task
    contestant: Contestant
    index: int  # of the choice in the contestant's grid
    seed: int  # of the start and the order of the examples
    phase: str  # "tune" or "race"

    @property
    def choice(self) -> Choice:
        """The point of the grid that this run tries."""
        return self.contestant.grid[self.index]

    def within(self, budget: Budget) -> Budget:
        """The task's budget with the contestant's own number of steps, if it has one."""
        return budget if self.contestant.steps is None else replace(budget, steps=self.contestant.steps)


def slug(name: str) -> str:
    """A name fit for a file: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
