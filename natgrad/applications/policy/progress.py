"""How far `learn` is: a bar where rich is installed, a line per few seconds where it is not."""

from __future__ import annotations

import sys
import time
from typing import Any

SHOWN = {"return": "return", "KL": "kl", "entropy": "entropy"}


class Progress:
    """Shown on the standard error.

    Args:
        total: Steps that `learn` was asked for.
        shown: True to show it, False not to; None to show it where the standard error is a terminal.
    """

    def __init__(self, total: int, shown: bool | None) -> None:
        self.total, self.done = total, 0
        self.bar: Any = None
        self.shown = sys.stderr.isatty() if shown is None else shown
        self.said = time.monotonic()

    def __enter__(self) -> Progress:
        if self.shown:
            self.bar = make_rich_bar()
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total)
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, steps: int, row: dict[str, Any]) -> None:
        """So many steps more, with an update's numbers."""
        self.done += steps
        if not self.shown:
            return
        words = ", ".join(f"{name} {format_number(row[key])}" for name, key in SHOWN.items())
        if self.bar is not None:
            self.bar.update(self.task, completed=min(self.done, self.total), description=words)
        elif time.monotonic() - self.said > 2 or self.done >= self.total:
            self.said = time.monotonic()
            sys.stderr.write(f"{self.done} of {self.total} steps: {words}\n")


def format_number(value: float | None) -> str:
    """Three digits, or a dash."""
    return "-" if value is None else f"{value:.3g}"


def make_rich_bar() -> Any | None:
    """A progress bar of rich's on the standard error, or None without rich."""
    try:
        from rich.console import Console  # an extra
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, console=Console(stderr=True))
