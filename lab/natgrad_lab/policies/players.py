"""Who plays in the races of policies: `ng.TRPO` and the TRPO of sb3-contrib, under one set of rules."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import natgrad as ng
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Numbers

RECENT = 20  # episodes that the training return is a mean of


Scene = Any
"""What is played and how it is judged: `env`, its name in gymnasium, `envs`, how many at once, `episodes` of a look and
`device` of the networks."""


@dataclass(frozen=True)
class PolicyChoice:
    """A setting: arguments of the contestant's own."""

    words: str
    arguments: dict[str, Any] = field(default_factory=dict)


class NatgradPlayer:
    """`ng.TRPO`."""

    def __init__(self, scene: Scene, choice: PolicyChoice, seed: int) -> None:
        gym = gymnasium()
        envs = [gym.make(scene.env) for _ in range(scene.envs)]
        self.agent = ng.TRPO(None, envs, seed=seed, **choice.arguments)
        self.batch, self.episodes = self.agent.batch, []

    @property
    def steps(self) -> int:
        """So far."""
        return self.agent.steps

    def update(self) -> None:
        """One update."""
        self.agent.learn(1, progress=False)
        assert self.agent.rollout is not None
        self.episodes = [*self.episodes, *self.agent.rollout.episodes][-RECENT:]

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Likeliest actions."""
        return self.agent.predict(observations)[0]

    def recent(self) -> float:
        """Mean return of the last training episodes; NaN before the first."""
        return float(np.mean([episode.ret for episode in self.episodes])) if self.episodes else math.nan


class Peer:
    """TRPO of sb3-contrib. `total`: steps per update; `scaled`: observations and rewards by VecNormalize."""

    def __init__(self, scene: Scene, choice: PolicyChoice, seed: int) -> None:
        from sb3_contrib import TRPO  # a peer, only where it is installed  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.vec_env import VecNormalize  # pyright: ignore[reportMissingImports]

        arguments = dict(choice.arguments)
        scaled, self.batch = arguments.pop("scaled", False), arguments.pop("total", 2048)
        envs: Any = make_vec_env(scene.env, scene.envs, seed=seed)
        self.scale: Any = VecNormalize(envs, gamma=arguments.get("gamma", 0.99)) if scaled else None
        arguments |= {"n_steps": self.batch // scene.envs, "seed": seed, "device": scene.device}
        envs = envs if self.scale is None else self.scale
        self.model: Any = TRPO("MlpPolicy", envs, stats_window_size=RECENT, **arguments)

    @property
    def steps(self) -> int:
        """So far."""
        return self.model.num_timesteps

    def update(self) -> None:
        """One update."""
        self.model.learn(self.batch, reset_num_timesteps=self.steps == 0)

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Likeliest actions."""
        seen = observations if self.scale is None else self.scale.normalize_obs(observations)
        return self.model.predict(seen, deterministic=True)[0]

    def recent(self) -> float:
        """Training return, of the rewards as they came."""
        returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        return float(np.mean(returns)) if returns else math.nan


Player = NatgradPlayer | Peer


def learn_to_marks(
    player: Player, scene: Scene, marks: Sequence[int], advance: Callable[[float], Any] = lambda share: None
) -> Iterator[Numbers]:
    """Learn, and look at the last update before each mark, of steps that rise. advance(share of the steps)."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: list[float] = []
    for mark in marks:
        while player.steps + player.batch <= mark:
            advance(player.steps / marks[-1])
            start = clock()
            player.update()
            seconds.append(clock() - start)
        returns = look(player, scene)
        yield {
            "steps": player.steps,
            "mark": mark,
            "test": float(np.mean(returns)),
            "train": player.recent(),
            "seconds": sum(seconds),
            "update": float(np.median(seconds)) if seconds else math.nan,
        }


def look(player: Player, scene: Scene) -> list[float]:
    """Returns of whole episodes without exploration, one from each of the same beginnings for everybody."""
    envs = [gymnasium().make(scene.env) for _ in range(scene.episodes)]
    observations = np.stack([env.reset(seed=10_000 + i)[0] for i, env in enumerate(envs)])
    returns, going = np.zeros(len(envs)), np.ones(len(envs), dtype=bool)
    while going.any():
        actions = player.act(observations)
        for i in np.flatnonzero(going):
            observations[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += float(reward)
            going[i] = not (terminated or truncated)
    return returns.tolist()


def gymnasium() -> Any:
    """The package. LabError where it is missing."""
    try:
        import gymnasium as package  # an extra
    except ImportError as error:
        raise LabError("these experiments need gymnasium: pip install gymnasium") from error
    return package
