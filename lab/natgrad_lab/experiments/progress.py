"""Live progress of a race or a study in a terminal; one line per finished run or piece elsewhere.

Nothing refreshes in the background: the display is redrawn between two steps, while no clock runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from natgrad_lab.experiments.base import Budget, Job, Race
from natgrad_lab.experiments.race import Watcher
from natgrad_lab.experiments.records import Record, Row
from natgrad_lab.experiments.study import Study, StudyState

REDRAW = 0.15  # seconds


@dataclass
class Line:
    """What is shown of one contestant on the task under way."""

    phase: str = "waiting"
    steps: int | None = None  # at the end, where steps alone end the run
    step: int = 0
    seconds: float = 0.0
    loss: float | None = None
    best: float | None = None


@singledispatch
def watching(experiment: Race | Study, console: Console) -> Any:
    """A watcher for `execute` of that kind of experiment, to be used as a context."""
    raise TypeError(f"experiment is {type(experiment).__name__}, expected a Race or a Study")


class Screen:
    """The live part of a terminal, where the console is one."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.drawn = time.monotonic()

    def __enter__(self) -> Screen:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def due(self, force: bool = False) -> bool:
        """Whether it is time to draw again."""
        return self.live is not None and (force or time.monotonic() - self.drawn > REDRAW)

    def draw(self, *parts: RenderableType) -> None:
        """Replace what is shown."""
        self.drawn = time.monotonic()
        if self.live is not None:
            self.live.update(Group(*parts), refresh=True)

    def say(self, text: str) -> None:
        """A line for a log, where nothing is live."""
        if self.live is None:
            self.console.print(Text(text), soft_wrap=True)


class RaceProgress(Watcher):
    """A watcher for `execute` of a race, used as a context."""

    def __init__(self, console: Console) -> None:
        self.screen = Screen(console)
        self.lines: dict[str, Line] = {}
        self.title, self.runs, self.done = "", 0, 0
        self.budgets: dict[str, Budget] = {}
        self.ahead = self.behind = self.seconds = 0.0  # weights: to come, done just now, of the run under way
        self.begun = time.monotonic()

    def __enter__(self) -> RaceProgress:
        self.screen.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.screen.__exit__(kind, error, trace)

    def show_plan(self, runs: Mapping[str, tuple[int, Budget]]) -> None:
        self.runs = sum(number for number, _ in runs.values())
        self.ahead = sum(number * weight(budget) for number, budget in runs.values())
        self.budgets = {task: budget for task, (_, budget) in runs.items()}
        self.begun = time.monotonic()

    def show_start(self, job: Job) -> None:
        self._turn_to(job)
        before = self.lines[job.contestant.name]
        budget = job.within(self.budgets[job.task.name])
        steps = None if budget.is_timed else budget.steps
        self.lines[job.contestant.name] = Line(_phase(job), steps, best=before.best)
        self._draw(force=True)

    def show_step(self, job: Job, row: Row) -> None:
        line = self.lines[job.contestant.name]
        line.step, line.seconds, line.loss = row["step"], row["seconds"], row.get("train_loss", line.loss)
        self._draw()

    def show_end(self, job: Job, record: Record, fresh: bool) -> None:
        self._turn_to(job)
        self.done += 1
        self.ahead -= self.seconds
        self.behind += self.seconds if fresh else 0.0
        line = self.lines[job.contestant.name]
        loss = record.rows[-1].get("train_loss")
        line.phase, line.step, line.loss = f"{_phase(job)} done", record.end["steps"], loss
        if loss is not None:
            line.best = loss if line.best is None else min(loss, line.best)
        self._say(job, record)
        self._draw(force=True)

    def _turn_to(self, job: Job) -> None:
        if self.title != job.task.title:
            self.title, self.seconds = job.task.title, weight(self.budgets[job.task.name])
            self.lines = {contestant.name: Line() for contestant in job.task.contestants}

    def _draw(self, force: bool = False) -> None:
        if self.screen.due(force):
            self.screen.draw(self._table(), self._bar(time.monotonic()))

    def _table(self) -> Table:
        table = Table(
            title=self.title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False
        )
        for head in ("", ""):
            table.add_column(head, min_width=12)
        for head in ("step", "seconds", "loss", "best"):
            table.add_column(head, justify="right", min_width=9)
        for name, line in self.lines.items():
            step, seconds = f"{line.step}", f"{line.seconds:.1f}/{self.seconds:g}"
            if line.steps is not None:
                step, seconds = f"{line.step}/{line.steps}", f"{line.seconds:.1f}"
            table.add_row(name, line.phase, step, seconds, _number(line.loss), _number(line.best))
        return table

    def _bar(self, now: float) -> Table:
        spent = now - self.begun
        left = f"about {spent / self.behind * self.ahead:.0f} s to go" if self.behind else ""
        return _bar(self.done, self.runs, f"{self.done} of {self.runs} runs", spent, left)

    def _say(self, job: Job, record: Record) -> None:
        choice = ", ".join(f"{name} {value:g}" for name, value in job.choice.items())
        loss = _number(record.rows[-1].get("train_loss"))
        text = f"{self.done}/{self.runs} {job.task.name}, {job.contestant.name} ({choice}), {_phase(job)}: "
        self.screen.say(f"{text}training loss {loss} after {record.end['steps']} steps")


def weight(budget: Budget) -> float:
    """What a run counts for in the time to go: its seconds, or 1 where steps end it."""
    return budget.seconds if budget.is_timed else 1.0


class PieceProgress:
    """A watcher for `execute` of a study, used as a context."""

    def __init__(self, console: Console) -> None:
        self.screen = Screen(console)
        self.begun = self.piece_begun = time.monotonic()

    def __enter__(self) -> PieceProgress:
        self.screen.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.screen.__exit__(kind, error, trace)

    def __call__(self, state: StudyState) -> None:
        if state.fraction == 0.0:
            self.piece_begun = time.monotonic()
        ended = state.fraction == 1.0
        if ended:
            took = "read from its record" if state.seconds is None else f"{state.seconds:.1f} s"
            self.screen.say(f"{state.done}/{state.total} {_write_title(state)}: {took}")
        if self.screen.due(force=ended):
            self.screen.draw(Text(_write_title(state), style="bold"), self._bar(state))

    def _bar(self, state: StudyState) -> Table:
        now = time.monotonic()
        spent, share = now - self.piece_begun, state.fraction if state.fraction < 1 else 0.0
        left = f"piece: {share:.0%}, about {spent / share * (1 - share):.0f} s to go" if share > 0.01 else ""
        words = f"{state.done} of {state.total} pieces"
        return _bar(state.done + share, state.total, words, now - self.begun, left)


watching.register(Race, lambda experiment, console: RaceProgress(console))
watching.register(Study, lambda experiment, console: PieceProgress(console))


def _bar(done: float, total: int, words: str, spent: float, left: str) -> Table:
    grid = Table.grid(padding=(1, 2, 0, 0))
    grid.add_row(ProgressBar(total, done, width=40), words, f"{spent:.0f} s", left)
    return grid


def _write_title(state: StudyState) -> str:
    return f"{state.piece.title}, seed {state.seed}" if state.piece.repeated else state.piece.title


def _phase(job: Job) -> str:
    size = len(job.contestant.grid)
    return f"tuning {job.index + 1}/{size}" if job.phase == "tune" else f"seed {job.seed}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
