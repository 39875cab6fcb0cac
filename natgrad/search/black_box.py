"""Evaluating a black box: in batches or one by one, here or in workers. Where f fails, its value is the worst."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.ground.states import Stateful
from natgrad.search.base import Search
from natgrad.search.workers import AtPoint, Raised, Workers
from natgrad.search.workers import Pool as Pool

Function = Callable[[Tensor], Any]
SILENT = 20  # times in a row that no worker answered in time, after which none is expected to
ASKING = 4  # evaluations beyond a generation that finding out how f takes points needs at most, where f answers


class BlackBox(Stateful):
    """F (popsize,) for X (popsize, d), whatever f does: evaluations are counted, and failed ones are infinitely bad."""

    STATE = ("vectorized", "nfev", "failures", "points", "_first", "_unsure", "_refused")

    def __init__(
        self,
        f: Function,
        vectorized: bool | None = None,
        executor: Pool | None = None,
        timeout: float | None = None,
    ) -> None:
        if not callable(f):
            raise TypeError(f"f is {type(f).__name__}, expected a function of points")
        if vectorized is not None and not isinstance(vectorized, bool):
            raise TypeError(
                f"vectorized is {vectorized!r}, expected True if f takes a batch (popsize, d), False if it takes a "
                "point (d,), or None to find out"
            )
        self.f, self.vectorized = f, vectorized
        self._at = AtPoint(f)
        self.workers = None if executor is None else Workers(f, executor, timeout)
        self.nfev = self.failures = self.points = 0
        self.limit = math.inf
        self._first = ""
        self._unsure = 0  # calls that batches of several rows, which failed, count beyond one if f takes points
        self._refused = False  # True if f has answered a batch of one, and neither the whole batch nor a point

    @property
    def asking(self) -> int:
        """Evaluations that the next call takes beyond its points, in order to find out how f takes them."""
        return ASKING if self.vectorized is None else 0

    @property
    def hopeless(self) -> str | None:
        """What the first failure was, if no evaluation had a value so far; else None."""
        return self._first if self.points and self.failures == self.points else None

    @property
    def silence(self) -> str | None:
        """That the executor answers no more, in words; else None."""
        if self.workers is None or self.workers.silent < SILENT:
            return None
        return f"no worker answered {SILENT} times in a row within timeout={self.workers.timeout:g} seconds"

    def __call__(self, points: Tensor) -> Tensor:
        values = self.evaluate(points)
        return torch.where(values.isnan(), torch.inf, values)

    def evaluate(self, points: Tensor) -> Tensor:
        """Values (popsize,), NaN where f has none."""
        if self.vectorized is None:
            values = self._find_out(points)
        elif self.vectorized and self.workers is None:
            self.nfev += len(points)
            values = read_reply(points, self._at(points.clone()))
            if isinstance(values, str):
                self._warn_once(values)  # the other points still have values
                values = self._evaluate_each(points)
        else:
            values = self._evaluate_each(points)
        self._count_failures(points, values)
        return values

    def _count_failures(self, points: Tensor, values: Tensor) -> None:
        bad = values.isnan()
        self.points += len(points)
        self.failures += int(bad.sum())
        if bool(bad.any()):
            self._warn_once(
                f"f is NaN at {int(bad.sum())} of {len(points)} points, {points[bad][0].tolist()[:10]} first"
            )

    # Points that nobody waits for; `vectorized` is known by then.

    def evaluate_ahead(self, search: Search, ahead: int) -> tuple[Tensor, Tensor]:
        """The first popsize points (popsize, d) with an answer, and their values, while workers have `ahead` more."""
        # Points beyond the generation are drawn from the distribution before it moves. The search is told them with the
        # next one, as points that it did not ask for, and shortens their steps where they are too long: Hansen 2011.
        assert self.workers is not None
        answers: list[tuple[Tensor, float]] = []
        while len(answers) < search.popsize:
            missing = search.popsize - len(answers) + ahead - self.in_flight
            if missing > 0:
                draws = [search.ask() for _ in range(-(-missing // search.popsize))]
                for row in torch.cat(draws)[:missing]:
                    self.nfev += 1
                    self.workers.start(self._shape_row(row))
            rows, outcomes = zip(*self.workers.take(), strict=True)
            values = list(map(self._read_value, map(read_reply, rows, outcomes)))
            points = [row.reshape(-1) for row in rows]
            self._count_failures(torch.stack(points), torch.tensor(values, dtype=torch.float64))
            answers += zip(points, values, strict=True)
        points, values = zip(*answers[: search.popsize], strict=True)  # more only where several were given up at once
        return torch.stack(points), torch.tensor(values, dtype=torch.float64, device=points[0].device)

    @property
    def in_flight(self) -> int:
        """Points that workers have, and that were not taken."""
        return 0 if self.workers is None else len(self.workers.flight.points)

    def drop_started(self, close: bool = False) -> None:
        """Forget points that nobody needs any more; at the end, release what was started to evaluate points."""
        if self.workers is not None:
            self.nfev -= self.workers.give_up()
            if close:
                self.workers.close()

    def _evaluate_each(self, points: Tensor) -> Tensor:
        """One by one, as far as the limit allows."""
        count = int(min(len(points), max(0.0, self.limit - self.nfev)))
        rows = [self._shape_row(row) for row in points[:count]]
        self.nfev += count
        values = list(map(self._read_value, self._ask_rows(rows))) + [math.nan] * (len(points) - count)
        return torch.tensor(values, dtype=torch.float64, device=points.device)

    def _read_value(self, reply: Tensor | str) -> float:
        """The value of a point, NaN for none."""
        if isinstance(reply, str):
            self._warn_once(reply)
            return math.nan
        return float(reply)

    def _shape_row(self, row: Tensor) -> Tensor:
        return row.clone().unsqueeze(0) if self.vectorized else row.clone()

    def _ask_rows(self, rows: Sequence[Tensor]) -> list[Tensor | str]:
        """What f gave for each, read before f is called again: it may return one array that it writes into."""
        if self.workers is None:
            return [read_reply(row, self._at(row)) for row in rows]
        return list(map(read_reply, rows, self.workers.evaluate(rows)))

    # How f takes points: it gets a batch of one, then the whole batch, and two of its rows must have the values that
    # they have by themselves; otherwise f gets a point alone. All of these calls count.

    def _find_out(self, points: Tensor) -> Tensor:
        """Values (popsize,), found while asking until one point has an answer; NaN for the points that have none."""
        values = torch.full((len(points),), math.nan, dtype=torch.float64, device=points.device)
        middle = len(points) // 2  # the first row would hide a function of x - x[0]
        for k in [middle, *(i for i in range(len(points)) if i != middle)]:
            if self.limit - self.nfev < 2 or self.silence:
                break
            known = self._ask_about(points, k)
            if known is not None and len(known) == len(points):
                return known
            if known is not None:  # a batch with all of them has failed, if f takes batches
                others = self._evaluate_each(torch.cat([points[:k], points[k + 1 :]]))
                return torch.cat([others[:k], known, others[k:]])
        return values

    def _ask_about(self, points: Tensor, k: int) -> Tensor | None:
        """The values of all points or of point k, once `vectorized` is decided; None if f answers neither way."""
        row = self._ask_point(points[k : k + 1])
        batch = self._ask_batch(points) if isinstance(row, Tensor) and self.workers is None else ""
        if isinstance(batch, Tensor) and isinstance(row, Tensor) and self._agrees(batch, row, points, k):
            return self._decide(True, batch)
        point = self._ask_point(points[k])
        if isinstance(point, Tensor):
            self.nfev -= len(points) - 1 if isinstance(batch, Tensor) else 0  # to f it was one point
            return self._decide(False, point)
        if isinstance(batch, Tensor):  # f compares the points of a batch with one another
            return self._decide(True, batch)
        if isinstance(row, str):
            self._refused, why = False, row
        elif self.workers is not None or len(points) == 1 or self._refused:  # twice, for an f that fails by chance
            return self._decide(True, row)
        else:
            self._refused, why = True, batch
        self._warn_once(f"{point} for a point (d,), and for a batch of one (1, d): {why}")
        return None

    def _decide(self, vectorized: bool, values: Tensor) -> Tensor:
        self.vectorized = vectorized
        self.nfev -= 0 if vectorized else self._unsure
        return values

    def _ask_point(self, x: Tensor) -> Tensor | str:
        """f at one point: as (d,), or as a batch of one (1, d)."""
        self.nfev += 1
        return self._ask_rows([x.clone()])[0]

    def _ask_batch(self, points: Tensor) -> Tensor | str:
        """f on the batch; a function of one point fails here or gives one value, in one call."""
        if len(points) == 1 or self.limit - self.nfev < len(points):
            return "the budget is too small to ask f about a batch"
        self.nfev += len(points)
        reply = read_reply(points, self._at(points.clone()))
        self._unsure += len(points) - 1 if isinstance(reply, str) else 0
        return reply

    def _agrees(self, batch: Tensor, row: Tensor, points: Tensor, k: int) -> bool:
        """True if two rows have the values that f gives for them alone, up to round-off and noise."""
        # two rows are tried, since f may relate all others to one of them, such as the row with the largest entry
        for i in (k, (k + 1) % len(points)):
            alone = row if i == k else self._ask_point(points[i : i + 1])
            if isinstance(alone, str) or is_near(batch[i], alone[0], batch):
                continue
            again = self._ask_point(points[i : i + 1])
            return isinstance(again, str) or not is_near(again[0], alone[0], batch)  # f always differs
        return True

    def _warn_once(self, what: str) -> None:
        """Remember the first failure, and warn of it."""
        if not self._first:
            self._first = what
            warnings.warn(
                f"{what}; such points count as infinitely bad, this is said once", RuntimeWarning, stacklevel=2
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there; what the caller says of f is kept."""
        said = self.vectorized
        super().load_state_dict(state)
        self.vectorized = self.vectorized if said is None else said


# What f gave, as numbers

WORDS = (str, bytes, bytearray)


def read_reply(x: Tensor, outcome: Any) -> Tensor | str:
    """What f gave at a point (d,) as (1,), or at a batch (b, d) as (b,), NaN for no number; or why it has no values."""
    if isinstance(outcome, Raised):
        return f"f raised {outcome.kind}: {outcome.message}"
    if isinstance(outcome, Exception):
        return f"the executor gave no value, but {type(outcome).__name__}: {outcome}"
    name = "f(x)" if x.dim() == 1 else "f(X)"
    if x.dim() == 1 and isinstance(outcome, tuple):
        return f"f(x) is a tuple of {len(outcome)}, expected a number"
    numbers = read_numbers(outcome)
    if numbers is None:
        return f"{name} is {type(outcome).__name__}, expected numbers, lower is better"
    if numbers.is_complex():
        return f"{name} is complex, expected real values: lower is better"
    if x.dim() == 1 and numbers.numel() != 1:
        return f"f(x) has shape {tuple(numbers.shape)} for one point, expected a number"
    alone = (x.dim() == 1 or len(x) == 1) and numbers.numel() == 1
    if not alone and numbers.shape not in ((len(x),), (len(x), 1)):
        return (
            f"f(X) has shape {tuple(numbers.shape)} for X of shape {tuple(x.shape)}, expected ({len(x)},): "
            "a value per row; pass vectorized=False if f takes one point"
        )
    return numbers.to(torch.float64, copy=True).reshape(-1).to(x.device)


def read_numbers(answer: Any) -> Tensor | None:
    """The numbers of an answer, of any shape; None if there are none."""
    if isinstance(answer, np.ndarray) and answer.dtype == object:
        answer = answer.tolist()
    if isinstance(answer, (list, tuple)):
        return torch.tensor([read_entry(entry) for entry in answer], dtype=torch.float64)
    if isinstance(answer, (int, float)):
        return torch.tensor(read_entry(answer), dtype=torch.float64)
    if answer is None or isinstance(answer, WORDS):
        return None
    try:
        return torch.as_tensor(answer).detach()
    except Exception:  # noqa: BLE001 what is no array may still be a number: a fraction, a decimal
        value = read_entry(answer)
        return None if math.isnan(value) else torch.tensor(value, dtype=torch.float64)


def read_entry(entry: Any) -> float:
    """A float, or NaN for what is no number: None, a word, a pair."""
    if isinstance(entry, WORDS):
        return math.nan
    try:
        return float(entry)
    except Exception:  # noqa: BLE001 what an object's float() raises is its own affair
        return math.nan


def is_near(value: Tensor, other: Tensor, among: Tensor) -> bool:
    """True if two values agree up to the changes by float32 and by another order of sums, or both are no number."""
    if not bool(torch.isfinite(value) & torch.isfinite(other)):
        return bool((value == other) | (value.isnan() & other.isnan()))
    finite = among[torch.isfinite(among)]
    spread = float(finite.max() - finite.min()) if len(finite) else 0.0
    return float((value - other).abs()) <= 1e-3 * spread + 1e-6 * max(float(value.abs()), float(other.abs()))
