"""Restricted MNIST at the paper's size and settings: 1500 hidden units, batches of 2500 (MSGD 250), one seed.

`python -m natgrad_lab.papers.pascanu_2013.at_size runs/at_size` takes all contestants to 20 updates, then all to 60,
and so on to 2000, so that whenever it is stopped they compare at equal updates. Ctrl-C stops it after the update under
way, and the same command goes on from there. After every stage it writes `at_size.json` into the folder: the curves,
and which test images each contestant has wrong. `at_size_page` makes the page's table and picture of that file.

Rates and dampings are those of section 8.5, which the paper chose by a grid search. It gives the unlabelled metric
other ones than the two that it is compared with; so each of the three runs with both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from natgrad_lab.data import mnist
from natgrad_lab.experiments.base import Contestant, Job, Race, Task, TaskData, pair_with_labels, plan
from natgrad_lab.experiments.metric_data import draw_another_batch, draw_unlabelled
from natgrad_lab.experiments.models import categorical_divergence, glorot, mistakes
from natgrad_lab.experiments.race import Interrupted, Runner, Silence, interruptible, threads
from natgrad_lab.experiments.records import Folder, Row, dump, restore, versions
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


RACE = Race(
    "pascanu_2013_restricted_mnist_at_size",
    "Pascanu & Bengio 2013, Table 1: restricted MNIST at the paper's size and settings",
    AtSizeSettings,
    tasks,
    seeds=1,
)


@dataclass
class StageWatcher(Silence):
    """Stops a run at a number of steps, and says how it is doing at every evaluation."""

    asked: Callable[[], bool]
    limit: int = 0
    step: int = 0

    def show_step(self, job: Job, row: Row) -> None:
        self.step = row["step"]
        if "test_error" in row:
            numbers = f"training loss {row['train_loss']:.5f}, test error {row['test_error']:.2%}"
            sys.stdout.write(f"{job.contestant.name}: step {self.step}, {row['seconds']:.0f} s, {numbers}\n")
            sys.stdout.flush()

    def stops(self) -> bool:
        """Whether the run under way is to be put down."""
        return self.step >= self.limit or self.asked()


@dataclass
class StagedRuns:
    """The runs of one seed, a stage at a time."""

    folder: Folder
    settings: AtSizeSettings
    asked: Callable[[], bool]
    seed: int = 0
    task: Task = field(init=False)
    pool: TaskData = field(init=False)

    def __post_init__(self) -> None:
        (self.task,) = tasks(self.settings)
        self.pool = self.task.data()
        self.folder.settle(plan(RACE, (self.task,), self.settings))

    def jobs(self) -> dict[str, Job]:
        """Contestant -> its run."""
        return {one.name: Job(self.task, one, 0, self.seed, "race") for one in self.task.contestants}

    def carry_out(self, stages: tuple[int, ...] = STAGES) -> None:
        """All runs to each stage in turn. Interrupted when asked to stop."""
        for stage in stages:
            for job in self.jobs().values():
                self.advance(job, stage * scale(job.contestant.name))
            write_whole(self.folder.path / "at_size.json", dump(self.summarise(stage)) + "\n")

    def advance(self, job: Job, limit: int) -> None:
        """One run to so many steps, from where it is."""
        if self.folder.has_finished(job.name) or self.count_steps(job) >= limit:
            return
        watcher = StageWatcher(self.asked, limit)
        runner = Runner(self.folder, RACE, self.settings, watcher, watcher.stops)
        try:
            runner.carry_out(job, self.pool)
        except Interrupted:
            if self.asked():
                raise

    def count_steps(self, job: Job) -> int:
        """How far a run is."""
        state = restore(self.folder, job.name)
        return 0 if state is None else state["training"]["counters"][0]

    def summarise(self, stage: int) -> Row:
        """Curves of all contestants up to a stage, and the test images that each has wrong there."""
        rows = {name: self._summarise(job, stage) for name, job in self.jobs().items()}
        return {"settings": vars(self.settings), "seed": self.seed, "stage": stage, "contestants": rows} | versions()

    def _summarise(self, job: Job, stage: int) -> Row:
        finished, part, _ = self.folder.paths(job.name)
        path, each = finished if finished.exists() else part, scale(job.contestant.name)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        seen = [row for row in rows if "test_error" in row and row["step"] <= stage * each]
        curve = [[row["step"] / each, *map(shorten, map(row.get, CURVE))] for row in seen]
        products = [row["solver_steps"] for row in rows if "solver_steps" in row]
        return {
            "choice": dict(job.choice),
            "seconds": round(seen[-1]["seconds"], 1),
            "products": round(sum(products) / len(products), 1) if products else None,
            "curve": curve,
            "wrong": self.list_mistakes(job, stage * each),
        }

    def list_mistakes(self, job: Job, step: int) -> list[int] | None:
        """Places of the test images that a run has wrong after that step; None where its state is of another."""
        kept = restore(self.folder, job.name)
        if kept is None or self.count_steps(job) != step:
            return None
        training = Training(job, RACE.budget(self.settings, self.task), self.pool)
        training.load_state_dict(kept["training"])
        outputs = training._outputs(training.examples.test_x)
        return (outputs.argmax(1) != training.examples.test_y).nonzero()[:, 0].tolist()


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
