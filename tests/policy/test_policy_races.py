"""The benchmark of policies: runs are kept, rows tell what to install, both sides play by one set of rules."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("natgrad_lab")

from benchmarks import kept_results, policy_races
from benchmarks.policy_races import MISSING, PLAYERS, TASKS, ZOO, PolicyTask, figures, write_looks
from natgrad_lab.policies.players import PolicyChoice

QUICK = PolicyChoice("quick", {"batch": 64, "critic_epochs": 1})
PEER = PolicyChoice("quick", ZOO | {"total": 64, "batch_size": 32, "cg_max_steps": 2, "n_critic_updates": 1})
SMALL = PolicyTask("Pendulum-v1", {"ng.TRPO": QUICK, "sb3-contrib": PEER}, episodes=1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(policy_races, "KNOWN", tmp_path / "known" / "policies.json")
    monkeypatch.setattr(policy_races, "MARKS", (100,))
    monkeypatch.setattr(policy_races, "TASKS", {"small": SMALL})
    monkeypatch.setattr(policy_races, "find_spec", lambda name: name)


def test_a_finished_run_is_not_made_again(monkeypatch: pytest.MonkeyPatch):
    rows = list(figures(range(2), (), ("ng.TRPO",), 200))
    assert [row[0] for row in rows] == [f"Pendulum-v1, ng.TRPO, quick, {steps} steps" for steps in (100, 200)]
    kept = json.loads(policy_races.KNOWN.read_text())
    assert [[look["steps"] for look in looks] for looks in kept.values()] == [[64, 192]] * 2
    monkeypatch.setitem(PLAYERS, "ng.TRPO", None)
    assert list(figures(range(2), (), ("ng.TRPO",), 200)) == rows


def test_the_other_side_plays_the_same_task():
    pytest.importorskip("sb3_contrib")
    (row,) = figures(range(1), ("small",), ("sb3-contrib",), 100)
    assert row[0] == "Pendulum-v1, sb3-contrib, quick, 100 steps"


def test_what_lacks_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_races, "find_spec", lambda name: name if name == "mujoco" else None)
    assert [row[1] for row in figures(range(1), (), ("sb3-contrib",), 100)] == [MISSING["sb3_contrib"]]
    monkeypatch.setattr(policy_races, "find_spec", lambda name: None)
    assert [row[1] for row in figures(range(1), (), (), 100)] == [MISSING["mujoco"]]


def test_unknown_tasks_and_methods_are_named():
    with pytest.raises(SystemExit, match="tasks walk: expected some of small"):
        list(figures(range(1), ("walk",), (), 100))
    with pytest.raises(SystemExit, match="methods PPO"):
        list(figures(range(1), (), ("PPO",), 100))


def test_a_row_has_mean_spread_extremes_and_seconds():
    looks = [{"test": float(x), "train": 2.0, "seconds": 1.0} for x in (1, 3)]
    assert write_looks("a", looks) == ("a", "2 ± 1", "1 to 3", "2 ± 0", "1.0")
    assert write_looks("a", looks[:1])[1] == "1"


def test_every_task_has_a_setting_of_each_side():
    assert all(task.choices.keys() == PLAYERS.keys() for task in TASKS.values())


def test_results_of_two_processes_at_once_are_both_kept(tmp_path):
    file = tmp_path / "known.json"
    inner = lambda: kept_results.keep_result(file, "other", lambda: 1)  # noqa: E731
    assert kept_results.keep_result(file, "one", lambda: inner() + 1) == 2
    assert json.loads(file.read_text()) == {"other": 1, "one": 2}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["known.json"]
