"""Restricted MNIST at the paper's size and settings: 1500 hidden units, batches of 2500 (MSGD 250), one seed.

`python -m natgrad_lab.papers.pascanu_2013.at_size runs/at_size` takes all contestants to 20 updates, then all to 60,
and so on to 2000, so that whenever it is stopped they compare at equal updates. Ctrl-C stops it after the update under
way, and the same command goes on from there. After every stage it writes `at_size.json` into the folder: the curves,
and which test images each contestant has wrong. `at_size_page` makes the page's table and picture of that file.

Rates and dampings are those of section 8.5, which the paper chose by a grid search. It gives the unlabelled metric
other ones than the two that it is compared with; so each of the three runs with both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from natgrad_lab.data import mnist
from natgrad_lab.experiments.base import Contestant, Job, Task, TaskData, pair_with_labels
from natgrad_lab.experiments.frame import ExperimentState, Interrupted, Piece, Worker, interruptible, plan, threads
from natgrad_lab.experiments.metric_data import draw_another_batch, draw_unlabelled
from natgrad_lab.experiments.models import categorical_divergence, glorot, mistakes
from natgrad_lab.experiments.race import Course, race
from natgrad_lab.experiments.records import Folder, Numbers, dump, read, versions
from natgrad_lab.experiments.records import replace as write_whole
from natgrad_lab.experiments.training import Training
from natgrad_lab.papers.pascanu_2013.shared import (
    DIFFERENT,
    MSGD,
    SAME,
    UNLABELLED,
    divide,
    kullback,
    list_adapted_choices,
    list_constant_choices,
    msgd,
)
from natgrad_lab.papers.pascanu_2013.sparse_pixels import SparsePixels, sort_pixels

STAGES = (20, 60, 100, 140, 200, 260, 320, 400, 500, 700, 1000, 1400, 2000)
"""Updates to which all contestants go before one goes further; MSGD takes 20 times as many."""
MSGD_STEPS = 20
"""Of MSGD for one update of the others, as in the paper's budget."""
RATES = {MSGD: 1.0, f"{MSGD}, rate .3": 0.3, f"{MSGD}, rate .1": 0.1}
"""The paper's, at which the loss rises to hundreds of nats in the first steps, and two lower ones."""
WEAK_UNLABELLED = f"{UNLABELLED}, rate .1"
ADAPTED_DIFFERENT = f"{DIFFERENT}, rate 5"
ADAPTED_SAME = f"{SAME}, rate 5"
CURVE = ("train_loss", "train_error", "valid_error", "test_loss", "test_error")


@dataclass(frozen=True)
class AtSizeSettings:
    """Everything as in section 8.5, but for what it does not give."""

    hidden: int = 1500  # tanh units; the paper does not name the non-linearity
    labelled: int = 10_000  # not given in the paper
    validation: int = 5000  # not given in the paper; nothing is chosen by it here
    batch: int = 2500  # of gradient and metric; MSGD takes a tenth
    steps: int = 2020  # updates; beyond the last stage, so that the last state is kept as well
    products: int = 20  # with the metric per update, at most
    floor: float = 0.01  # of the damping under Levenberg-Marquardt; not given in the paper
    dense: int = 300  # pixels that are multiplied as dense ones; changes nothing but the time
    evaluations: int = 101  # at equal distances of updates: every 20
    looked_at: int = 10_000
    tuning_seed: int = 100
    threads: int | None = 1
    device: str = "cpu"


def contestants(settings: AtSizeSettings) -> tuple[Contestant, ...]:
    """The paper's four with its rates and dampings, MSGD with lower ones, each metric with the other settings."""
    batch = settings.batch
    weak, adapted = list_constant_choices(batch, (0.1, 0.01)), list_adapted_choices(batch, (5.0, 2.0))
    given = {"products": settings.products, "floor": settings.floor}
    slow = max(1, batch // 10), MSGD_STEPS * settings.steps
    return (
        *(replace(msgd(slow[0], (rate,), slow[1]), name=name) for name, rate in RATES.items()),
        kullback(UNLABELLED, adapted, observes=draw_unlabelled(batch), **given),
        kullback(DIFFERENT, weak, observes=draw_another_batch(batch), **given),
        kullback(SAME, weak, **given),
        kullback(WEAK_UNLABELLED, weak, observes=draw_unlabelled(batch), **given),
        kullback(ADAPTED_DIFFERENT, adapted, observes=draw_another_batch(batch), **given),
        kullback(ADAPTED_SAME, adapted, **given),
    )


def tasks(settings: AtSizeSettings) -> tuple[Task, ...]:
    """One task."""
    return (
        Task(
            name="restricted-mnist-at-size",
            title=f"MNIST with {settings.labelled:,} labels, 784-{settings.hidden}-10, tanh",
            model=lambda: nn.Sequential(
                SparsePixels(784, settings.hidden, settings.dense), nn.Tanh(), glorot(nn.Linear(settings.hidden, 10))
            ),
            data=sorted_digits,
            draw=lambda pool, seed: divide(pool, seed, settings.validation, settings.labelled),
            criterion=nn.CrossEntropyLoss(),
            unit="nats per image",
            divergence=categorical_divergence,
            error=mistakes,
            contestants=contestants(settings),
            tuned_on="valid_error",
        ),
    )


def sorted_digits() -> TaskData:
    """MNIST as rows, the pixels in the order that `SparsePixels` wants."""
    split = mnist().flat()
    order = sort_pixels(split.train_x)
    return pair_with_labels(replace(split, train_x=split.train_x[:, order], test_x=split.test_x[:, order]))


RACE = race(
    "pascanu_2013_restricted_mnist_at_size",
    "Pascanu & Bengio 2013, Table 1: restricted MNIST at the paper's size and settings",
    AtSizeSettings,
    tasks,
    seeds=1,
)
SEED = 0


class StagedRuns:
    """The runs of one seed, a stage at a time; `stopped` is whether to stop."""

    def __init__(self, folder: Folder, settings: AtSizeSettings, stopped: Callable[[], bool]) -> None:
        self.folder, self.settings, self.stopped = folder, settings, stopped
        (task,) = tasks(settings)
        self.course = Course(task, settings)
        self.runs = {one.name: (one, self.course.racing(one)) for one in task.contestants}
        folder.settle(plan(RACE, [piece for _, piece in self.runs.values()], settings))

    def carry_out(self, stages: tuple[int, ...] = STAGES) -> None:
        """All runs to each stage in turn. Interrupted when asked to stop."""
        for stage in stages:
            for name, (_, piece) in self.runs.items():
                self.advance(name, piece, stage)
            write_whole(self.folder.path / "at_size.json", dump(self.summarise(stage)) + "\n")

    def advance(self, name: str, piece: Piece, stage: int) -> None:
        """One run to a stage, from where it is; its checkpoint is then the state of that stage."""
        rows, _ = self.load(piece)
        if rows and rows[-1]["step"] >= stage * scale(name):
            return
        watch = partial(end_at_part, stage / self.settings.steps)
        pieces = tuple(piece for _, piece in self.runs.values())
        worker = Worker(RACE, self.settings, self.folder, pieces, SEED, watch, self.stopped, len(pieces))
        try:
            worker.carry_out(piece, SEED)
        except Interrupted:
            if self.stopped():
                raise

    def load(self, piece: Piece) -> tuple[list[Numbers], dict[str, Any] | None]:
        """The rows of a run so far, and the state of its training; None where it is finished or not begun."""
        record = self.folder.records / piece.file(SEED)
        if record.exists():
            return read(record).numbers["rows"], None
        checkpoint = record.with_suffix(".checkpoint")
        if not checkpoint.exists():
            return [], None
        state = torch.load(checkpoint, weights_only=True)
        return state["rows"], state["training"]

    def summarise(self, stage: int) -> Numbers:
        """Curves of all contestants up to a stage, and the test images that each has wrong there."""
        curves = {name: self._summarise(*run, stage) for name, run in self.runs.items()}
        return {"settings": vars(self.settings), "seed": SEED, "stage": stage, "contestants": curves} | versions()

    def _summarise(self, contestant: Contestant, piece: Piece, stage: int) -> Numbers:
        each, (rows, state) = scale(contestant.name), self.load(piece)
        seen = [row for row in rows if "test_error" in row and row["step"] <= stage * each]
        products = [row["solver_steps"] for row in rows if "solver_steps" in row]
        is_beyond = rows[-1]["step"] > stage * each
        return {
            "choice": dict(contestant.grid[0]),
            "seconds": round(seen[-1]["seconds"], 1),
            "products": round(sum(products) / len(products), 1) if products else None,
            "curve": [[row["step"] / each, *map(shorten, map(row.get, CURVE))] for row in seen],
            "wrong": None if state is None or is_beyond else self.list_mistakes(contestant, state),
        }

    def list_mistakes(self, contestant: Contestant, state: dict[str, Any]) -> list[int]:
        """Places of the test images that a run has wrong in that state."""
        job = Job(self.course.task, contestant, 0, SEED, "race")
        training = Training(job, self.course.budget, self.course.pool(), self.settings.device)
        training.load_state_dict(state)
        outputs = training._outputs(training.examples.test_x)
        return (outputs.argmax(1) != training.examples.test_y).nonzero()[:, 0].tolist()


def end_at_part(part: float, state: ExperimentState) -> None:
    """Put a run down once that part of its updates is done, and say how it is doing."""
    if state.fraction >= part:
        sys.stdout.write(f"{state.piece.title}: {state.note}\n")
        sys.stdout.flush()
        raise Interrupted


def shorten(number: float | None) -> float | None:
    """Six places of a number; None of one that was not finite."""
    return None if number is None else round(number, 6)


def scale(name: str) -> int:
    """Steps of a contestant for one update of the others."""
    return MSGD_STEPS if name in RATES else 1


def main(folder: Path, settings: AtSizeSettings | None = None, stages: tuple[int, ...] = STAGES) -> None:
    """Run, or go on with what was stopped.

    Args:
        folder: Of the records.
        settings: None for the paper's.
        stages: Updates, in rising order.
    """
    settings = settings or AtSizeSettings()
    with interruptible() as stopped, threads(settings.threads):
        try:
            StagedRuns(Folder(folder), settings, stopped).carry_out(stages)
        except Interrupted:
            sys.stdout.write("stopped; the same command goes on from here\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
