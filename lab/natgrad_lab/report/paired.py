"""Contestants compared seed by seed: what two of them have in common (data, start) cancels in the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from natgrad_lab.experiments.race import final
from natgrad_lab.experiments.records import Record
from natgrad_lab.words import capital, plural

DECIDED = 2.0  # standard errors


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error (n - 1 in the variance); not finite for a run that broke down."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """NaN where no seed has the number."""
        return sum(self.values) / len(self.values) if self.values else math.nan

    @property
    def error(self) -> float:
        """Infinite for one seed, which says nothing of the spread."""
        if len(self.values) < 2:
            return math.inf
        variance = sum((value - self.mean) ** 2 for value in self.values) / (len(self.values) - 1)
        return math.sqrt(variance / len(self.values))

    @property
    def sign(self) -> int:
        """-1 or 1 where the mean is further than two standard errors from zero, else 0."""
        if not math.isfinite(self.mean) or abs(self.mean) <= DECIDED * self.error:
            return 0
        return -1 if self.mean < 0 else 1


@dataclass(frozen=True)
class Pair:
    """first - second: test error and losses over seeds, and what the paper's table gives for the test error."""

    first: str
    second: str
    test_error: Mean
    train_loss: Mean
    test_loss: Mean
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
    return tuple(pair_of(a, b, raced, paper) for a, b in combinations(raced, 2))


def pair_of(a: str, b: str, raced: Mapping[str, Sequence[Record]], paper: Mapping[str, Sequence[float | None]]) -> Pair:
    """Two contestants."""
    error, train, test = (difference(raced[a], raced[b], name) for name in ("test_error", "train_loss", "test_loss"))
    return Pair(a, b, error, train, test, find_published_difference(paper, a, b))


def difference(first: Sequence[Record], second: Sequence[Record], name: str) -> Mean:
    """first - second of a final number, over common seeds."""
    ours, theirs = by_seed(first, name), by_seed(second, name)
    return Mean(tuple(ours[seed] - theirs[seed] for seed in ours if seed in theirs))


def by_seed(records: Sequence[Record], name: str) -> dict[int, float]:
    """seed -> the number at the end of its run."""
    return {record.header["seed"]: final(record, name) for record in records}


def find_published_difference(paper: Mapping[str, Sequence[float | None]], first: str, second: str) -> float | None:
    """The paper's difference in test error, where it has both."""
    a, b = (paper.get(name, (None, None))[1] for name in (first, second))
    return None if a is None or b is None else a - b


def write_verdict(raced: Mapping[str, Sequence[Record]], pairs: Sequence[Pair]) -> str:
    """The verdict: who has the lowest mean test error, from whom that can be told apart, and how it suits the paper."""
    means = {name: Mean(tuple(by_seed(records, "test_error").values())) for name, records in raced.items()}
    best = min(means, key=lambda name: means[name].mean)
    if not math.isfinite(means[best].mean):
        return "Every contestant broke down."
    said = [f"{capital(best)} has the lowest mean test error, {spread(means[best])}."]
    mine = [pair for pair in pairs if best in (pair.first, pair.second)]
    above = [_other(pair, best) for pair in mine if pair.lower == best]
    level = [_other(pair, best) for pair in mine if pair.lower is None]
    if above:
        said.append(f"Higher by more than two standard errors of the paired difference: {join_names(above)}.")
    if level:
        said.append(f"Not told apart from it: {join_names(level)}.")
    said.append(_beside_the_paper(pairs))
    return " ".join(sentence for sentence in said if sentence)


def balance(pairs: Sequence[Pair]) -> str:
    """The whole report in a sentence or two."""
    decided = sum(pair.lower is not None for pair in pairs)
    said = f"Of {plural(len(pairs), 'difference')} in test error, {decided} exceed two standard errors."
    return " ".join(part for part in (said, _beside_the_paper(pairs)) if part)


def _beside_the_paper(pairs: Sequence[Pair]) -> str:
    known = [pair for pair in pairs if pair.paper]
    if not known:
        return ""
    same, other = (sum(pair.agrees is way for pair in known) for way in (True, False))
    return (
        f"Of the paper's {plural(len(known), 'order')} of two, {same} came out the same, {other} the other way round, "
        f"{len(known) - same - other} undecided."
    )


def _other(pair: Pair, name: str) -> str:
    return pair.second if pair.first == name else pair.first


def spread(numbers: Mean) -> str:
    """A share: 4.91 % +- 0.12."""
    if not math.isfinite(numbers.mean):
        return "-"
    error = f" ± {100 * numbers.error:.2f}" if math.isfinite(numbers.error) else ""
    return f"{100 * numbers.mean:.2f} %{error}"


def join_names(names: Sequence[str]) -> str:
    """a; b; c: the names have commas."""
    return "; ".join(names)
