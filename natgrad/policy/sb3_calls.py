"""Calls as stable-baselines3 writes them: taken where they mean the same, else answered by what to write here."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar, cast

import numpy as np
from torch import nn

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
    for theirs, ours in (("total_timesteps", total_steps), ("progress_bar", progress)):
        if theirs in spelled and ours is not None:
            own = "total_steps" if theirs == "total_timesteps" else "progress"
            raise TypeError(f"learn was given {own} and {theirs}, which mean the same: give one of them")
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

        def refuse(*args: Any, **choices: Any) -> Any:
            if args and isinstance(args[0], owner):
                return self.method(*args, **choices)
            kind, name = owner.__name__, self.method.__name__
            raise TypeError(
                f"{kind}.{name} is of an agent, since the file holds neither an environment nor a network: write "
                f"agent = ng.{kind}(policy, env).{name}(path) instead"
            )

        return update_wrapper(refuse, self.method)


def per_agent(method: Method) -> Method:
    """Decorator: the method as a `PerAgent`."""
    return cast(Method, PerAgent(method))
