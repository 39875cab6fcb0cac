"""Settings of agents: in groups, one by one, and explained by help()."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium")
from policy_worlds import Walk

import natgrad as ng
from natgrad import policy as pg


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
