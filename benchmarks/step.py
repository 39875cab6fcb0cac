"""Races of `ng.kfac` with its defaults beside tuned peers on many networks: `python -m benchmarks step`.

Every peer is tuned over five rates and more where the best is at their edge, on a seed of its own and for the whole
length of the race; the rate with the lowest training loss at the end is then raced from three other seeds. Everybody's
rate falls to zero along the same line, or is constant. Races are of equal steps, or of equal CPU seconds of one thread,
evaluations not counted. A race is a folder of records, one file per run: a command that was stopped goes on where it
was, and other contestants may join later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.peers import BEYOND, PEERS, contestant
from benchmarks.step_workloads import SUITES, WORKLOADS
from natgrad_lab.experiments import Contestant, Experiment, LabError, Task, interruptible, race
from natgrad_lab.experiments.contestants import FAMILY
from natgrad_lab.experiments.frame import Worker, plan, threads
from natgrad_lab.experiments.progress import ProgressDisplay
from natgrad_lab.experiments.race import Course
from natgrad_lab.experiments.race_story import plots
from natgrad_lab.experiments.race_summary import Record, choose, final_row, read_runs, result
from natgrad_lab.experiments.records import FinishedPiece, Folder
from natgrad_lab.figures import draw, save

OURS = ("kfac",)
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


@dataclass(frozen=True)
class Request:
    """What the command line asks for. None and (): all that a workload has."""

    workloads: tuple[str, ...] = ()
    methods: tuple[str, ...] = (*OURS, "adam", "muon", "soap", "sgd")
    steps: int | None = None
    seconds: float | None = None
    seeds: int = 3
    out: Path = Path("runs/step")
    falls: bool = True  # everybody's rate, to zero
    redo: tuple[str, ...] = ()  # contestants whose finished runs are thrown away: natgrad's, after a change


def races(request: Request) -> Iterator[tuple[str, Experiment, Settings]]:
    """(folder's name, race, settings) of every race asked for. LabError for an unknown workload or method."""
    for word in request.workloads:
        check("workload", word, (*WORKLOADS, *SUITES))
    for word in (*request.methods, *request.redo):
        check("method", word, (*PEERS, *contestants_of_ours()))
    own = {name: length for word in request.workloads for name, length in SUITES.get(word, {}).items()}
    for name in dict.fromkeys(name for word in request.workloads or WORKLOADS for name in SUITES.get(word, (word,))):
        workload = WORKLOADS[name]
        usual = [(value,) for value in own[name]] if name in own else (workload.steps, workload.seconds)
        for steps, seconds in lengths(request, *usual):
            title = f"{name}-{steps}-steps" if steps is not None else f"{name}-{seconds:g}-seconds"
            title += "" if request.falls else "-constant"
            settings = Settings(steps, seconds, workload.looked_at, falls=request.falls)
            yield title, race_of(name, title), settings


def lengths(request: Request, steps: Sequence[int], seconds: Sequence[float]) -> Sequence[tuple[int | None, float]]:
    """(steps, seconds) of the races on one workload."""
    if request.steps is None and request.seconds is None:
        return [(many, math.inf) for many in steps] + [(None, length) for length in seconds]
    asked = [] if request.steps is None else [(request.steps, math.inf)]
    return asked + ([] if request.seconds is None else [(None, request.seconds)])


def race_of(name: str, title: str) -> Experiment:
    """The race on one workload, with all contestants there are: who takes part is asked for by name."""
    workload = WORKLOADS[name]

    def tasks(settings: Settings) -> tuple[Task, ...]:
        among = tuple(
            contestant(word, workload.batch, workload.rates.get(word), workload.but, falls=settings.falls)
            for word in (*contestants_of_ours(), *PEERS)
        )
        return (replace(workload.make(), name=name, contestants=among, share=1.0),)

    return race(title, f"{name} of the step's races", Settings, tasks)


def contestants_of_ours() -> tuple[str, ...]:
    """All that can be raced with their defaults."""
    return tuple(FAMILY)


def carry_out(request: Request, console: Console) -> None:
    """Run what is missing, race by race, and print each one's table and draw its pictures when it is there.

    Interrupted where Ctrl-C was pressed: the same command goes on.
    """
    with interruptible() as stopped:
        for title, experiment, settings in races(request):
            folder, task = Folder(request.out / title), make_task(experiment, settings)
            course, asked = Course(task, settings), choose_contestants(task, request.methods)
            pieces = tuple(course.tuning(one, i) for one in task.contestants for i in range(len(one.grid)))
            pieces += tuple(map(course.racing, task.contestants))
            folder.settle(plan(experiment, pieces, settings))
            throw_away(folder, task, course, request)
            many = sum((len(one.grid) - 2 * BEYOND if one.has_choices else 0) + request.seeds for one in asked)
            with ProgressDisplay(Console(stderr=True)) as display, threads(settings.threads):
                worker = Worker(experiment, settings, folder, pieces, 0, display, stopped, many)
                run(worker, course, asked, request.seeds)
            show(folder, task, console)


def make_task(experiment: Experiment, settings: Settings) -> Task:
    """The one task of a race."""
    assert experiment.tasks is not None
    return experiment.tasks(settings)[0]


def choose_contestants(task: Task, words: Sequence[str]) -> tuple[Contestant, ...]:
    """Contestants by the words of the command line."""
    among = dict(zip((*contestants_of_ours(), *PEERS), task.contestants, strict=True))
    return tuple(one for word, one in among.items() if word in words)


def throw_away(folder: Folder, task: Task, course: Course, request: Request) -> None:
    """Delete the finished runs of those who are to run again."""
    for one in choose_contestants(task, request.redo):
        for piece in (*(course.tuning(one, i) for i in range(len(one.grid))), course.racing(one)):
            for seed in range(request.seeds if piece.repeated else 1):
                (folder.records / piece.file(seed)).unlink(missing_ok=True)


def run(worker: Worker, course: Course, asked: Sequence[Contestant], seeds: int) -> None:
    """Tune those who are tuned, then race everybody from every seed."""
    best = {one.name: tune(worker, course, one) if one.has_choices else 0 for one in asked}
    for seed in range(seeds):
        for one in asked:
            worker.carry_out(course.racing(one, best[one.name]), seed)


def tune(worker: Worker, course: Course, one: Contestant) -> int:
    """Index of the rate with the lowest training loss: among the five, and on beyond them while the edge is best."""
    tried: dict[int, Record] = {}

    def attempt(index: int) -> None:
        numbers = worker.carry_out(course.tuning(one, index), 0)
        (tried[index],) = read_runs([FinishedPiece({}, numbers)])

    for index in range(BEYOND, len(one.grid) - BEYOND):
        attempt(index)
    while True:
        best = choose([tried[index] for index in sorted(tried)])
        further = {min(tried): min(tried) - 1, max(tried): max(tried) + 1}.get(best)
        if further is None or not 0 <= further < len(one.grid):
            return best
        attempt(further)


def show(folder: Folder, task: Task, console: Console) -> None:
    """Print the table of one race, from its records alone, and draw loss against steps and seconds beside them."""
    records = read_runs(folder.read_all())
    console.print(f"\n{folder.path.name}: {task.title}, {task.unit}", highlight=False, soft_wrap=True)
    rows = list(figures(records))
    widths = [max(map(len, column)) for column in zip(("", *HEADS), *rows, strict=True)]
    for row in [("", *HEADS), *rows]:
        console.print(
            "  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)), highlight=False, soft_wrap=True
        )
    picture(folder, task, records)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Rows of HEADS, the lowest test loss first: medians over the seeds, lowest and highest behind them."""
    raced: dict[str, list[Record]] = {}
    for record in records:
        if record.header["phase"] == "race":
            raced.setdefault(record.header["contestant"], []).append(record)
    tuned = {record.header["contestant"]: set[float]() for record in records if record.header["phase"] == "tune"}
    for record in records:
        if record.header["phase"] == "tune":
            tuned[record.header["contestant"]].add(record.header["choice"]["lr"])
    for name in sorted(raced, key=lambda name: median(number(r, "test_loss") for r in raced[name])):
        runs = raced[name]
        rate = runs[0].header["choice"].get("lr")
        told = "defaults" if rate is None else f"{rate:g}"
        if rate is not None and tuned.get(name) and rate in (min(tuned[name]), max(tuned[name])):
            told += " (at the edge)"
        columns = [
            [last_batches(r) for r in runs],
            *([number(r, n) for r in runs] for n in ("train_loss", "test_loss")),
        ]
        ends = (f"{median(r.end[key] for r in runs):.4g}" for key in ("steps", "seconds"))
        yield (TITLES.get(name, name), told, *(spread(values) for values in columns), *ends)


def last_batches(record: Record) -> float:
    """The mean loss of the last batches, each before its step."""
    losses = [row["loss"] for row in record.rows if row.get("loss") is not None][-LAST:]
    return math.inf if record.end["end"] == "not finite" or not losses else sum(losses) / len(losses)


def number(record: Record, name: str) -> float:
    """A number at the end of the run, infinite where it broke down."""
    value = final_row(record).get(name)
    return math.inf if value is None or record.end["end"] == "not finite" else value


def spread(values: Sequence[float]) -> str:
    """Median (lowest-highest)."""
    return f"{median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def picture(folder: Folder, task: Task, records: Sequence[Record]) -> None:
    """plots/*.png and *.svg of those contestants that are there."""
    present = {record.header["contestant"] for record in records if record.header["phase"] == "race"}
    there = replace(task, contestants=tuple(one for one in task.contestants if one.name in present))
    found = result(there, records)
    if found is None:
        return
    (folder.path / "plots").mkdir(exist_ok=True)
    order = [one.name for one in there.contestants]
    for plot in plots(found):
        if plot.name in ("loss-steps", "loss-seconds", "test-seconds"):
            seeds = max(len(entry.records) for entry in found.entries)
            title = f"{task.title}, {folder.path.name}: {plot.title.lower()}, median and range of {seeds} seeds"
            drawn = plot.picture(replace(found, title=title), order)
            save(draw(drawn.draw, drawn.size), folder.path / "plots" / drawn.name)


def check(kind: str, word: str, known: Any) -> None:
    """LabError for a word that nothing is named by."""
    if word not in known:
        raise LabError(f"{kind} {word!r} is not known, expected some of {', '.join(known)}")
