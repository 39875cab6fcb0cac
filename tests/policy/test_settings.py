"""Settings of agents: in groups, one by one, and explained by help()."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium")
from policy_worlds import Walk

import natgrad as ng
from natgrad import policy as pg
from natgrad.policy.settings import TRPOSettings
from natgrad.policy.trpo import TRPO_GROUPS


def test_groups_and_keywords_say_the_same():
    groups = {
        "rollouts": pg.Rollouts(batch=32, gamma=0.9, seed=3),
        "natural_step": pg.NaturalStep(damping=ng.Relative(0.1), metric_batch=16),
        "critic_training": pg.CriticTraining(lr=1e-2, epochs=2, batch=8),
        "backtracking": pg.Backtracking(0.5, 4),
    }
    keywords: dict[str, Any] = {
        "batch": 32,
        "gamma": 0.9,
        "seed": 3,
        "damping": ng.Relative(0.1),
        "metric_batch": 16,
        "critic_lr": 1e-2,
        "critic_epochs": 2,
        "critic_batch": 8,
        "backtrack": 0.5,
        "backtracks": 4,
    }
    found = []
    for choices in (groups, keywords, {**groups, "rollouts": pg.Rollouts(32, 0.5)} | {"gamma": 0.9, "seed": 3}):
        agent = ng.TRPO(None, Walk(), **choices)
        agent.learn(64, progress=False)
        found.append([agent.history["kl"], agent.history["critic_loss"], agent.history["damping"]])
    assert found[0] == found[1] == found[2]


def test_a_group_of_another_kind_is_told():
    with pytest.raises(TypeError, match=r"rollouts is .*expected Rollouts\(\.\.\.\); did you forget the parentheses"):
        ng.TRPO(None, Walk(), rollouts=pg.Rollouts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="critic_training is 3"):
        ng.TRPO(None, Walk(), critic_training=3)  # type: ignore[arg-type]


def test_help_explains_every_keyword():
    text = inspect.getdoc(ng.TRPO)
    assert text is not None
    explained = re.findall(r"^    (\w+): ", text[text.index("Args:") : text.index("Raises:")], re.M)
    own = [name for name in inspect.signature(ng.TRPO).parameters if name != "settings"]
    keywords = [*TRPO_GROUPS, *(name for group in TRPO_GROUPS.values() for name in group.names())]
    assert set(explained) == {*own, *keywords}
    assert set(TRPOSettings.__annotations__) == set(keywords)


@pytest.mark.parametrize("group", [pg.Rollouts, pg.NaturalStep, pg.CriticTraining, pg.Backtracking])
def test_a_group_explains_its_fields(group: Any):
    text = inspect.getdoc(group)
    assert text is not None
    assert re.findall(r"^    (\w+): ", text[: text.index("Raises:")], re.M) == [one.name for one in fields(group)]


@pytest.mark.parametrize("kind", [ng.TRPO, ng.NaturalPolicyGradient, pg.acktr])
def test_signatures_are_short(kind: Any):
    assert len(inspect.signature(kind).parameters) <= 8


def test_acktr_is_kfac_with_the_damping_that_is_said():
    plain, damped = pg.acktr(None, Walk()), pg.acktr(None, Walk(), damping=ng.Relative(0.1))
    assert plain.structure == damped.structure == ng.Kronecker(0.95, factored=True)
    assert (plain.damping, damped.damping) == (ng.Constant(0.01), ng.Relative(0.1))
    assert isinstance(plain.natural_step.solver, ng.Direct)
    plain.learn(1024, progress=False)
    assert all(torch.isfinite(p).all() for p in plain.policy.parameters())


@pytest.mark.parametrize("per", ["metric", "block"])
def test_damping_may_be_a_share_of_the_mean_eigenvalue(per: Any):
    choices: dict[str, Any] = {"batch": 64, "critic_epochs": 0, "solver": ng.Direct()}
    policy = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    agent = ng.TRPO(policy, Walk(), structure=ng.Kronecker(0.9), damping=ng.Relative(0.1, per=per), **choices)
    agent.learn(64, progress=False)
    assert agent.failures == 0
    assert agent.history["accepted"] == [True]
    exact = ng.TRPO(policy, Walk(), damping=ng.Relative(0.1, per=per), **choices)
    exact.learn(64, progress=False)
    assert exact.history["damping"][0] > 0
    assert exact.history["cg_residual"][0] < 1e-9
