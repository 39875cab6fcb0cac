"""From the records of a race to the numbers that are shown: medians and ranges over seeds, and a verdict in words.

Where the contestants were tuned on a validation part, the differences seed by seed decide: see `paired`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.race import final_loss, final_row
from natgrad_lab.experiments.records import Folder, Record
from natgrad_lab.report.paired import Pair, balance, pair_all, write_verdict
from natgrad_lab.words import capital, how_much_higher, plural, short, unique

OURS = ("K-FAC", "natural gradient")  # whom a verdict is about: the first of them that is in the race


@dataclass(frozen=True)
class Spread:
    """A number over seeds: its median, lowest and highest value. None stands for a run in which it has no value."""

    values: tuple[float | None, ...]

    @property
    def middle(self) -> float | None:
        """Median with missing values counted as infinite; None when it is one of those."""
        value = median(math.inf if v is None else v for v in self.values)
        return value if math.isfinite(value) else None

    @property
    def known_values(self) -> list[float]:
        """The values that are not missing."""
        return [v for v in self.values if v is not None]


@dataclass(frozen=True)
class Tried:
    """One point of a grid: what was tried and what it ended with."""

    choice: dict[str, float]
    loss: float  # of training
    steps: int
    chosen: bool
    valid_error: float | None = None


@dataclass(frozen=True)
class Entry:
    """One contestant on one task."""

    name: str
    choice: dict[str, float]
    grid: tuple[Tried, ...]
    records: tuple[Record, ...]
    train_loss: Spread
    test_loss: Spread
    test_error: Spread | None
    steps: Spread
    seconds_to_target: Spread
    steps_to_target: Spread


@dataclass(frozen=True)
class Result:
    """One task: its entries from the lowest final training loss to the highest, or in the plan's order if paired."""

    name: str
    title: str
    unit: str
    seconds: float | None  # trained per run; None where runs were ended by a number of steps
    steps: int  # the fewest that an entry took, at its median: losses after equal steps are read there
    target: float  # the training loss the second-best entry ended with: time and steps to it are told
    parameters: int
    examples: int
    entries: tuple[Entry, ...]
    verdict: str
    tuned_on: str = "train_loss"
    pairs: tuple[Pair, ...] = ()  # empty for races on the training loss
    paper: dict[str, list[float | None]] | None = None
    note: str = ""

    @property
    def ahead_after_steps(self) -> str:
        """Who has the lowest training loss after equal steps."""
        after = after_steps(self.entries, self.steps)
        return min(after, key=lambda name: after[name])


@dataclass(frozen=True)
class Summary:
    """All that a race's report shows.

    Attributes:
        experiment: Its name.
        settings: Those that it ran with.
        seeds: Those that are finished.
        versions: Of packages, where records differ several.
        threads: Of the processes that made the records.
        devices: Where they trained.
        missing: Runs of the plan that are not finished.
        results: The numbers, task by task.
        title: Of the page; None for the experiment's name.
    """

    experiment: str
    settings: dict[str, Any]
    seeds: tuple[int, ...]
    versions: tuple[dict[str, str], ...]
    threads: tuple[int, ...]
    devices: tuple[str, ...]
    missing: int
    results: tuple[Result, ...]
    title: str | None = None


def summarise(folder: Folder) -> Summary:
    """Read a folder's plan and finished runs.

    Args:
        folder: With the records of a race.

    Raises:
        LabError: If no task has a finished run of every contestant.
    """
    plan, records = folder.plan(), folder.read_all()
    results = tuple(r for task in plan["tasks"] if (r := result(task, records)) is not None)
    if not results:
        raise LabError(f"{folder.path} has no task on which every contestant finished: run the same command again")
    raced = [r for r in records if r.header["phase"] == "race"]
    seeds = tuple(sorted({r.header["seed"] for r in raced}))
    entries = [entry for task in plan["tasks"] for entry in task["contestants"]]
    planned = sum((len(entry["grid"]) if len(entry["grid"]) > 1 else 0) + len(seeds) for entry in entries)
    return Summary(
        experiment=plan["experiment"],
        settings=plan["settings"],
        seeds=seeds,
        versions=unique(r.header["versions"] for r in records),
        threads=unique(r.header["threads"] for r in records),
        devices=unique(r.header["device"] for r in records),
        missing=planned - len(records),
        results=results,
        title=plan.get("title"),
    )


def result(task: dict[str, Any], records: Sequence[Record]) -> Result | None:
    """One task's numbers; None while a contestant has no finished run."""
    mine = [r for r in records if r.header["task"] == task["name"]]
    raced = {c["name"]: _of(mine, c["name"], "race") for c in task["contestants"]}
    if not all(raced.values()):
        return None
    losses = sorted(_middle_loss(runs) for runs in raced.values())
    target = losses[min(1, len(losses) - 1)]
    entries = [entry(name, runs, _of(mine, name, "tune"), target) for name, runs in raced.items()]
    header = mine[0].header
    in_time = all(r.end["end"] == "seconds" for runs in raced.values() for r in runs)
    made = Result(
        name=task["name"],
        title=task["title"],
        unit=task["unit"],
        seconds=header["budget"] if in_time else None,
        steps=min(int(e.steps.middle or 0) for e in entries),
        target=target,
        parameters=header["parameters"],
        examples=header["examples"],
        entries=tuple(entries),
        verdict="",
        note=task.get("note", ""),
    )
    return _pair_races(made, task, raced) if "tuned_on" in task else _rank_entries(made)


def _rank_entries(made: Result) -> Result:
    entries = sorted(made.entries, key=lambda e: math.inf if e.train_loss.middle is None else e.train_loss.middle)
    return replace(made, entries=tuple(entries), verdict=verdict(entries, made.unit, made.seconds, made.steps))


def _pair_races(made: Result, task: dict[str, Any], raced: dict[str, list[Record]]) -> Result:
    paper = task["paper"] or {}
    pairs = pair_all(raced, paper)
    return replace(
        made,
        verdict=write_verdict(raced, pairs),
        tuned_on=task["tuned_on"],
        pairs=pairs,
        paper=paper,
    )


def entry(name: str, raced: Sequence[Record], tuned: Sequence[Record], target: float) -> Entry:
    """One contestant's numbers from its finished runs."""
    last = [final_row(run) for run in raced]
    reached = [first_below(run, target) for run in raced]
    errors = [row.get("test_error") for row in last]
    chosen = raced[0].header["index"]
    return Entry(
        name=name,
        choice=raced[0].header["choice"],
        grid=tuple(_count_tried(r, chosen) for r in sorted(tuned, key=lambda r: r.header["index"])),
        records=tuple(raced),
        train_loss=Spread(tuple(_finite(final_loss(run)) for run in raced)),
        test_loss=Spread(tuple(row.get("test_loss") for row in last)),
        test_error=None if all(e is None for e in errors) else Spread(tuple(errors)),
        steps=Spread(tuple(row["step"] for row in last)),
        seconds_to_target=Spread(tuple(None if row is None else row["seconds"] for row in reached)),
        steps_to_target=Spread(tuple(None if row is None else row["step"] for row in reached)),
    )


def first_below(run: Record, loss: float) -> dict[str, Any] | None:
    """The first evaluated row, not later than the final one, whose training loss is at most `loss`."""
    end = final_row(run)["step"]
    rows = (row for row in run.rows if row["step"] <= end and row.get("train_loss") is not None)
    return next((row for row in rows if row["train_loss"] <= loss), None)


def loss_after(run: Record, steps: int) -> float:
    """Training loss after so many steps: of the last evaluation not later than that."""
    loss = [row["train_loss"] for row in run.rows if "train_loss" in row and row["step"] <= steps][-1]
    return math.inf if loss is None else loss


def after_steps(entries: Sequence[Entry], steps: int) -> dict[str, float]:
    """Each contestant's training loss after so many steps, medians over seeds."""
    return {entry.name: median(loss_after(run, steps) for run in entry.records) for entry in entries}


def lead(results: Sequence[Result]) -> str:
    """The whole report in one sentence."""
    if results[0].pairs:
        return balance([pair for result in results for pair in result.pairs])
    name, of = results[0].entries[0].name, plural(len(results), "task")
    name = next((ours for ours in OURS if any(entry.name == ours for entry in results[0].entries)), name)
    first = sum(result.entries[0].name == name for result in results)
    if any(result.seconds is None for result in results):
        return f"{capital(name)} had the lowest training loss on {first} of {of}."
    per_step = sum(result.ahead_after_steps == name for result in results)
    return (
        f"{capital(name)} had the lowest training loss on {first} of {of} after equal seconds, and on {per_step} after "
        "equal steps."
    )


def curve(run: Record, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """The points (x, y) of a run, from the rows that have both."""
    rows = [row for row in run.rows if row.get(x) is not None and row.get(y) is not None]
    return np.array([row[x] for row in rows], float), np.array([row[y] for row in rows], float)


def verdict(entries: Sequence[Entry], unit: str, seconds: float | None, steps: int) -> str:
    """Two or three sentences: who ended lowest and by how much, where natural gradient lost, and how it is per step.

    entries: sorted, best first. "Ahead" needs ranges over seeds that do not overlap; otherwise it is called level.
    """
    best = entries[0]
    if best.train_loss.middle is None:
        return "Every contestant broke down."
    when = f"After {seconds:g} s of training each" if seconds is not None else "At the end"
    said = [f"{when}, {best.name} has the lowest training loss: {short(best.train_loss.middle)} {unit}."]
    ours = next((e for name in OURS for e in entries if e.name == name), best)
    for other in entries:
        if other is not ours and (other is best or ours is best):
            said.append(_compare_entries(ours, other))
    if seconds is not None:
        said.append(_per_step(entries, ours, steps))
    said.append(_find_test_winner(entries))
    return " ".join(sentence for sentence in said if sentence)


def _find_test_winner(entries: Sequence[Entry]) -> str:
    """Who has the lowest test loss, if that is another than the first of the training loss and its seeds are below."""
    best = entries[0].test_loss
    for other in entries[1:]:
        test = other.test_loss
        if (
            test.known_values
            and best.known_values
            and max(test.known_values) < min(min(e.test_loss.known_values) for e in entries if e is not other)
        ):
            return f"On the test part {other.name} ends lowest: {short(test.middle)} against {short(best.middle)}."
    return ""


def _compare_entries(ours: Entry, other: Entry) -> str:
    a, b = ours.train_loss, other.train_loss
    mine, theirs = a.middle, b.middle
    if mine is None or theirs is None:
        return f"{capital((ours if mine is None else other).name)} broke down."
    ahead = mine <= theirs
    low, high = (a, b) if ahead else (b, a)
    one = len(low.known_values) < 2 or len(high.known_values) < 2
    if not one and max(low.known_values) >= min(high.known_values):
        return f"{capital(ours.name)} and {other.name} ({short(theirs)}) are level: their seeds overlap."
    told, certainty = how_much_higher(max(mine, theirs), min(mine, theirs)), ", on one seed" if one else ""
    if ahead:
        return f"{capital(other.name)} ends {told} ({short(theirs)}{certainty})."
    return f"{capital(ours.name)} loses here: it ends {told} ({short(mine)}{certainty})."


def _per_step(entries: Sequence[Entry], ours: Entry, steps: int) -> str:
    after = after_steps(entries, steps)
    others = {name: loss for name, loss in after.items() if name != ours.name}
    if not others or steps < 1:
        return ""
    name = min(others, key=lambda key: others[key])
    told = f"{ours.name} {short(after[ours.name])}, {name} {short(others[name])}"
    return f"Step for step, after {plural(steps, 'step')}: {told}."


def _count_tried(record: Record, chosen: int) -> Tried:
    header, last = record.header, final_row(record)
    return Tried(header["choice"], final_loss(record), last["step"], header["index"] == chosen, last.get("valid_error"))


def _of(records: Sequence[Record], name: str, phase: str) -> list[Record]:
    runs = [r for r in records if r.header["contestant"] == name and r.header["phase"] == phase]
    return sorted(runs, key=lambda r: (r.header["seed"], r.header["index"]))


def _middle_loss(runs: Sequence[Record]) -> float:
    return median(final_loss(run) for run in runs)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
