"""Calls and settings as stable-baselines3 writes them: taken where they mean the same, else answered by ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from torch import nn

from natgrad.ground.checks import check_positive
from natgrad.solvers import CG

SAME = {
    "batch_size": "critic_batch",
    "n_critic_updates": "critic_epochs",
    "line_search_shrinking_factor": "backtrack",
    "line_search_max_iter": "backtracks",
    "ent_coef": "entropy_weight",
    "cg_max_steps": "solver",
    "learning_rate": "critic_lr",
}
"""Keywords of its constructors that mean what ours do; the solver is CG with as many steps."""

RADIUS = 0.01

OFF: dict[str, tuple[Any, str]] = {
    "use_sde": (False, "draws are independent from step to step"),
    "sde_sample_freq": (-1, "draws are independent from step to step"),
    "rollout_buffer_class": (None, "a batch is kept for one update"),
    "rollout_buffer_kwargs": (None, "a batch is kept for one update"),
    "normalize_advantage": (True, "advantages are standardised always"),
    "sub_sampling_factor": (1, "metric_batch=256 takes the metric over fewer states"),
    "stats_window_size": (100, "history has the mean return of every batch, agent.rollout.episodes each episode's"),
    "_init_setup_model": (True, "networks are built with the agent"),
    "n_epochs": (1, "the policy moves once per batch, and critic_epochs= is for the critic"),
    "clip_range": (None, "radius= bounds the KL of an update"),
    "clip_range_vf": (None, "the critic is not clipped"),
    "vf_coef": (None, "policy and critic have losses of their own"),
    "max_grad_norm": (None, "radius= bounds the KL of an update"),
    "use_rms_prop": (False, "the policy takes natural steps, the critic is fitted by Adam"),
}
"""Keywords without a counterpart: the value that changes nothing, and what stands here instead."""


@dataclass(frozen=True)
class Translation:
    """What a constructor's keywords mean here."""

    choices: dict[str, Any]  # our keywords
    radius: float | None  # of an update, in nats per state; None for `target`
    target: float  # nats per state, and for real actions per entry of an action
    cg_damping: float | None  # per entry of an action; None where it was not said
    steps: int | None  # per environment and update, of `n_steps`; None where it was not said
    verbose: bool | None  # whether learning shows its progress; None where it was not said
    device: Any  # of the default network; None where it was not said
    hidden: tuple[tuple[int, ...], tuple[int, ...]] | None  # sizes of the layers of policy and critic, likewise
    activation: type[nn.Module] | None  # between them; None where it was not said
    log: Any  # folder of what TensorBoard shows; None for no such thing


def translate_choices(caller: str, radius: float | None, choices: dict[str, Any]) -> Translation:
    """Keywords of a stable-baselines3 constructor in our words; the others as they came."""
    ours = dict(choices)
    if "learning_rate" in ours and caller != "TRPO":
        raise TypeError(
            f"{caller} takes no 'learning_rate': critic_lr= is the critic's rate, and the policy's step is as long as "
            "radius= says, or lr= where that is given"
        )
    if callable(ours.get("learning_rate")):
        raise TypeError(
            "learning_rate is a schedule: give a number, and change agent.critic.optimizer.param_groups in callback="
        )
    target = ours.pop("target_kl", None)
    refuse_twice(caller, "radius", radius, "target_kl", target)
    for theirs, own in (SAME | {"cg_damping": "damping"}).items():
        refuse_twice(caller, own, own in ours or None, theirs, theirs in ours or None)
    for theirs, own in SAME.items():
        if theirs in ours:
            value = ours.pop(theirs)
            ours[own] = CG(rtol=1e-3, max_steps=value) if own == "solver" else value
    for name, bound in (("radius", radius), ("target_kl", target)):
        if bound is not None:
            check_positive(name, bound)
    if "n_steps" in ours and "batch" in ours:
        raise TypeError(f"{caller} was given n_steps and batch, which both count an update's steps: give one of them")
    for name in OFF.keys() & ours.keys():
        neutral, advice = OFF[name]
        if ours.pop(name) != neutral:
            raise TypeError(f"{caller} takes no {name!r}: {advice}")
    network = translate_network(caller, ours.pop("policy_kwargs", None))
    read = ("cg_damping", "n_steps", "verbose", "device", "tensorboard_log")
    damping, steps, verbose, device, log = (ours.pop(name, None) for name in read)
    verbose, device = None if verbose is None else bool(verbose), None if device == "auto" else device
    return Translation(
        ours, radius, RADIUS if target is None else target, damping, steps, verbose, device, *network, log
    )


def refuse_twice(caller: str, own: str, ours: Any, theirs: str, other: Any) -> None:
    """TypeError where a keyword of ours and the one of theirs that means the same both have a value."""
    if ours is not None and other is not None:
        raise TypeError(f"{caller} was given {own} and {theirs}, which mean the same: give one of them")


def translate_network(caller: str, given: Any) -> tuple[Any, Any]:
    """Layers and activation of the default networks, as `policy_kwargs` says. TypeError for what it cannot say."""
    if not given:
        return None, None
    advice = (
        "write the network instead, such as ng.TRPO(nn.Sequential(nn.Linear(n, 64), nn.Tanh(), nn.Linear(64, m)), env)"
    )
    if not isinstance(given, dict):
        raise TypeError(f"policy_kwargs is {type(given).__name__}, expected a dict")
    for name in given:
        if name == "log_std_init":
            raise TypeError(
                f"{caller} takes no 'log_std_init': write head=GaussianHead(log_std=-0.5, scaled=False), in the "
                "environment's units"
            )
        if name not in ("net_arch", "activation_fn", "ortho_init") or (name == "ortho_init" and not given[name]):
            raise TypeError(f"{caller} takes no {name!r} in policy_kwargs: {advice}")
    sizes = given.get("net_arch")
    if sizes is None:
        return None, given.get("activation_fn")
    pair = (sizes.get("pi", []), sizes.get("vf", [])) if isinstance(sizes, dict) else (sizes, sizes)
    if not all(isinstance(n, int) for part in pair for n in part):
        raise TypeError(
            f"net_arch is {sizes!r}, expected sizes of layers, [64, 64] or dict(pi=[64], vf=[64]): {advice}"
        )
    return (tuple(pair[0]), tuple(pair[1])), given.get("activation_fn")


# Calls

ATTRIBUTES = {
    "num_timesteps": "write agent.steps",
    "_n_updates": "write agent.updates",
    "logger": "agent.history has the numbers of every update",
    "ep_info_buffer": "agent.rollout.episodes has the episodes of the last batch",
    "env": "agent.worlds.envs has the environments",
    "get_env": "agent.worlds.envs has the environments",
    "set_env": "build another agent with that environment and load what this one saved",
    "n_envs": "write agent.worlds.count",
    "observation_space": "write agent.worlds.observation_space",
    "action_space": "write agent.worlds.action_space",
    "get_parameters": "write agent.state_dict()",
    "set_parameters": "write agent.load_state_dict(state)",
}
"""Attributes of its agents, and what stands here instead."""

Method = TypeVar("Method", bound=Callable[..., Any])

ADVICE = {
    "log_interval": "every update is in the history that learn returns",
    "tb_log_name": "tensorboard_log= of the agent is the folder, and its runs are called TRPO_1, TRPO_2, ...",
    "reset_num_timesteps": "learn always goes on; build a new agent to begin anew",
}


def as_policy(policy: Any) -> nn.Module | None:
    """The module, or None for the default network, which "MlpPolicy" stands for. ValueError for another name."""
    if not isinstance(policy, str):
        return policy
    if policy == "MlpPolicy":
        return None
    raise ValueError(
        f"policy is {policy!r}, expected a torch.nn.Module from observations to action parameters, or None or "
        "'MlpPolicy' for two tanh layers of 64: write the network instead, such as ng.TRPO(nn.Sequential(nn.Conv2d(3, "
        "16, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(m, n)), env) for images"
    )


def as_learning(total_steps: Any, progress: Any, spelled: dict[str, Any]) -> tuple[float, bool | None]:
    """What `learn` was given, in its own words. TypeError for what it does not take, or twice."""
    refuse_twice("learn", "total_steps", total_steps, "total_timesteps", spelled.get("total_timesteps"))
    refuse_twice("learn", "progress", progress, "progress_bar", spelled.get("progress_bar"))
    total_steps, progress = spelled.pop("total_timesteps", total_steps), spelled.pop("progress_bar", progress)
    for name in spelled:
        raise TypeError(
            f"learn takes no {name!r}: {ADVICE.get(name, 'its arguments are total_steps, callback, progress')}"
        )
    if total_steps is None:
        raise TypeError("learn was given no total_steps: write learn(100_000)")
    return total_steps, progress


def check_prediction(deterministic: Any, spelled: dict[str, Any]) -> None:
    """TypeError for other arguments than ours, and for anything but a truth value: their second one is the state."""
    if not isinstance(deterministic, (bool, np.bool_)):
        raise TypeError(
            f"deterministic is {deterministic!r}, expected True or False: policies have no recurrent state, write "
            "predict(observation, deterministic=True) instead"
        )
    for name in spelled.keys() - {"state", "episode_start"}:
        raise TypeError(f"predict takes no {name!r}: its arguments are observation and deterministic")
    if spelled.get("state") is not None:
        raise TypeError("state is not None: policies have no recurrent state; leave it out")


class PerAgent:
    """A method; asked of the class and not of an agent, it says what to write instead."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        update_wrapper(cast(Any, self), method)

    def __get__(self, agent: Any, owner: type) -> Any:
        if agent is not None:
            return self.method.__get__(agent, owner)

        @wraps(self.method)
        def refuse(*args: Any, **choices: Any) -> Any:
            if args and isinstance(args[0], owner):
                return self.method(*args, **choices)
            kind, name = owner.__name__, self.method.__name__
            raise TypeError(
                f"{kind}.{name} is of an agent, since the file holds neither an environment nor a network: write "
                f"agent = ng.{kind}(policy, env).{name}(path) instead"
            )

        return refuse


def per_agent(method: Method) -> Method:
    """Decorator: the method as a `PerAgent`."""
    return cast(Method, PerAgent(method))


# The numbers of a training as TensorBoard shows them

TAGS = {
    "return": "rollout/ep_rew_mean",
    "length": "rollout/ep_len_mean",
    "kl": "train/kl_divergence_loss",
    "critic_loss": "train/value_loss",
    "accepted": "train/is_line_search_success",
    "seconds": "time/seconds",
}
"""Columns of the history -> its names; the others are `train/` and the column's own."""


class ScalarLog:
    """What `tensorboard_log=` says, into one folder per agent; outside of a `with` block nothing is written."""

    def __init__(self, parent: str | Path | None, name: str) -> None:
        self.parent, self.name = None if parent is None else Path(parent), name
        self.folder: Path | None = None  # the first of name_1, name_2, ... that does not exist
        self._writer: Any = None
        if parent is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"tensorboard_log is {str(self.parent)!r}, which needs tensorboard: pip install tensorboard, or leave "
                "tensorboard_log out and take the numbers from the history that learn returns"
            ) from error
        self._open = SummaryWriter

    def __enter__(self) -> ScalarLog:
        if self.parent is not None:
            if self.folder is None:
                names = (self.parent / f"{self.name}_{i}" for i in itertools.count(1))
                self.folder = next(place for place in names if not place.exists())
            self._writer = self._open(str(self.folder))
        return self

    def __exit__(self, *error: object) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def write_update(self, row: Mapping[str, Any]) -> None:
        """Write a row of the history."""
        numbers = {TAGS.get(name, f"train/{name}"): value for name, value in row.items() if name != "steps"}
        self.write(numbers, row["steps"])

    def write(self, numbers: Mapping[str, float | None], step: int) -> None:
        """Write numbers by tag; nothing for a None."""
        if self._writer is not None:
            for tag, value in numbers.items():
                if value is not None:
                    self._writer.add_scalar(tag, float(value), step)
