"""The line that tells how far a loop is."""

from __future__ import annotations

import io
import sys

import pytest

from natgrad.ground.progress import Progress, format_seconds, join_callbacks


class Stream(io.StringIO):
    """A standard error that is a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def show(monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: bool | None, total: float | None = 10) -> str:
    """What five of ten updates write when a second passes before each."""
    stream, seconds = Stream(terminal), iter(range(100))
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("natgrad.ground.progress.time.monotonic", lambda: float(next(seconds)))
    with Progress("steps", total, shown) as progress:
        for done in range(1, 6):
            progress.update(done, {"loss": 1 / done})
    return stream.getvalue()


def test_a_terminal_has_one_line_drawn_anew(monkeypatch: pytest.MonkeyPatch):
    said = show(monkeypatch, terminal=True, shown=None)
    assert said.count("\r") == 6
    assert said.endswith("5 of 10 steps |##########----------| 50 %, 0:05 left: loss 0.2\n")
    assert said.count("\n") == 1


def test_elsewhere_lines_are_written_only_on_request(monkeypatch: pytest.MonkeyPatch):
    assert show(monkeypatch, terminal=False, shown=None) == ""
    assert show(monkeypatch, terminal=True, shown=False) == ""
    said = show(monkeypatch, terminal=False, shown=True).splitlines()
    assert said == ["3 of 10 steps 30 %, 0:07 left: loss 0.3333", "5 of 10 steps 50 %, 0:05 left: loss 0.2"]


def test_a_quick_loop_writes_nothing_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    stream = Stream(True)
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("steps", 3, None) as progress:
        progress.update(1, {})
    assert stream.getvalue() == ""


def test_seconds_are_written_as_clocks_do():
    assert [format_seconds(s) for s in (0, 59.6, 61, 3600, 7384)] == ["0:00", "1:00", "1:01", "1:00:00", "2:03:04"]


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="progress is 'bar', expected True, False, or None"):
        Progress("steps", 3, "bar")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="callback is int, expected a function of the search, a list of"):
        join_callbacks([len, 3], "the search")
