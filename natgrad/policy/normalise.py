"""Running means and variances of observations and returns."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch

from natgrad.ground.messages import write_choices

Array = np.ndarray


class RunningMoments:
    """Mean and variance (population's) of all rows seen, entry by entry: those of numpy over the whole, in float64.

    Args:
        shape: Of one row.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean, self.var = np.zeros(shape), np.ones(shape)

    def __repr__(self) -> str:
        return write_choices(self, shape=self.mean.shape, count=self.count)

    def update(self, rows: Array) -> None:
        """Take in rows; exact for batches of any size.

        Args:
            rows: An array (b, *shape).

        Reference:
            Chan, Golub & LeVeque 1979.
        """
        if not len(rows):
            return
        size = len(rows)
        mean = np.add.reduce(rows, 0) / size  # `mean` and `sum` of an array take longer than to add up a few rows
        shift, total, away = mean - self.mean, self.count + size, rows - mean
        squares = (self.var * self.count if self.count else 0.0) + np.add.reduce(away * away, 0)
        squares = squares + shift**2 * (self.count * size / total)
        self.mean, self.var, self.count = self.mean + shift * (size / total), squares / total, total

    @property
    def std(self) -> Array:
        """Standard deviation, kept off zero; 1 where fewer than two rows were seen."""
        return np.sqrt(self.var + 1e-8) if self.count > 1 else np.ones_like(self.var)

    def state_dict(self) -> dict[str, Any]:
        """What changes, as tensors."""
        return {"count": self.count, "mean": torch.tensor(self.mean), "var": torch.tensor(self.var)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: For moments of another shape.
        """
        if tuple(state["mean"].shape) != self.mean.shape:
            raise ValueError(
                f"the saved moments have shape {tuple(state['mean'].shape)}, expected {self.mean.shape}: was it saved "
                "with another environment?"
            )
        self.count, self.mean, self.var = state["count"], state["mean"].numpy().copy(), state["var"].numpy().copy()


Join = Callable[[RunningMoments, RunningMoments], RunningMoments]


class ObservationScale:
    """(observation - mean) / std, cut at +-10; the identity where it is off."""

    def __init__(self, shape: tuple[int, ...], on: bool) -> None:
        self.on, self.moments = on, RunningMoments(shape)

    def learn(self, observations: Array) -> None:
        """Take observations (b, *shape) into the running moments."""
        if self.on:
            self.moments.update(observations)

    def __call__(self, observations: Array) -> Array:
        """(b, *shape) -> (b, *shape). Learns nothing."""
        if not self.on or not self.moments.count:
            return observations
        return np.minimum(np.maximum((observations - self.moments.mean) / self.moments.std, -10.0), 10.0)


class RewardScale:
    """Rewards over the standard deviation of the discounted return so far, sign kept, cut at +-10."""

    def __init__(self, count: int, gamma: float, on: bool, join: Join | None = None) -> None:
        self.on, self.gamma, self.join = on, gamma, join
        self.moments, self.running = RunningMoments(()), np.zeros(count)

    def __call__(self, rewards: Array, ended: Array, valid: Array) -> Array:
        """(steps, n) -> (steps, n): takes the batch in, then scales it as one."""
        if not self.on:
            return rewards
        seen = np.empty_like(rewards)
        for t in range(len(rewards)):
            self.running = np.where(valid[t], self.gamma * self.running + rewards[t], self.running)
            seen[t] = self.running
            self.running = np.where(ended[t], 0.0, self.running)
        before = copy(self.moments)
        self.moments.update(seen[valid])
        if self.join is not None:
            self.moments = self.join(before, self.moments)
        return np.clip(rewards / self.moments.std, -10.0, 10.0)

    def state_dict(self) -> dict[str, Any]:
        """What changes, as tensors."""
        return {"moments": self.moments.state_dict(), "running": torch.tensor(self.running)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; running returns of another number of environments begin anew."""
        self.moments.load_state_dict(state["moments"])
        running = state["running"].numpy().copy()
        self.running = running if running.shape == self.running.shape else np.zeros_like(self.running)
