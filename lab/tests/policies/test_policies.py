"""The experiments on policies in miniature: players, looks, tuning, races and the page."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from natgrad_lab.experiments import EXPERIMENTS, PieceRun, find, override
from natgrad_lab.policies import runs

pytest.importorskip("gymnasium")

from natgrad_lab.experiments import execute
from natgrad_lab.experiments.frame import findings
from natgrad_lab.figures import draw
from natgrad_lab.policies.players import NatgradPlayer, Peer, PolicyChoice, learn_to_marks, look
from natgrad_lab.policies.runs import CHOICES, PENDULUM, at, run_best, tell, try_choice

SMALL = replace(PENDULUM.settings(), steps=200, tuning=100, envs=2, marks="150", episodes=1, peers=False)
QUICK = PolicyChoice("quick", {"batch": 64, "critic_epochs": 1})


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    chosen = {"natgrad": (QUICK, PolicyChoice("other", {"batch": 100, "critic_epochs": 1})), "sb3": (QUICK, QUICK)}
    monkeypatch.setattr(runs, "CHOICES", dict.fromkeys(CHOICES, chosen))


def test_every_study_is_found_with_its_own_environment():
    names = [name for name in EXPERIMENTS if name.startswith("policy_")]
    assert [find(name).settings().env for name in names] == ["CartPole-v1", "Acrobot-v1", "Pendulum-v1"]
    assert override(PENDULUM.settings, ["marks=5,9"]).looks(7) == [5, 7]


def test_all_contestants_have_as_many_settings():
    assert {len(choices) for env in CHOICES.values() for choices in env.values()} == {3}


def test_a_player_never_acts_more_than_the_mark_says():
    player = NatgradPlayer(SMALL, QUICK, 0)
    assert math.isnan(player.recent())
    looks = list(learn_to_marks(player, SMALL, [100, 150, 300]))
    assert [look["steps"] for look in looks] == [64, 128, 256]
    assert [look["mark"] for look in looks] == [100, 150, 300]
    assert looks[0]["seconds"] < looks[2]["seconds"]


def test_looks_are_the_same_episodes_for_everybody():
    class Still:
        def act(self, observations: np.ndarray) -> np.ndarray:
            return np.zeros((len(observations), 1), dtype=np.float32)

    assert look(Still(), SMALL) == look(Still(), SMALL)
    assert -2000 < look(Still(), SMALL)[0] < 0


def test_a_study_goes_from_tuning_to_its_page(tmp_path):
    folder = execute(PENDULUM, SMALL, [0, 1], tmp_path)
    read = findings(PENDULUM, folder)
    races = read.of("race-natgrad")
    assert [len(run["curve"]) for run in races] == [2, 2]
    assert at(races[0], 200) == races[0]["curve"][-1]["test"]
    assert races[0]["curve"] != races[1]["curve"]
    story = tell(read)
    assert story.sections[0].tables[0].rows[0][0] == "ng.TRPO"
    assert "No goal's mark" in story.lead
    assert len(story.sections[1].tables[0].rows) == 2
    draw(story.sections[0].pictures[0].draw, story.sections[0].pictures[0].size)


def test_the_best_setting_races():
    tuned = {"tune-natgrad-0": {"test": -9.0, "train": None}, "tune-natgrad-1": {"test": -9.0, "train": -3.0}}
    numbers = run_best("natgrad", PieceRun(replace(SMALL, steps=100, marks="100"), 0, tuned))
    assert numbers["choice"] == "other"
    assert try_choice("natgrad", QUICK, PieceRun(SMALL))["choice"] == "quick"


def test_the_peer_plays_by_the_same_rules():
    pytest.importorskip("sb3_contrib")
    player = Peer(SMALL, PolicyChoice("zoo", {"total": 64, "batch_size": 64, "n_critic_updates": 1, "scaled": True}), 0)
    looks = list(learn_to_marks(player, SMALL, [64, 200]))
    assert [look["steps"] for look in looks] == [64, 192]
