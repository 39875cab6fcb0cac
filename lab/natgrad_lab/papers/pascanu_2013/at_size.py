"""Restricted MNIST at the paper's size and settings: 1500 hidden units, batches of 2500 (MSGD 250).

`python -m natgrad_lab.papers.pascanu_2013.at_size runs/at_size` takes all contestants to 20 updates, then all to 60,
and so on to 2000, so that whenever it is stopped they compare at equal updates; names behind the folder ("KL, same
batch") take these alone further. Ctrl-C stops it after the update under way, and the same command goes on from there.
`--seed 1` is another start, on another choice of labels. After every stage it writes `at_size_seed_0.json`, or that of
the other seed, into the folder: the curves, and which test images each contestant has wrong. `at_size_page` makes the
page's tables and picture of these files.

Rates and dampings are those of section 8.5, which the paper chose by a grid search. It gives the unlabelled metric
other ones than the two that it is compared with; so each of the three runs with both.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from natgrad_lab.data import Split, mnist
from natgrad_lab.experiments.base import Contestant, Job, Task
from natgrad_lab.experiments.frame import ExperimentState, Interrupted, Piece, Worker, interruptible, plan, threads
from natgrad_lab.experiments.metric_data import draw_another_batch, draw_unlabelled
from natgrad_lab.experiments.models import classify, glorot
from natgrad_lab.experiments.race import Course, race
from natgrad_lab.experiments.records import Folder, Numbers, dump, read, versions
from natgrad_lab.experiments.records import replace as write_whole
from natgrad_lab.experiments.training import Training
from natgrad_lab.papers.pascanu_2013 import table1

STAGES = (20, 60, 100, 140, 200, 260, 320, 400, 500, 700, 1000, 1400, 2000)
"""Updates to which all contestants go before one goes further; MSGD takes 20 times as many."""
MSGD_STEPS = 20  # of MSGD for one update of the others, as in the paper's budget
RATES = {table1.MSGD: 1.0, f"{table1.MSGD}, rate .3": 0.3, f"{table1.MSGD}, rate .1": 0.1}
"""The paper's, at which the loss rises to hundreds of nats in the first steps, and two lower ones."""
WEAK_UNLABELLED = f"{table1.UNLABELLED}, rate .1"
ADAPTED_DIFFERENT = f"{table1.DIFFERENT}, rate 5"
ADAPTED_SAME = f"{table1.SAME}, rate 5"
CURVE = ("train_loss", "train_error", "valid_error", "test_loss", "test_error")


@dataclass(frozen=True)
class AtSizeSettings(table1.Table1Settings):
    """Everything as in section 8.5, but for what it does not give."""

    hidden: int = 1500  # tanh units; the paper does not name the non-linearity
    labelled: int = 10_000  # not given in the paper
    validation: int = 5000  # not given in the paper; nothing is chosen by it here
    batch: int = 2500  # of gradient and metric; MSGD takes a tenth
    steps: int = 2020  # updates; beyond the last stage, so that the last state is kept as well
    dense: int = 300  # pixels that are multiplied as dense ones; changes nothing but the time
    evaluations: int = 101  # at equal distances of updates: every 20


def contestants(settings: AtSizeSettings) -> tuple[Contestant, ...]:
    """The paper's four with its rates and dampings, MSGD with lower ones, each metric with the other settings."""
    batch = settings.batch
    weak, adapted = table1.list_constant_choices(batch, (0.1, 0.01)), table1.list_adapted_choices(batch, (5.0, 2.0))
    given = settings.list_bounds()
    slow = max(1, batch // 10), MSGD_STEPS * settings.steps
    return (
        *(replace(table1.msgd(slow[0], (rate,), slow[1]), name=name) for name, rate in RATES.items()),
        table1.kullback(table1.UNLABELLED, adapted, observes=draw_unlabelled(batch), **given),
        table1.kullback(table1.DIFFERENT, weak, observes=draw_another_batch(batch), **given),
        table1.kullback(table1.SAME, weak, **given),
        table1.kullback(WEAK_UNLABELLED, weak, observes=draw_unlabelled(batch), **given),
        table1.kullback(ADAPTED_DIFFERENT, adapted, observes=draw_another_batch(batch), **given),
        table1.kullback(ADAPTED_SAME, adapted, **given),
    )


def tasks(settings: AtSizeSettings) -> tuple[Task, ...]:
    """One task."""
    return (
        classify(
            "restricted-mnist-at-size",
            f"MNIST with {settings.labelled:,} labels, 784-{settings.hidden}-10, tanh",
            lambda: nn.Sequential(
                SparsePixels(784, settings.hidden, settings.dense), nn.Tanh(), glorot(nn.Linear(settings.hidden, 10))
            ),
            sorted_digits,
            contestants(settings),
            draw=lambda pool, seed: table1.divide(pool, seed, settings.validation, settings.labelled),
            tuned_on="valid_error",
        ),
    )


def sorted_digits() -> Split:
    """MNIST as rows, the pixels in the order that `SparsePixels` wants."""
    split = mnist().flat()
    order = sort_pixels(split.train_x)
    return replace(split, train_x=split.train_x[:, order], test_x=split.test_x[:, order])


RACE = race(
    "pascanu_2013_restricted_mnist_at_size",
    "Pascanu & Bengio 2013, Table 1: restricted MNIST at the paper's size and settings",
    AtSizeSettings,
    tasks,
    seeds=1,
)


class StagedRuns:
    """The runs of one seed, a stage at a time; `stopped` is whether to stop."""

    def __init__(self, folder: Folder, settings: AtSizeSettings, stopped: Callable[[], bool], seed: int = 0) -> None:
        self.folder, self.settings, self.stopped, self.seed = folder, settings, stopped, seed
        (task,) = tasks(settings)
        self.course = Course(task, settings)
        self.runs = {c.name: (c, self.course.racing(c)) for c in task.contestants}
        folder.settle(plan(RACE, [piece for _, piece in self.runs.values()], settings))

    def carry_out(self, stages: tuple[int, ...] = STAGES, names: Collection[str] = ()) -> None:
        """All runs, or those of these names, to each stage in turn. Interrupted when asked to stop."""
        for stage in stages:
            for name, (_, piece) in self.runs.items():
                if not names or name in names:
                    self.advance(name, piece, stage)
            curves = {name: self.summarise(*run, stage) for name, run in self.runs.items() if self.load(run[1])[0]}
            record = {"settings": vars(self.settings), "seed": self.seed, "contestants": curves} | versions()
            write_whole(self.folder.path / name_record(self.seed), dump(record) + "\n")

    def advance(self, name: str, piece: Piece, stage: int) -> None:
        """One run to a stage, from where it is; its checkpoint is then the state of that stage."""
        rows, _ = self.load(piece)
        if rows and rows[-1]["step"] >= stage * scale(name):
            return
        watch = partial(end_at_part, stage / self.settings.steps)
        pieces = tuple(piece for _, piece in self.runs.values())
        worker = Worker(RACE, self.settings, self.folder, pieces, self.seed, watch, self.stopped, len(pieces))
        try:
            worker.carry_out(piece, self.seed)
        except Interrupted:
            if self.stopped():
                raise

    def load(self, piece: Piece) -> tuple[list[Numbers], dict[str, Any] | None]:
        """The rows of a run so far, and the state of its training; None where it is finished or not begun."""
        record = self.folder.records / piece.file(self.seed)
        if record.exists():
            return read(record).numbers["rows"], None
        checkpoint = record.with_suffix(".checkpoint")
        if not checkpoint.exists():
            return [], None
        state = torch.load(checkpoint, weights_only=True)
        return state["rows"], state["training"]

    def summarise(self, contestant: Contestant, piece: Piece, stage: int) -> Numbers:
        """The curve of a contestant up to a stage, and the test images that it has wrong there."""
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
        job = Job(self.course.task, contestant, 0, self.seed, "race")
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


def name_record(seed: int | str) -> str:
    """The file of a seed's curves; `*` for all."""
    return f"at_size_seed_{seed}.json"


def shorten(number: float | None) -> float | None:
    """Six places of a number; None of one that was not finite."""
    return None if number is None else round(number, 6)


def scale(name: str) -> int:
    """Steps of a contestant for one update of the others."""
    return MSGD_STEPS if name in RATES else 1


def main(
    folder: Path,
    settings: AtSizeSettings | None = None,
    stages: tuple[int, ...] = STAGES,
    names: Collection[str] = (),
    seed: int = 0,
) -> None:
    """Run, or go on with what was stopped, by default at the paper's settings; of these names alone, or of all."""
    settings = settings or AtSizeSettings()
    known = [contestant.name for contestant in contestants(settings)]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no contestant is called {unknown[0]!r}; there are {', '.join(map(repr, known))}")
    with interruptible() as stopped, threads(settings.threads):
        try:
            StagedRuns(Folder(folder), settings, stopped, seed).carry_out(stages, names)
        except Interrupted:
            sys.stdout.write("stopped; the same command goes on from here\n")


# A first layer for images of which most pixels are 0: the frequent pixels dense, the others sparse, none left out.
# On MNIST 19 % of the pixels are ink. Its 300 most frequent pixels hold nine tenths of that; the others are 0 in all
# but one image in forty. One product X W of 2500 images with 1500 units takes half the time so, and X^T D as well.


@dataclass(frozen=True)
class SplitImages:
    """X (b, i) as [frequent, rest], with the rest and its transpose as sparse rows."""

    frequent: Tensor
    rest: Tensor
    rest_transposed: Tensor

    @classmethod
    def split(cls, images: Tensor, dense: int) -> SplitImages:
        """The first `dense` pixels apart from the others."""
        frequent, rest = images[:, :dense].contiguous(), images[:, dense:]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
            return cls(frequent, rest.to_sparse_csr(), rest.mT.contiguous().to_sparse_csr())

    def times(self, weight: Tensor) -> Tensor:
        """X W, (b, h), for W (i, h)."""
        dense = self.frequent.shape[1]
        return (self.rest @ weight[dense:]).addmm_(self.frequent, weight[:dense])

    def transposed_times(self, rows: Tensor) -> Tensor:
        """X^T D, (i, h), for D (b, h)."""
        return torch.cat([self.frequent.mT @ rows, self.rest_transposed @ rows])


class Times(torch.autograd.Function):
    """W -> X W, linear in W; X is data."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, images: SplitImages) -> Tensor:
        """X W."""
        ctx.images = images
        return images.times(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """X^T D, itself differentiable."""
        return TransposedTimes.apply(grads[0], ctx.images), None  # type: ignore[return-value]


class TransposedTimes(torch.autograd.Function):
    """D -> X^T D, linear in D."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, images: SplitImages) -> Tensor:
        """X^T D."""
        ctx.images = images
        return images.transposed_times(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """X V, itself differentiable."""
        return Times.apply(grads[0], ctx.images), None  # type: ignore[return-value]


class SparsePixels(nn.Module):
    """What `nn.Linear(inputs, outputs)` computes of images whose `dense` frequent pixels come first; Glorot's start."""

    def __init__(self, inputs: int, outputs: int, dense: int) -> None:
        super().__init__()
        self.dense = dense
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(inputs, outputs)))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """(b, inputs) -> (b, outputs)."""
        product: Any = Times.apply(self.weight, SplitImages.split(images, self.dense))
        return product + self.bias


def sort_pixels(images: Tensor) -> Tensor:
    """The pixels' places, most often ink first: images (n, i) -> (i,)."""
    return (images != 0).float().mean(0).argsort(descending=True, stable=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where runs and curves are kept")
    parser.add_argument("names", nargs="*", help="of contestants; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of start, labels and batches")
    given = parser.parse_intermixed_args()  # --seed may stand before the names
    main(given.folder, names=given.names, seed=given.seed)
