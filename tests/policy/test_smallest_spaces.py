"""Spaces of every kind, above all the smallest: one action, one choice among several, a single number."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import natgrad as ng

gym = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from gymnasium.vector import SyncVectorEnv  # noqa: E402

ACTIONS = {
    "one action": spaces.Discrete(1),
    "one action from 3 on": spaces.Discrete(1, start=3),
    "one choice of one": spaces.MultiDiscrete([1]),
    "choices of one and three": spaces.MultiDiscrete([1, 3]),
    "a table of choices": spaces.MultiDiscrete(np.array([[2, 1], [1, 3]])),
    "a bit": spaces.MultiBinary(1),
    "a number": spaces.Box(-1, 1, ()),
    "a row of one": spaces.Box(-1, 1, (1,)),
    "an interval that is a point": spaces.Box(1, 1, (1,)),
}
OBSERVATIONS = {
    "a number": spaces.Box(-1, 1, ()),
    "a byte": spaces.Box(0, 255, (), np.uint8),
    "a row of one": spaces.Box(-1, 1, (1,)),
    "an image of one": spaces.Box(0, 255, (1, 1, 1), np.uint8),
    "one state": spaces.Discrete(1, start=2),
    "states of one and two": spaces.MultiDiscrete([1, 2]),
    "a bit": spaces.MultiBinary(1),
    "choices": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(4),
    "a table of bytes": spaces.Box(0, 255, (2, 3), np.uint8),
}


class World(gym.Env):
    """The reward is the sum of the observation; what comes is checked."""

    def __init__(self, observations: Any = OBSERVATIONS["a row of one"], actions: Any = spaces.Discrete(2), n: int = 9):
        self.observation_space, self.action_space, self.n = observations, actions, n

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t >= self.n, False, {}


def learn(env: Any) -> Any:
    agent = ng.TRPO(None, env, batch=16, seed=0)
    history = agent.learn(32)
    assert all(0 <= kl < 0.02 for kl in history["kl"])
    return agent


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_space_of_one_is_learnt_and_acted_in(name):
    env = World(actions=ACTIONS[name])
    agent = learn(env)
    assert env.action_space.contains(agent.predict(env.observation_space.sample())[0])
    if isinstance(env.action_space, spaces.Discrete | spaces.MultiDiscrete):
        learn(SyncVectorEnv([lambda: World(actions=ACTIONS[name])] * 2))


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_observation_space_is_learnt_and_pickled(name):
    env = World(OBSERVATIONS[name])
    agent = learn(env)
    seen = [env.observation_space.sample() for _ in range(3)]
    actions = [agent.predict(each)[0] for each in seen]
    assert actions == list(agent.predict(np.stack(seen))[0])
    assert actions == list(pickle.loads(pickle.dumps(agent)).predict(np.stack(seen))[0])
    learn(SyncVectorEnv([lambda: World(OBSERVATIONS[name])]))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (World(spaces.Box(-1, 1, (0,))), "observation space .* holds no number"),
        (World(actions=spaces.Box(-1, 1, (0,))), "action space .* holds no number"),
        (World(spaces.Dict({"a": spaces.Discrete(2)})), "observation space is Dict.*FlattenObservation"),
    ],
)
def test_spaces_of_nothing_and_of_parts_are_refused(env, words):
    with pytest.raises(ValueError, match=words):
        ng.TRPO(None, env, batch=16)
