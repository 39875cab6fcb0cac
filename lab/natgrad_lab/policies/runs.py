"""TRPO on CartPole-v1, Acrobot-v1 and Pendulum-v1, beside the TRPO of sb3-contrib where that is installed.

Every contestant has the same number of settings; each is tried from a seed of its own for `tuning` steps and judged by
its last deterministic evaluation, and the best runs from every seed. All act in the same number of environments, with
two tanh layers of 64 for the policy and as many for the critic, and are looked at by the same episodes.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import natgrad as ng
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.settings import change_defaults
from natgrad_lab.experiments.study import Numbers, Piece, Study, StudyRun
from natgrad_lab.policies import page

TUNING_SEED = 1000
RECENT = 20
"""Episodes that the training return is a mean of."""


@dataclass(frozen=True)
class PolicyRaceSettings:
    """What `--set` can change."""

    env: str = "CartPole-v1"  # of gymnasium
    steps: int = 100_000  # of all environments together
    tuning: int = 30_000  # steps of a tuning run
    envs: int = 8  # that a contestant acts in at once
    marks: str = "10000,20000,30000,45000,60000,80000,100000"  # steps at which the policy is evaluated, comma-separated
    episodes: int = 20  # of an evaluation
    peers: bool = True  # run sb3-contrib's agents too, where it is installed
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.env not in CHOICES:
            raise LabError(f"env is {self.env}, expected one of {', '.join(CHOICES)}")
        for key in ("steps", "tuning", "envs", "episodes"):
            if getattr(self, key) < 1:
                raise LabError(f"{key} is {getattr(self, key)}, expected a number of at least 1")
        self.looks(self.steps)

    def looks(self, steps: int) -> list[int]:
        """The marks up to `steps`, which is the last. LabError for marks that are no numbers."""
        try:
            found = sorted({int(part) for part in self.marks.split(",")})
        except ValueError as error:
            raise LabError(f"marks is {self.marks}, expected numbers of steps such as 30000,100000") from error
        return [mark for mark in found if 0 < mark < steps] + [steps]


@dataclass(frozen=True)
class PolicyChoice:
    """A setting: arguments of the contestant's own."""

    words: str
    arguments: dict[str, Any] = field(default_factory=dict)


class Player(Protocol):
    """A contestant at work."""

    @property
    def batch(self) -> int:
        """Steps per update."""
        ...

    @property
    def steps(self) -> int:
        """So far."""
        ...

    def update(self) -> None:
        """Collect a batch and learn from it."""

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Actions without exploration, as the environment takes them."""
        ...

    def recent(self) -> float:
        """Mean return of the last training episodes; NaN before the first."""
        ...


class NatgradPlayer:
    """`ng.TRPO`."""

    def __init__(self, settings: PolicyRaceSettings, choice: PolicyChoice, seed: int) -> None:
        gym = gymnasium()
        envs = [gym.make(settings.env) for _ in range(settings.envs)]
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
        return self.agent.predict(observations)

    def recent(self) -> float:
        """Training return."""
        return float(np.mean([one.ret for one in self.episodes])) if self.episodes else math.nan


class Peer:
    """TRPO of sb3-contrib. `total`: steps per update; `scaled`: observations and rewards by VecNormalize."""

    def __init__(self, settings: PolicyRaceSettings, choice: PolicyChoice, seed: int) -> None:
        from sb3_contrib import TRPO  # a peer, only where it is installed  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
        from stable_baselines3.common.vec_env import VecNormalize  # pyright: ignore[reportMissingImports]

        arguments = dict(choice.arguments)
        scaled, self.batch = arguments.pop("scaled", False), arguments.pop("total", 2048)
        envs: Any = make_vec_env(settings.env, settings.envs, seed=seed)
        self.scale: Any = VecNormalize(envs, gamma=arguments.get("gamma", 0.99)) if scaled else None
        self.model: Any = TRPO(
            "MlpPolicy",
            envs if self.scale is None else self.scale,
            n_steps=self.batch // settings.envs,
            seed=seed,
            device=settings.device,
            stats_window_size=RECENT,
            **arguments,
        )

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
        found = [one["r"] for one in self.model.ep_info_buffer or ()]
        return float(np.mean(found)) if found else math.nan


@dataclass(frozen=True)
class PolicyContestant:
    """A method: build(settings, choice, seed)."""

    name: str
    title: str
    build: Callable[[PolicyRaceSettings, PolicyChoice, int], Player]
    peer: bool = False


CONTESTANTS = (
    PolicyContestant("natgrad", "ng.TRPO", NatgradPlayer),
    PolicyContestant("sb3", "TRPO of sb3-contrib", Peer, peer=True),
)

# of the package's own collection of tuned settings, rl-baselines3-zoo, in as many environments as the others have
ZOO: dict[str, Any] = {"cg_damping": 1e-3, "gae_lambda": 0.98, "batch_size": 512, "n_critic_updates": 20}
PLAIN = {
    "natgrad": (
        PolicyChoice("defaults, batch 1024", {"batch": 1024}),
        PolicyChoice("batch 1024, radius .02", {"batch": 1024, "radius": 0.02}),
        PolicyChoice("batch 512", {"batch": 512}),
    ),
    "sb3": (
        PolicyChoice("defaults"),
        PolicyChoice("zoo", {"total": 1024, **ZOO}),
        PolicyChoice("zoo, VecNormalize", {"total": 1024, "scaled": True, **ZOO}),
    ),
}
SWING: dict[str, Any] = {"total": 2048, "gamma": 0.9, **ZOO, "n_critic_updates": 15}
SWINGING = {
    "natgrad": (
        PolicyChoice("batch 1024, gamma .9", {"batch": 1024, "gamma": 0.9}),
        PolicyChoice("batch 1024, gamma .9, radius .02", {"batch": 1024, "gamma": 0.9, "radius": 0.02}),
        PolicyChoice("batch 2048, gamma .9, radius .02", {"batch": 2048, "gamma": 0.9, "radius": 0.02}),
    ),
    "sb3": (
        PolicyChoice("defaults"),
        PolicyChoice("zoo", {**SWING, "use_sde": True, "sde_sample_freq": 4}),
        PolicyChoice("zoo without gSDE, VecNormalize", {**SWING, "scaled": True}),
    ),
}
ROLLING = {
    "natgrad": tuple(
        PolicyChoice(f"batch {size}, lambda .98", {"batch": size, "gae_lambda": 0.98}) for size in (1024, 512, 256)
    ),
    "sb3": (
        *PLAIN["sb3"][1:],
        PolicyChoice("zoo, VecNormalize, batch 256", {"total": 256, "scaled": True, **ZOO, "batch_size": 256}),
    ),
}
CHOICES: dict[str, dict[str, tuple[PolicyChoice, ...]]] = {
    "CartPole-v1": PLAIN,
    "Acrobot-v1": ROLLING,
    "Pendulum-v1": SWINGING,
}


def contestants(settings: PolicyRaceSettings) -> list[PolicyContestant]:
    """Those that can run: peers where they are installed."""
    there = settings.peers and importlib.util.find_spec("sb3_contrib") is not None
    return [one for one in CONTESTANTS if there or not one.peer]


def pieces(settings: PolicyRaceSettings) -> tuple[Piece, ...]:
    """Tuning runs of every contestant, then the races."""
    found, able = [], contestants(settings)
    for one in able:
        for i, choice in enumerate(CHOICES[settings.env][one.name]):
            title = f"{one.title}, {choice.words}"
            found.append(Piece(f"tune-{one.name}-{i}", title, PolicyTuning(one, choice), repeated=False))
    found += [Piece(f"race-{one.name}", f"{one.title} with its best setting", PolicyRace(one)) for one in able]
    return tuple(found)


@dataclass(frozen=True)
class PolicyTuning:
    """One setting of one contestant, judged by its last look."""

    contestant: PolicyContestant
    choice: PolicyChoice

    def __call__(self, run: StudyRun) -> Numbers:
        player = self.contestant.build(run.settings, self.choice, TUNING_SEED)
        *_, last = learn_to_marks(player, run, [run.settings.tuning])
        return {"choice": self.choice.words, **last}


@dataclass(frozen=True)
class PolicyRace:
    """The best setting of one contestant from one seed."""

    contestant: PolicyContestant

    def __call__(self, run: StudyRun) -> Numbers:
        choices = CHOICES[run.settings.env][self.contestant.name]
        tuned = [run.earlier[f"tune-{self.contestant.name}-{i}"] for i in range(len(choices))]
        best = max(range(len(tuned)), key=lambda i: judge_tuning_run(tuned[i]))
        player = self.contestant.build(run.settings, choices[best], run.seed)
        curve = list(learn_to_marks(player, run, run.settings.looks(run.settings.steps)))
        return {"choice": choices[best].words, "batch": player.batch, "curve": curve}


def judge_tuning_run(tuned: Numbers) -> float:
    """What a tuning run is worth: its last look, and the training return where looks are equal."""
    test, train = (-math.inf if tuned[key] is None else tuned[key] for key in ("test", "train"))
    return test + 1e-3 * max(train, -1e6)


def learn_to_marks(player: Player, run: StudyRun, marks: list[int]) -> Iterator[Numbers]:
    """Learn, and look at the last update before each mark: no more steps are taken than the mark says."""
    seconds, updates = [], 0
    for mark in marks:
        while player.steps + player.batch <= mark:
            run.advance(player.steps / marks[-1])
            start = time.perf_counter()
            player.update()
            seconds.append(time.perf_counter() - start)
            updates += 1
        returns = look(player, run.settings)
        yield {
            "steps": player.steps,
            "mark": mark,
            "test": float(np.mean(returns)),
            "train": player.recent(),
            "seconds": sum(seconds),
            "update": float(np.median(seconds)) if seconds else math.nan,
        }


def look(player: Player, settings: PolicyRaceSettings) -> list[float]:
    """Returns of whole episodes without exploration, one from each of the same beginnings for everybody."""
    envs = [gymnasium().make(settings.env) for _ in range(settings.episodes)]
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
        import gymnasium as found  # an extra
    except ImportError as error:
        raise LabError("these experiments need gymnasium: pip install gymnasium") from error
    return found


def study(name: str, env: str, summary: str, **defaults: Any) -> Study:
    """The study of one environment: the settings' defaults are its own."""
    kind = change_defaults(PolicyRaceSettings, env=env, **defaults)
    return Study(f"policy_{name}", summary, kind, pieces, page.tell, seeds=5)


CARTPOLE = study("cartpole", "CartPole-v1", "TRPO on CartPole-v1 beside sb3-contrib's")
# thirty thousand steps are too early to choose by: what is at -100 then may end no better
ACROBOT = study("acrobot", "Acrobot-v1", "TRPO on Acrobot-v1 beside sb3-contrib's", tuning=100_000)
PENDULUM = study("pendulum", "Pendulum-v1", "TRPO on Pendulum-v1 beside sb3-contrib's")
