"""Live progress of an experiment in a terminal; one line per finished piece elsewhere.

Nothing refreshes in the background: the display is redrawn between two steps, while no clock runs.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from natgrad_lab.experiments.frame import ExperimentState

REDRAW = 0.15  # seconds


class ProgressDisplay:
    """A watcher for `execute`, used as a context."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.begun = self.piece_begun = self.drawn = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, state: ExperimentState) -> None:
        now, ended = time.monotonic(), state.fraction == 1.0
        title = f"{state.piece.title}, seed {state.seed}" if state.piece.repeated else state.piece.title
        if state.fraction == 0.0:
            self.piece_begun = now
        if self.live is not None and (ended or now - self.drawn > REDRAW):
            self.drawn = now
            spent, share = now - self.piece_begun, state.fraction if state.fraction < 1 else 0.0
            left = f"piece: {share:.0%}, about {spent / share * (1 - share):.0f} s to go" if share > 0.01 else ""
            words = f"{state.done} of {state.total} pieces"
            grid = Table.grid(padding=(1, 2, 0, 0))
            bar = ProgressBar(state.total, state.done + share, width=40)
            grid.add_row(bar, words, f"{now - self.begun:.0f} s", left)
            self.live.update(Group(Text(title, style="bold"), Text(state.note), grid), refresh=True)
        elif ended and self.live is None:
            took = "read from its record" if state.seconds is None else f"{state.seconds:.1f} s"
            note = f", {state.note}" if state.note else ""
            self.console.print(Text(f"{state.done}/{state.total} {title}: {took}{note}"), soft_wrap=True)
