"""Tiny environments whose answers are known, for the tests of policies."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import natgrad as ng


def small(env: Any = None, policy: Any = None, kind: Any = ng.TRPO, **choices: Any) -> Any:
    """An agent with small batches."""
    settings = {"batch": 64, "critic_epochs": 2, "seed": 0} | choices
    return kind(policy, Walk() if env is None else env, **settings)


class Bandit(gym.Env):
    """One step, reward 1 for the last arm and 0 for the others."""

    def __init__(self, arms: int = 3) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(arms)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        return np.array([1, 0], dtype=np.float32), {}

    def step(self, action):
        return np.array([1, 0], dtype=np.float32), float(action == self.action_space.n - 1), True, False, {}


class Corridor(gym.Env):
    """Cells 0 .. size - 1 from the middle; right is action 1. The right end ends it with reward 1, the left with 0."""

    def __init__(self, size: int = 5, limit: int | None = None) -> None:
        self.size, self.limit = size, limit
        self.observation_space = spaces.Discrete(size)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.place, self.time = self.size // 2, 0
        return self.place, {}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        self.time += 1
        ended = self.place in (0, self.size - 1)
        late = self.limit is not None and self.time >= self.limit
        return self.place, float(self.place == self.size - 1), ended, late and not ended, {}


class Walk(gym.Env):
    """A noisy point on a line, pulled to the origin; reward -x^2, no end of its own. One number seen, one done.

    fault: what happens at step `at`, counted over all episodes: "raise", "nan", "reward" or "shape".
    """

    def __init__(self, end: int | None = 20, fault: str = "", at: int = 50, action: Any = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if action is None else action
        self.end, self.fault, self.at, self.total = end, fault, at, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.x, self.time = self.np_random.normal(), 0
        return self._encode(), {}

    def step(self, action):
        self.time += 1
        self.total += 1
        pushed = float(np.sum(action))
        self.x = 0.9 * self.x + 0.3 * pushed + 0.1 * self.np_random.normal()
        reward = -float(self.x**2)
        if self.total == self.at:
            if self.fault == "raise":
                raise OSError("the simulator is gone")
            reward = np.nan if self.fault == "reward" else reward
        return self._encode(), reward, False, self.end is not None and self.time >= self.end, {}

    def _encode(self):
        if self.time and self.total == self.at and self.fault == "nan":
            return np.array([np.nan, 0], dtype=np.float32)
        if self.time and self.total == self.at and self.fault == "shape":
            return np.zeros(3, dtype=np.float32)
        return np.array([self.x, self.time / 20], dtype=np.float32)


class Clock(gym.Env):
    """Counts its steps; the observation is (episode, step), so that every transition says where it comes from."""

    def __init__(self, lengths: tuple[int, ...] = (3, 5, 2), truncates: bool = False) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Discrete(2)
        self.lengths, self.truncates, self.episode = lengths, truncates, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        self.time += 1
        over = self.time >= self.lengths[self.episode % len(self.lengths)]
        seen = np.array([self.episode, float(self.time)])
        return seen, 1.0 + self.time, over and not self.truncates, over and self.truncates, {}
