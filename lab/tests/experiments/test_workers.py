"""Pieces side by side: the same records, failures that come to light, and an end when asked."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from natgrad_lab.experiments import Experiment, Interrupted, Piece, Section, Story, execute
from natgrad_lab.experiments.frame import beside, findings


@dataclass(frozen=True)
class Settings:
    processes: int = 2
    broken: bool = False
    threads: int | None = 1
    device: str = "cpu"


def square(run):
    run.advance(0.5)
    if run.settings.broken:
        raise ValueError("no square today")
    return {"value": run.seed**2}


def total(run):
    return {"value": run.earlier["square"]["value"] + run.earlier["cube"]["value"]}


def pieces(settings):
    return (
        Piece("square", "Square", square, independent=True),
        Piece("cube", "Cube", lambda run: {"value": run.seed**3}, independent=True),
        Piece("total", "Both", total),
    )


def tell(findings):
    return Story("Powers", "", "", (Section("Powers", str(len(findings.finished))),))


STUDY = Experiment("powers", "Powers", Settings, pieces, tell)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_numbers_do_not_depend_on_the_processes(tmp_path, processes):
    seen = []
    folder = execute(STUDY, Settings(processes), [2, 3, 5], tmp_path, seen.append)
    read = findings(STUDY, folder)
    assert [numbers["value"] for numbers in read.of("square")] == [4, 9, 25]
    assert [numbers["value"] for numbers in read.of("total")] == [12, 36, 150]
    assert seen[-1].done == seen[-1].total == 9


def test_a_process_is_no_fork_of_this_one(tmp_path, monkeypatch):
    """As on Windows: the work is sent, closures and all; the folder and the environment are those of today."""
    place, words = tmp_path / "found", []
    offset = 5

    def work(tell):
        tell(0.5)
        (tmp_path / "imported").write_text(str("test_workers_marker" in sys.modules))
        Path("found").write_text(f"{2 + offset} {os.environ['NATGRAD_TOLD']}")

    monkeypatch.setitem(sys.modules, "test_workers_marker", sys)
    monkeypatch.setenv("NATGRAD_TOLD", "today")
    monkeypatch.chdir(tmp_path)
    beside({"seven": work}, 2, lambda name, fraction: words.append(name), lambda: False)
    assert place.read_text() == "7 today"
    assert (tmp_path / "imported").read_text() == "False"


def test_a_stop_ends_a_process_that_is_at_work(tmp_path):
    def work(tell):
        tell(0.5)
        (tmp_path / "begun").touch()
        time.sleep(60)
        (tmp_path / "ended").touch()

    start, children = time.monotonic(), set(multiprocessing.active_children())  # other tests' servers stay alive
    begun = tmp_path / "begun"
    beside({"long": work}, 2, lambda name, fraction: None, begun.exists)
    assert time.monotonic() - start < 50
    assert not (tmp_path / "ended").exists()
    assert set(multiprocessing.active_children()) <= children


def test_a_failure_comes_to_light(tmp_path):
    with pytest.raises(ValueError, match="no square today"):
        execute(STUDY, Settings(broken=True), [2], tmp_path)


def test_a_stop_ends_the_processes_and_keeps_what_is_finished(tmp_path):
    with pytest.raises(Interrupted):
        execute(STUDY, Settings(), [2], tmp_path, stopped=lambda: True)
    folder = execute(STUDY, Settings(), [2], tmp_path)
    assert [numbers["value"] for numbers in findings(STUDY, folder).of("total")] == [12]
