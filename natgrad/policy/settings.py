"""What can be set of a policy's training, in groups: the rollouts, the natural step, the critic, the backtracking."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

from natgrad.ground.checks import check_integer, check_positive, check_range, is_real
from natgrad.optim import Accidents, OnTrouble
from natgrad.rules import Damping, as_damping
from natgrad.solvers import CG, Solver
from natgrad.structures import Structure


@dataclass(frozen=True)
class Rollouts:
    """What a batch is made of, and how it is judged.

    Args:
        batch: Steps per update, all environments together.
        gamma: Discount of rewards, in [0, 1].
        gae_lambda: GAE's weight, in [0, 1]: 0 takes one step's advantage, 1 the whole return's.
        normalize_observations: Scale observations by running moments, saved, and frozen in `predict`; False does not.
        normalize_rewards: Scale rewards by the standard deviation of their running discounted sum; False does not.
        max_episode_steps: Longer episodes are truncated; math.inf for a task without an end; None for the
            environment's own limit.
        seed: Of all draws and of the environments; the global generators are never used.
        group: The processes of `torch.distributed` that each have environments of their own: an update is that of one
            process with all of them, `batch` counts the steps of all, and each process draws its own actions. All of
            them make the same calls.

    Raises:
        ValueError: For a number out of range.
    """

    batch: int = 1024
    gamma: float = 0.99
    gae_lambda: float = 0.95
    normalize_observations: bool = True
    normalize_rewards: bool = True
    max_episode_steps: float | None = None
    seed: int = 0
    group: Any = None

    def __post_init__(self) -> None:
        fix_integers(self, batch=2, seed=0)
        for name in ("gamma", "gae_lambda"):
            check_range(name, getattr(self, name), "[0, 1]")
        limit = self.max_episode_steps
        if limit is not None and not (is_real(limit) and limit >= 1):
            raise ValueError(f"max_episode_steps is {limit!r}, expected a number >= 1, math.inf or None")


@dataclass(frozen=True)
class NaturalStep:
    """How the direction (F + damping I)^-1 g is found.

    Args:
        solver: Of (F + damping I) x = g.
        structure: How F is held between updates; None for the exact one of the batch. `ng.Kronecker(0.95)` with
            `ng.Direct()` is K-FAC.
        damping: A number in nats per squared unit of a parameter, or an ng damping such as `ng.Relative(1e-3)`. None
            adapts to the ratios of real to predicted gain and of predicted to real KL, and is at least .1, times
            the entries of a real action.
        metric_batch: States that F is taken over; None for all.
        entropy_weight: Of an entropy bonus in the surrogate.
        on_trouble: What an update does whose gradient, step, policy or critic is not finite. "skip": what is not finite
            is left out and counted in `agent.failures`, with a warning at the fifth in a row and RuntimeError at the
            25th; "raise": ValueError. Nothing that is not finite is written in either case.

    Raises:
        TypeError: For a solver or a structure of another kind.
        ValueError: For a number out of range.
    """

    solver: Solver = CG(rtol=1e-3, max_steps=10)
    structure: Structure | None = None
    damping: float | Damping | None = None
    metric_batch: int | None = None
    entropy_weight: float = 0.0
    on_trouble: OnTrouble = "skip"

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Solver):
            raise TypeError(f"solver is {self.solver!r}, expected a natgrad Solver such as ng.CG(max_steps=10)")
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise TypeError(
                f"structure is {self.structure!r}, expected a natgrad Structure such as ng.Kronecker(0.95), or None"
            )
        if self.damping is not None:
            as_damping(self.damping)
        if self.metric_batch is not None:
            fix_integers(self, metric_batch=1)
        if not is_real(self.entropy_weight) or not math.isfinite(self.entropy_weight):
            raise ValueError(f"entropy_weight is {self.entropy_weight!r}, expected a finite number")
        Accidents(self.on_trouble)


@dataclass(frozen=True)
class CriticTraining:
    """How the critic is fitted to a batch's returns: Adam on the squared error.

    Args:
        lr: Adam's learning rate, `critic_lr=` of an agent.
        epochs: Passes over the batch, `critic_epochs=`.
        batch: States per step of Adam, `critic_batch=`.

    Raises:
        ValueError: For a number out of range.
    """

    lr: float = 1e-3
    epochs: int = 10
    batch: int = 128

    def __post_init__(self) -> None:
        check_positive("critic_lr", self.lr)
        fix_integers(self, "critic_", epochs=0, batch=1)


@dataclass(frozen=True)
class Backtracking:
    """The trials of TRPO's line search.

    Args:
        backtrack: Factor between two trials, in (0, 1).
        backtracks: Number of trials.

    Raises:
        ValueError: For a number out of range.
    """

    backtrack: float = 0.8
    backtracks: int = 10

    def __post_init__(self) -> None:
        check_range("backtrack", self.backtrack, "(0, 1)")
        fix_integers(self, backtracks=1)


class PolicySettings(TypedDict, total=False):
    """Keywords of every agent: a whole group, or one setting of it, which then overrides the group's."""

    rollouts: Rollouts
    natural_step: NaturalStep
    critic_training: CriticTraining
    batch: int
    gamma: float
    gae_lambda: float
    normalize_observations: bool
    normalize_rewards: bool
    max_episode_steps: float | None
    seed: int
    group: Any
    solver: Solver
    structure: Structure | None
    damping: float | Damping | None
    metric_batch: int | None
    entropy_weight: float
    on_trouble: OnTrouble
    critic_lr: float
    critic_epochs: int
    critic_batch: int


class TRPOSettings(PolicySettings, total=False):
    """Keywords of `TRPO`."""

    backtracking: Backtracking
    backtrack: float
    backtracks: int


def fix_integers(settings: Any, prefix: str = "", **least: int) -> None:
    """Make these fields of a frozen group whole numbers of at least so much, NumPy's too. ValueError otherwise."""
    for name, bound in least.items():
        object.__setattr__(settings, name, check_integer(f"{prefix}{name}", getattr(settings, name), bound))
