"""The experiments on ground states in miniature: contestants, tuning and the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from natgrad_lab.experiments import EXPERIMENTS, PieceRun, execute, find
from natgrad_lab.experiments.frame import findings
from natgrad_lab.quantum.runs import HELIUM, ISING, SYSTEMS, gap, reconfigure, tell
from natgrad_lab.report import draw_titled

SMALL = replace(ISING.settings(), spins=4, samples=50, steps=5, rates="0.01,0.05")


def test_every_study_is_found_with_its_own_system():
    names = [name for name in EXPERIMENTS if name.startswith("vmc_")]
    assert [find(name).settings().system for name in names] == ["ising", "helium"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_start_alike(name):
    task, other = (SYSTEMS[name](replace(SMALL, system=name), seed=3) for _ in range(2))
    for a, b in zip(task.psi.parameters(), other.psi.parameters(), strict=True):
        assert bool((a == b).all())


def test_a_study_goes_from_tuning_to_its_page(tmp_path):
    read = findings(ISING, execute(ISING, SMALL, [0, 1], tmp_path))
    for name in ("sr", "spring", "adam"):
        runs = read.of(name)
        assert [run["steps"] for run in runs] == [SMALL.steps] * 2
        assert runs[0]["curve"] != runs[1]["curve"]
        assert all(gap(run) > 0 and run["error"] == 0 for run in runs)  # enumerated, and variational
    story = tell(read)
    race, rates = story.sections
    assert [row[0] for row in race.tables[0].rows] == ["stochastic reconfiguration", "SPRING", "Adam"]
    assert [row[0] for row in rates.tables[0].rows] == ["0.01", "0.05"]
    for picture in race.pictures:
        draw_titled(picture, story.title)


def test_an_atom_has_an_error_at_the_end():
    numbers = reconfigure(0.9, PieceRun(replace(HELIUM.settings(), samples=20, steps=2, draws=2)))
    assert numbers["error"] > 0
    assert numbers["steps"] == 2
    assert -3.5 < numbers["final"] < 0
