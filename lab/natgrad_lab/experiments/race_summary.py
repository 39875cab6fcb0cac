"""From the runs of a race to the numbers that are shown: medians and ranges over seeds, and a verdict in words.

Where the contestants were tuned on a validation part, they are compared seed by seed: what two of them have in common
(data, start) cancels in the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

from natgrad_lab.experiments.base import Task
from natgrad_lab.experiments.records import FinishedPiece, Numbers
from natgrad_lab.words import capital, how_much_higher, plural, short

OURS = ("K-FAC", "natural gradient")  # whom a verdict is about: the first of them that is in the race
DECIDED = 2.0  # standard errors
OVERTIME = 1.01  # of the budget: a last step may end a little late


@dataclass(frozen=True)
class Record:
    """A run: what it was, a row per step, and how it ended."""

    header: Numbers
    rows: tuple[Numbers, ...]
    end: Numbers


def read_runs(pieces: Sequence[FinishedPiece]) -> list[Record]:
    """The runs among finished pieces."""
    runs = [(piece.header, piece.numbers) for piece in pieces if "run" in piece.numbers]
    return [Record(header | numbers["run"], tuple(numbers["rows"]), numbers["end"]) for header, numbers in runs]


@dataclass(frozen=True)
class Spread:
    """A number over seeds. None stands for a run in which it has no value; not finite: one that broke down."""

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

    @property
    def mean(self) -> float:
        """NaN where a seed has no number."""
        known = self.known_values
        return sum(known) / len(known) if known and len(known) == len(self.values) else math.nan

    @property
    def error(self) -> float:
        """Of the mean, with n - 1 in the variance; infinite for one seed, which says nothing of the spread."""
        if len(self.values) < 2:
            return math.inf
        variance = sum((value - self.mean) ** 2 for value in self.known_values) / (len(self.values) - 1)
        return math.sqrt(variance / len(self.values))

    @property
    def sign(self) -> int:
        """-1 or 1 where the mean is further than two standard errors from zero, else 0."""
        if not math.isfinite(self.mean) or abs(self.mean) <= DECIDED * self.error:
            return 0
        return -1 if self.mean < 0 else 1


@dataclass(frozen=True)
class Entry:
    """One contestant on one task."""

    name: str
    choice: dict[str, float]
    grid: tuple[Record, ...]  # a run for each choice, from the tuning seed
    records: tuple[Record, ...]  # of the race
    train_loss: Spread
    test_loss: Spread
    test_error: Spread | None
    steps: Spread
    seconds_to_target: Spread
    steps_to_target: Spread


@dataclass(frozen=True)
class Result:
    """One task: its entries from the lowest final training loss to the highest, or in the plan's order if paired."""

    task: Task
    seconds: float | None  # trained per run; None where runs were ended by a number of steps
    target: float  # the training loss the second-best entry ended with: time and steps to it are told
    parameters: int
    examples: int
    entries: tuple[Entry, ...]
    pairs: tuple[Pair, ...] = ()  # empty for races on the training loss

    @property
    def steps(self) -> int:
        """The fewest that an entry took, at its median: losses after equal steps are read there."""
        return min(int(entry.steps.middle or 0) for entry in self.entries)

    @property
    def verdict(self) -> str:
        """What came out, in words."""
        if self.pairs:
            return write_verdict({entry.name: entry.records for entry in self.entries}, self.pairs)
        return verdict(self.entries, self.task.unit, self.seconds, self.steps)


def result(task: Task, records: Sequence[Record]) -> Result | None:
    """One task's numbers; None while a contestant has no finished run."""
    mine = [r for r in records if r.header["task"] == task.name]
    raced = {c.name: _of(mine, c.name, "race") for c in task.contestants}
    if not all(raced.values()):
        return None
    losses = sorted(median(map(final, runs)) for runs in raced.values())
    target = losses[min(1, len(losses) - 1)]
    entries = [entry(name, runs, _of(mine, name, "tune"), target) for name, runs in raced.items()]
    header = mine[0].header
    seconds = header["budget"] if all(r.end["end"] == "seconds" for runs in raced.values() for r in runs) else None
    pairs = pair_all(raced, task.paper or {}) if task.tuned_on != "train_loss" else ()
    if task.tuned_on == "train_loss":
        entries.sort(key=lambda e: math.inf if e.train_loss.middle is None else e.train_loss.middle)
    return Result(task, seconds, target, header["parameters"], header["examples"], tuple(entries), pairs)


def entry(name: str, raced: Sequence[Record], tuned: Sequence[Record], target: float) -> Entry:
    """One contestant's numbers from its finished runs."""
    last = [final_row(run) for run in raced]
    reached = [first_below(run, target) for run in raced]
    errors = [row.get("test_error") for row in last]
    return Entry(
        name=name,
        choice=raced[0].header["choice"],
        grid=tuple(sorted(tuned, key=lambda run: run.header["index"])),
        records=tuple(raced),
        train_loss=Spread(tuple(loss if math.isfinite(loss := final(run)) else None for run in raced)),
        test_loss=Spread(tuple(row.get("test_loss") for row in last)),
        test_error=None if all(e is None for e in errors) else Spread(tuple(errors)),
        steps=Spread(tuple(row["step"] for row in last)),
        seconds_to_target=Spread(tuple(row.get("seconds") for row in reached)),
        steps_to_target=Spread(tuple(row.get("step") for row in reached)),
    )


def first_below(run: Record, loss: float) -> dict[str, Any]:
    """The first evaluated row, not later than the final one, whose training loss is at most `loss`; {} for none."""
    end = final_row(run)["step"]
    rows = (row for row in run.rows if row["step"] <= end and row.get("train_loss") is not None)
    return next((row for row in rows if row["train_loss"] <= loss), {})


def after_steps(entries: Sequence[Entry], steps: int) -> dict[str, float]:
    """Each contestant's training loss at the last evaluation within so many steps, medians over seeds."""

    def loss(run: Record) -> float:
        last = [row["train_loss"] for row in run.rows if "train_loss" in row and row["step"] <= steps][-1]
        return math.inf if last is None else last

    return {entry.name: median(map(loss, entry.records)) for entry in entries}


def lead(results: Sequence[Result]) -> str:
    """The whole report in one sentence."""
    if results[0].pairs:
        return balance([pair for result in results for pair in result.pairs])
    name, of = results[0].entries[0].name, plural(len(results), "task")
    name = next((ours for ours in OURS if any(entry.name == ours for entry in results[0].entries)), name)
    first = sum(result.entries[0].name == name for result in results)
    if any(result.seconds is None for result in results):
        return f"{capital(name)} had the lowest training loss on {first} of {of}."
    after = [after_steps(result.entries, result.steps) for result in results]
    per_step = sum(min(losses, key=lambda key: losses[key]) == name for losses in after)
    return (
        f"{capital(name)} had the lowest training loss on {first} of {of} after equal seconds, and on {per_step} after "
        "equal steps."
    )


def curve(run: Record, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """The points (x, y) of a run, from the rows that have both."""
    rows = [row for row in run.rows if row.get(x) is not None and row.get(y) is not None]
    return np.array([row[x] for row in rows], float), np.array([row[y] for row in rows], float)


def verdict(entries: Sequence[Entry], unit: str, seconds: float | None, steps: int) -> str:
    """Who ended lowest and by how much, where natural gradient lost, how it is per step. entries: best first."""
    best = entries[0]
    if best.train_loss.middle is None:
        return "Every contestant broke down."
    when = f"After {seconds:g} s of training each" if seconds is not None else "At the end"
    said = [f"{when}, {best.name} has the lowest training loss: {short(best.train_loss.middle)} {unit}."]
    ours = next((e for name in OURS for e in entries if e.name == name), best)
    for other in entries:
        if other is not ours and (other is best or ours is best):
            said.append(_compare_entries(ours, other))
    if seconds is not None and len(entries) > 1 and steps > 0:
        after = after_steps(entries, steps)
        name = min((other for other in after if other != ours.name), key=lambda other: after[other])
        both = f"{ours.name} {short(after[ours.name])}, {name} {short(after[name])}"
        said.append(f"Step for step, after {plural(steps, 'step')}: {both}.")
    said.append(_find_test_winner(entries))
    return " ".join(sentence for sentence in said if sentence)


def _find_test_winner(entries: Sequence[Entry]) -> str:
    """Who has the lowest test loss, if that is another than the first of the training loss and its seeds are below."""
    best = entries[0].test_loss
    for other in entries[1:]:
        test, rest = other.test_loss, [e.test_loss.known_values for e in entries if e is not other]
        if test.known_values and best.known_values and max(test.known_values) < min(map(min, rest)):
            return f"On the test part {other.name} ends lowest: {short(test.middle)} against {short(best.middle)}."
    return ""


def _compare_entries(ours: Entry, other: Entry) -> str:
    a, b = ours.train_loss, other.train_loss
    mine, theirs = a.middle, b.middle
    if mine is None or theirs is None:
        return f"{capital((ours if mine is None else other).name)} broke down."
    ahead = mine <= theirs
    low, high = (a, b) if ahead else (b, a)
    single = len(low.known_values) < 2 or len(high.known_values) < 2
    if not single and max(low.known_values) >= min(high.known_values):
        return f"{capital(ours.name)} and {other.name} ({short(theirs)}) are level: their seeds overlap."
    more, certainty = how_much_higher(max(mine, theirs), min(mine, theirs)), ", on one seed" if single else ""
    if ahead:
        return f"{capital(other.name)} ends {more} ({short(theirs)}{certainty})."
    return f"{capital(ours.name)} loses here: it ends {more} ({short(mine)}{certainty})."


def _of(records: Sequence[Record], name: str, phase: str) -> list[Record]:
    runs = [r for r in records if r.header["contestant"] == name and r.header["phase"] == phase]
    return sorted(runs, key=lambda r: (r.header["seed"], r.header["index"]))


def choose(tried: Sequence[Record], by: str = "train_loss") -> int:
    """Index of the choice with the lowest number of that name at the end of its run; a run that broke down is last."""
    numbers = by, by.replace("error", "loss")  # which tells equal errors apart
    return min(tried, key=lambda record: [final(record, name) for name in numbers]).header["index"]


def final_row(record: Record) -> Numbers:
    """The last evaluation within the budget: what a long last step won after the time was over does not count."""
    budget = record.header["budget"]  # None where no time ended the run
    in_time = [row for row in record.rows if budget is None or row["seconds"] <= OVERTIME * budget]
    return [row for row in in_time if "train_loss" in row][-1]


def final(record: Record, name: str = "train_loss") -> float:
    """A number at the end of the budget, infinite if the run broke down."""
    value = final_row(record).get(name)
    return math.inf if value is None or record.end["end"] == "not finite" else value


@dataclass(frozen=True)
class Pair:
    """first - second: test error and losses over seeds, and what the paper's table gives for the test error."""

    first: str
    second: str
    test_error: Spread
    train_loss: Spread
    test_loss: Spread
    paper: float | None

    @property
    def lower(self) -> str | None:
        """Whose test error is lower by more than two standard errors."""
        return {-1: self.first, 0: None, 1: self.second}[self.test_error.sign]

    @property
    def agrees(self) -> bool | None:
        """Whether that is the paper's order; None where we, or the paper, have none."""
        if self.lower is None or not self.paper:
            return None
        return (self.lower == self.first) == (self.paper < 0)


def pair_all(raced: Mapping[str, Sequence[Record]], paper: Mapping[str, Sequence[float | None]]) -> tuple[Pair, ...]:
    """Every two contestants, over the seeds that both have. paper: contestant -> (training loss, test error)."""

    def subtract(first: str, second: str, number: str) -> Spread:
        ours, theirs = by_seed(raced[first], number), by_seed(raced[second], number)
        return Spread(tuple(ours[seed] - theirs[seed] for seed in ours if seed in theirs))

    pairs = []
    for a, b in combinations(raced, 2):
        error, train, test = (subtract(a, b, number) for number in ("test_error", "train_loss", "test_loss"))
        ours, theirs = (paper.get(name, (None, None))[1] for name in (a, b))
        pairs.append(Pair(a, b, error, train, test, None if ours is None or theirs is None else ours - theirs))
    return tuple(pairs)


def by_seed(records: Sequence[Record], name: str) -> dict[int, float]:
    """seed -> the number at the end of its run."""
    return {record.header["seed"]: final(record, name) for record in records}


def write_verdict(raced: Mapping[str, Sequence[Record]], pairs: Sequence[Pair]) -> str:
    """The verdict: who has the lowest mean test error, from whom that can be told apart, and how it suits the paper."""
    means = {name: Spread(tuple(by_seed(records, "test_error").values())) for name, records in raced.items()}
    best = min(means, key=lambda name: means[name].mean)
    if not math.isfinite(means[best].mean):
        return "Every contestant broke down."
    error = f" ± {100 * means[best].error:.2f}" if math.isfinite(means[best].error) else ""
    said = [f"{capital(best)} has the lowest mean test error, {100 * means[best].mean:.2f} %{error}."]
    mine = [pair for pair in pairs if best in (pair.first, pair.second)]
    above, level = (
        [pair.second if pair.first == best else pair.first for pair in mine if pair.lower == lower]
        for lower in (best, None)
    )
    if above:
        said.append(f"Higher by more than two standard errors of the paired difference: {'; '.join(above)}.")
    if level:
        said.append(f"Not told apart from it: {'; '.join(level)}.")
    said.append(_beside_the_paper(pairs))
    return " ".join(sentence for sentence in said if sentence)


def balance(pairs: Sequence[Pair]) -> str:
    """The whole report in a sentence or two."""
    decided = sum(pair.lower is not None for pair in pairs)
    said = f"Of {plural(len(pairs), 'difference')} in test error, {decided} exceed two standard errors."
    return f"{said} {_beside_the_paper(pairs)}".rstrip()


def _beside_the_paper(pairs: Sequence[Pair]) -> str:
    known = [pair for pair in pairs if pair.paper]
    if not known:
        return ""
    same, other = (sum(pair.agrees is way for pair in known) for way in (True, False))
    return (
        f"Of the paper's {plural(len(known), 'order')} of two, {same} came out the same, {other} the other way round, "
        f"{len(known) - same - other} undecided."
    )
