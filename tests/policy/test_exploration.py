"""How widely real actions are explored at first."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("gymnasium")
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from torch import nn

import natgrad as ng
from natgrad import policy as pg
from natgrad.policy.learner import SHARE


class Beam(gym.Env):
    """A beam that falls sooner the larger the actions are; or one that does not care. Ends by itself or by time."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, careful: bool, falls: bool = True, bound: float = 3.0) -> None:
        self.careful, self.falls = careful, falls
        self.action_space = spaces.Box(-bound, bound, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self.left = 20.0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any):
        self.left -= 1 + float(np.abs(action).sum()) if self.careful else 2.0
        over = self.left <= 0
        return np.zeros(2, np.float32), 1.0, over and self.falls, over and not self.falls, {}


def agent_of(env: Any, policy: Any = None, **choices: Any) -> Any:
    return ng.TRPO(policy, env, **{"batch": 200, "critic_epochs": 0, "seed": 0} | choices)


@pytest.mark.parametrize(
    ("careful", "falls", "expected"),
    [(True, True, [SHARE, SHARE, SHARE]), (False, True, [SHARE, 1.0, 1.0]), (True, False, [1.0, 1.0, 1.0])],
)
def test_a_third_of_the_width_is_tried_and_kept_where_episodes_last_longer(careful: bool, falls: bool, expected: Any):
    agent, found = agent_of(Beam(careful, falls)), []
    agent.learn(600, lambda one: found.append(one.head.share), progress=False)
    assert found == expected
    assert agent.actor.head is agent.head


def test_what_a_user_chose_is_not_touched():
    own = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    for agent in (
        agent_of(Beam(True), own),
        agent_of(Beam(True), head=pg.GaussianHead()),
        agent_of(Beam(True), head=pg.SquashedGaussianHead()),
    ):
        agent.learn(400, progress=False)
        assert agent.head.share == 1.0


def test_the_width_goes_on_from_a_checkpoint(tmp_path: Any):
    whole, part = agent_of(Beam(True)), agent_of(Beam(True))
    whole.learn(600, progress=False)
    part.learn(200, progress=False)
    part.save(tmp_path / "agent.pt")
    resumed = agent_of(Beam(True)).load(tmp_path / "agent.pt")
    assert resumed.head.share == part.head.share == SHARE
    assert resumed.actor.head is resumed.head
    resumed.learn(200 * 2, progress=False)
    assert resumed.history["return"] == whole.history["return"]
