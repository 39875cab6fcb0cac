"""How far a loop is, and who is called after its steps: the same for `learn`, `minimize`, `fit` and `run`."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from natgrad.ground.messages import show_cell

Owner = TypeVar("Owner")
Callbacks = Callable[[Owner], Any] | Sequence[Callable[[Owner], Any]]
"""What is called after each step of a loop: a function, or several in turn."""
REDRAWN, LINES, BAR = 0.2, 2.0, 20
"""Seconds between two drawings on a terminal and between two lines elsewhere, and the bar's length in characters."""


class Progress:
    """One line on the standard error: drawn anew on a terminal, and written every two seconds elsewhere."""

    def __init__(self, unit: str, total: float | None, shown: bool | None) -> None:
        if shown not in (None, True, False):
            raise TypeError(f"progress is {shown!r}, expected True, False, or None for where there is a terminal")
        self.unit = unit
        self.total = None if total is None or math.isinf(total) else int(total)
        self.drawn = sys.stderr is not None and sys.stderr.isatty()
        self.asked, self.shown = bool(shown), self.drawn if shown is None else bool(shown)
        self.began = self.wrote = time.monotonic()
        self.line, self.width = "", 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.line and self.shown and (self.asked or self.width):
            self._write("\n")

    def update(self, done: float, numbers: Mapping[str, Any]) -> None:
        """Show how far it is."""
        if not self.shown:
            return
        now = time.monotonic()
        report = ", ".join(f"{name} {show_cell(value)}" for name, value in numbers.items())
        self.line = f"{self._count(done, now - self.began)}: {report}"
        if now - self.wrote > (REDRAWN if self.drawn else LINES):
            self.wrote = now
            self._write("" if self.drawn else "\n")
            self.line = self.line if self.drawn else ""

    def _count(self, done: float, seconds: float) -> str:
        """How many of how many, a bar, and the time that is left at this pace."""
        if self.total is None:
            return f"{done:,} {self.unit}, {format_seconds(seconds)}"
        share = min(1.0, done / max(1, self.total))
        left = format_seconds(seconds * (1 - share) / share) if share > 0 else "?"
        full = round(BAR * share)
        bar = f" |{'#' * full}{'-' * (BAR - full)}|" if self.drawn else ""
        return f"{done:,} of {self.total:,} {self.unit}{bar} {100 * share:.0f} %, {left} left"

    def _write(self, end: str) -> None:
        line = self.line
        if self.drawn:
            line = line[: shutil.get_terminal_size().columns - 1]
            line, self.width = "\r" + line.ljust(self.width), len(line)
        sys.stderr.write(line + end)
        sys.stderr.flush()


def format_seconds(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def run_steps(
    step: Callable[[], Mapping[str, Any]], unit: str, total: int, shown: bool | None, ends: Callable[[], bool]
) -> None:
    """Call a step so often, show what it returns, and end where `ends()` says so, or with Ctrl-C.

    A step is to be taken whole or not at all.
    """
    with Progress(unit, total, shown) as line, suppress(KeyboardInterrupt):
        for done in range(1, total + 1):
            line.update(done, step())
            if ends():
                break


def join_callbacks(callback: Any, of: str) -> Callable[[Any], bool]:
    """One function that calls all, in turn, and says whether one of them returned True; None calls nothing.

    TypeError for what is neither a function nor a list of them.
    """
    several = isinstance(callback, (list, tuple))
    callbacks: list[Any] = list(callback) if several else [] if callback is None else [callback]
    for each in callbacks:
        if not callable(each):
            raise TypeError(
                f"callback is {type(each).__name__}, expected a function of {of}, a list of such functions, or None"
            )
    return lambda owner: True in [each(owner) is True for each in callbacks]
