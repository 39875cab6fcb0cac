"""TRPO on CartPole-v1, Acrobot-v1 and Pendulum-v1, beside the TRPO of sb3-contrib where that is installed.

Every contestant has the same number of settings; each is tried from a seed of its own for `tuning` steps and judged by
its last deterministic evaluation, and the best runs from every seed. All act in the same number of environments, with
two tanh layers of 64 for the policy and as many for the critic, and are looked at by the same episodes.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Numbers, Piece, PieceRun
from natgrad_lab.experiments.settings import change_defaults
from natgrad_lab.policies import page
from natgrad_lab.policies.players import NatgradPlayer, Peer, Player, PolicyChoice, learn_to_marks

TUNING_SEED = 1000


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

    def __call__(self, run: PieceRun) -> Numbers:
        player = self.contestant.build(run.settings, self.choice, TUNING_SEED)
        *_, last = learn_to_marks(player, run.settings, [run.settings.tuning], run.advance)
        return {"choice": self.choice.words, **last}


@dataclass(frozen=True)
class PolicyRace:
    """The best setting of one contestant from one seed."""

    contestant: PolicyContestant

    def __call__(self, run: PieceRun) -> Numbers:
        choices = CHOICES[run.settings.env][self.contestant.name]
        tuned = [run.earlier[f"tune-{self.contestant.name}-{i}"] for i in range(len(choices))]
        best = max(range(len(tuned)), key=lambda i: judge_tuning_run(tuned[i]))
        player = self.contestant.build(run.settings, choices[best], run.seed)
        curve = list(learn_to_marks(player, run.settings, run.settings.looks(run.settings.steps), run.advance))
        return {"choice": choices[best].words, "batch": player.batch, "curve": curve}


def judge_tuning_run(tuned: Numbers) -> float:
    """What a tuning run is worth: its last look, and the training return where looks are equal."""
    test, train = (-math.inf if tuned[key] is None else tuned[key] for key in ("test", "train"))
    return test + 1e-3 * max(train, -1e6)


def study(name: str, env: str, summary: str, minutes: float, **defaults: Any) -> Experiment:
    """The study of one environment: the settings' defaults are its own."""
    kind = change_defaults(PolicyRaceSettings, env=env, **defaults)
    quick = {"seeds": 1, "steps": 15_000, "tuning": 5000, "marks": "5000,10000", "episodes": 5}
    return Experiment(f"policy_{name}", summary, kind, pieces, page.tell, seeds=5, minutes=minutes, quick=quick)


CARTPOLE = study("cartpole", "CartPole-v1", "TRPO on CartPole-v1 beside sb3-contrib's", 20)
# thirty thousand steps are too early to choose by: what is at -100 then may end no better
ACROBOT = study("acrobot", "Acrobot-v1", "TRPO on Acrobot-v1 beside sb3-contrib's", 30, tuning=100_000)
PENDULUM = study("pendulum", "Pendulum-v1", "TRPO on Pendulum-v1 beside sb3-contrib's", 20)
