"""Races of `ng.kfac` with its defaults beside tuned peers on many networks: `python -m benchmarks step`.

Every peer is tuned over five rates and more where the best is at their edge, on a seed of its own and for the whole
length of the race; the rate with the lowest training loss at the end is then raced from three other seeds. Everybody's
rate falls to zero along the same line, or is constant. Races are of equal steps, or of equal CPU seconds of one thread,
evaluations not counted. A race is a folder of records, one file per run: a command that was stopped goes on where it
was, and other contestants may join later.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks import step_workloads, unseen_workloads
from benchmarks.tables import ChosenTables, print_table, write_spread
from benchmarks.variants import check_names
from natgrad_lab.experiments import Choice, Contestant, Experiment, LabError, Task, contestants, interruptible, race
from natgrad_lab.experiments.contestants import FAMILY, apply_recipe, grid
from natgrad_lab.experiments.frame import Worker, plan, threads
from natgrad_lab.experiments.progress import ProgressDisplay
from natgrad_lab.experiments.race import Course
from natgrad_lab.experiments.race_story import plots
from natgrad_lab.experiments.race_summary import Record, choose, final, read_runs, result
from natgrad_lab.experiments.records import FinishedPiece, Folder
from natgrad_lab.figures import draw, save

WORKLOADS = step_workloads.WORKLOADS | unseen_workloads.UNSEEN
SUITES = step_workloads.SUITES | {"unseen": unseen_workloads.SUITE}
METHODS = ("kfac", "adam", "muon", "soap", "sgd")  # who races where nobody is named
OUT = Path("runs/step")
HEADS = ("rate", "loss of the last batches", "training loss", "test loss", "steps", "seconds")
LAST = 20  # batches that the first of the losses is a mean of
TITLES = {"Muon and Adam": "Muon", "SGD-momentum": "SGD"}


@dataclass(frozen=True)
class Settings:
    """Of one race; its plan holds them, so that one folder never mixes two lengths."""

    steps: int | None
    seconds: float
    looked_at: int
    evaluations: int = 5
    tuning_seed: int = 100
    threads: int | None = 1
    device: str = "cpu"
    falls: bool = True


def races(request: ChosenTables) -> Iterator[tuple[str, Experiment, Settings]]:
    """(folder's name, race, settings) of every race asked for. SystemExit for an unknown workload or method."""
    check_names("workloads", request.workloads, (*WORKLOADS, *SUITES))
    check_names("methods", (*request.methods, *request.redo), (*PEER_RATES, *FAMILY))
    own = {name: length for word in request.workloads for name, length in SUITES.get(word, {}).items()}
    for name in dict.fromkeys(name for word in request.workloads or WORKLOADS for name in SUITES.get(word, (word,))):
        workload = WORKLOADS[name]
        counts, spans = ((own[name][0],), (own[name][1],)) if name in own else (workload.steps, workload.seconds)
        if request.steps is not None or request.seconds is not None:
            counts = () if request.steps is None else (request.steps,)
            spans = () if request.seconds is None else (request.seconds,)
        lengths: list[tuple[int | None, float]] = [(count, math.inf) for count in counts]
        for steps, seconds in lengths + [(None, span) for span in spans]:
            title = f"{name}-{steps}-steps" if steps is not None else f"{name}-{seconds:g}-seconds"
            title += "-constant" if request.constant else ""
            settings = Settings(steps, seconds, workload.looked_at, falls=not request.constant)
            yield title, race_of(name, title), settings


def race_of(name: str, title: str) -> Experiment:
    """The race on one workload, with all contestants there are: who takes part is asked for by name."""
    workload = WORKLOADS[name]

    def tasks(settings: Settings) -> tuple[Task, ...]:
        among = tuple(
            contestant(word, workload.batch, workload.rates.get(word), workload.but, falls=settings.falls)
            for word in (*FAMILY, *PEER_RATES)
        )
        return (replace(workload.make(), name=name, contestants=among, share=1.0),)

    return race(title, f"{name} of the step's races", Settings, tasks)


PEER_RATES: dict[str, tuple[float, ...]] = {
    "adam": (5e-4, 1e-3, 3e-3, 6e-3, 0.012),
    "adamw": (5e-4, 1e-3, 3e-3, 6e-3, 0.012),
    "muon": (0.005, 0.01, 0.02, 0.05, 0.1),
    "soap": (1e-3, 3e-3, 0.01, 0.02, 0.03),
    "psgd": (0.003, 0.01, 0.03, 0.1, 0.3),
    "schedule-free": (1e-3, 3e-3, 0.01, 0.02, 0.05),
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0),
}
BEYOND = 2  # rates below and above the five, each three times further out


def widen(rates: Sequence[float]) -> tuple[float, ...]:
    """The five with those beyond them."""
    low, high = min(rates), max(rates)
    below, above = (low / 3**k for k in range(BEYOND, 0, -1)), (high * 3**k for k in range(1, BEYOND + 1))
    return (*below, *rates, *above)


def contestant(
    name: str, batch: int, rates: Sequence[float] | None = None, but: Sequence[str] = (), falls: bool = True
) -> Contestant:
    """One by its name. but: matrices that are Adam's where Muon has the rest. falls: its rate, to zero."""
    fall = (lambda share: 1 - share) if falls and name != "schedule-free" else None  # straight down
    if name in FAMILY:
        title, recipe = FAMILY[name]
        return replace(apply_recipe(title, recipe, grid(batch=(batch,))), falls=fall)
    return replace(make_peer(name, batch, widen(rates or PEER_RATES[name]), but), falls=fall)


def make_peer(name: str, batch: int, rates: Sequence[float], but: Sequence[str]) -> Contestant:
    """A peer. Adam, and what of Muon's parameters is Adam's, have the betas .9 and .95 of language models."""
    if name == "muon":
        return contestants.muon(grid(batch=(batch,), lr=rates, adam_lr=(3e-3,)), but=but)
    builders: Mapping[str, Callable[[list[Choice]], Contestant]] = {
        "adam": lambda choices: contestants.adam(choices, betas=(0.9, 0.95)),
        "adamw": adamw,
        "soap": contestants.soap,
        "psgd": partial(take_packaged, "PSGD", "Kron"),
        "schedule-free": partial(take_packaged, "Schedule-Free", "ScheduleFreeAdamW"),
        "sgd": contestants.sgd,
    }
    return builders[name](grid(batch=(batch,), lr=rates))


def adamw(choices: list[Choice], decay: float = 0.1) -> Contestant:
    """torch.optim.AdamW with the weight decay of language models."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=choice["lr"], betas=(0.9, 0.95), weight_decay=decay)

    return Contestant("AdamW", tuple(choices), build)


def take_packaged(title: str, name: str, choices: list[Choice]) -> Contestant:
    """One of pytorch_optimizer's, with that package's defaults: PSGD's Kronecker form, AdamW without a schedule."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        try:
            package: Any = importlib.import_module("pytorch_optimizer")
        except ModuleNotFoundError as error:
            raise LabError(f"{title} is pytorch_optimizer's {name}: pip install pytorch_optimizer") from error
        return getattr(package, name)(model.parameters(), lr=choice["lr"])

    return Contestant(title, tuple(choices), build)


def carry_out(request: ChosenTables) -> None:
    """Run what is missing, race by race, and show each one when it is there. Interrupted where Ctrl-C was pressed."""
    seeds = 3 if request.seeds is None else len(request.seeds)
    with interruptible() as stopped:
        for title, experiment, settings in races(request):
            assert experiment.tasks is not None
            folder, (task,) = Folder(OUT / title), experiment.tasks(settings)
            course, asked = Course(task, settings), choose_contestants(task, request.methods or METHODS)
            pieces = tuple(course.tuning(c, i) for c in task.contestants for i in range(len(c.grid)))
            pieces += tuple(map(course.racing, task.contestants))
            folder.settle(plan(experiment, pieces, settings))
            for again in choose_contestants(task, request.redo):  # finished runs of who is to run again
                for piece in (*(course.tuning(again, i) for i in range(len(again.grid))), course.racing(again)):
                    for seed in range(seeds if piece.repeated else 1):
                        (folder.records / piece.file(seed)).unlink(missing_ok=True)
            many = sum((len(c.grid) - 2 * BEYOND if c.has_choices else 0) + seeds for c in asked)
            with ProgressDisplay(Console(stderr=True)) as display, threads(settings.threads):
                worker = Worker(experiment, settings, folder, pieces, 0, display, stopped, many)
                best = {racer.name: tune(worker, course, racer) if racer.has_choices else 0 for racer in asked}
                for seed in range(seeds):
                    for racer in asked:
                        worker.carry_out(course.racing(racer, best[racer.name]), seed)
            records = read_runs(folder.read_all())
            print_table(f"{folder.path.name}: {task.title}, {task.unit}", figures(records), HEADS)
            picture(folder, task, records)


def choose_contestants(task: Task, words: Sequence[str]) -> tuple[Contestant, ...]:
    """Contestants by the words of the command line."""
    among = dict(zip((*FAMILY, *PEER_RATES), task.contestants, strict=True))
    return tuple(racer for word, racer in among.items() if word in words)


def tune(worker: Worker, course: Course, racer: Contestant) -> int:
    """Index of the rate with the lowest training loss: among the five, and on beyond them while the edge is best."""
    tried: dict[int, Record] = {}

    def attempt(index: int) -> None:
        numbers = worker.carry_out(course.tuning(racer, index), 0)
        (tried[index],) = read_runs([FinishedPiece({}, numbers)])

    for index in range(BEYOND, len(racer.grid) - BEYOND):
        attempt(index)
    while True:
        best = choose([tried[index] for index in sorted(tried)])
        further = {min(tried): min(tried) - 1, max(tried): max(tried) + 1}.get(best)
        if further is None or not 0 <= further < len(racer.grid):
            return best
        attempt(further)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Rows of HEADS, the lowest test loss first: medians over the seeds, lowest and highest behind them."""
    raced: dict[str, list[Record]] = {}
    for record in records:
        if record.header["phase"] == "race":
            raced.setdefault(record.header["contestant"], []).append(record)
    tuned: dict[str, set[float]] = {}
    for record in records:
        if record.header["phase"] == "tune":
            tuned.setdefault(record.header["contestant"], set()).add(record.header["choice"]["lr"])
    for name in sorted(raced, key=lambda name: median(final(r, "test_loss") for r in raced[name])):
        runs = raced[name]
        rate = runs[0].header["choice"].get("lr")
        words = "defaults" if rate is None else f"{rate:g}"
        if rate is not None and tuned.get(name) and rate in (min(tuned[name]), max(tuned[name])):
            words += " (at the edge)"
        columns = [
            [last_batches(r) for r in runs],
            *([final(r, n) for r in runs] for n in ("train_loss", "test_loss")),
        ]
        ends = (f"{median(r.end[key] for r in runs):.4g}" for key in ("steps", "seconds"))
        yield (TITLES.get(name, name), words, *map(write_spread, columns), *ends)


def last_batches(record: Record) -> float:
    """The mean loss of the last batches, each before its step."""
    losses = [row["loss"] for row in record.rows if row.get("loss") is not None][-LAST:]
    return math.inf if record.end["end"] == "not finite" or not losses else sum(losses) / len(losses)


def picture(folder: Folder, task: Task, records: Sequence[Record]) -> None:
    """plots/*.png and *.svg of those contestants that are there."""
    present = {record.header["contestant"] for record in records if record.header["phase"] == "race"}
    there = replace(task, contestants=tuple(racer for racer in task.contestants if racer.name in present))
    numbers = result(there, records)
    if numbers is None:
        return
    (folder.path / "plots").mkdir(exist_ok=True)
    order = [racer.name for racer in there.contestants]
    for plot in plots(numbers):
        if plot.name in ("loss-steps", "loss-seconds", "test-seconds"):
            seeds = max(len(entry.records) for entry in numbers.entries)
            title = f"{task.title}, {folder.path.name}: {plot.title.lower()}, median and range of {seeds} seeds"
            drawn = plot.picture(replace(numbers, task=replace(there, title=title)), order)
            save(draw(drawn.draw, drawn.size), folder.path / "plots" / drawn.name)
