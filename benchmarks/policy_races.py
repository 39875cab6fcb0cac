"""TRPO on MuJoCo's tasks: `ng.TRPO` beside sb3-contrib's, from the same seeds, judged by the same episodes.

Both have two tanh layers of 64 for the policy and as many for the critic, and act in two environments at a time.
sb3-contrib has what its own collection, rl-baselines3-zoo, says of these tasks: observations and rewards scaled, 2048
steps per update, 25 CG steps with damping .1, 20 passes of the critic, and a radius of .01, on HalfCheetah .04. A look
is 20 episodes without exploration. Seconds are CPU seconds of one thread, collecting and learning, looks left out.
mujoco and sb3-contrib are no packages that the benchmarks install: where one lacks, a row says what to install.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept_results import keep_result
from benchmarks.tables import ChosenTables
from benchmarks.variants import check_names
from natgrad.ground.progress import Progress
from natgrad_lab.policies.players import NatgradPlayer, Peer, PolicyChoice, learn_to_marks

KNOWN = Path("build/benchmarks/policies.json")
TITLE = f"Returns, {{}}, mean ± standard deviation; kept in {KNOWN}"
HEADS = ("without exploration", "lowest to highest", "while training", "CPU seconds")
MARKS = (30_000, 100_000, 200_000, 300_000)
MISSING = {"mujoco": 'pip install mujoco "gymnasium[mujoco]"', "sb3_contrib": "pip install sb3-contrib"}
ZOO: dict[str, Any] = {
    "total": 2048,
    "scaled": True,
    "batch_size": 128,
    "cg_max_steps": 25,
    "cg_damping": 0.1,
    "n_critic_updates": 20,
    "learning_rate": 1e-3,
}
PLAYERS = {"ng.TRPO": NatgradPlayer, "sb3-contrib": Peer}


@dataclass(frozen=True)
class PolicyTask:
    """An environment of gymnasium, and with which settings each side plays there."""

    env: str
    choices: dict[str, PolicyChoice]
    envs: int = 2  # at a time
    episodes: int = 20  # of a look
    device: str = "cpu"  # of the networks


def against_zoo(env: str, ours: PolicyChoice = PolicyChoice("defaults"), **theirs: Any) -> PolicyTask:
    """Our setting beside that of rl-baselines3-zoo. theirs: what the zoo has otherwise there than on other tasks."""
    return PolicyTask(env, {"ng.TRPO": ours, "sb3-contrib": PolicyChoice("zoo", ZOO | theirs)})


TASKS = {
    "pendulum": against_zoo("InvertedPendulum-v5"),
    "hopper": against_zoo("Hopper-v5"),
    "cheetah": against_zoo("HalfCheetah-v5", target_kl=0.04),
    "walker": against_zoo("Walker2d-v5"),
}


def figures(seeds: range, choices: ChosenTables) -> Iterator[tuple[str, ...]]:
    """A row per task, contestant and mark, as soon as all seeds are there."""
    check_names("tasks", choices.workloads, TASKS)
    check_names("methods", choices.methods, PLAYERS)
    if find_spec("mujoco") is None:
        yield "all tasks", MISSING["mujoco"], "", "", ""
        return
    for name in choices.workloads or TASKS:
        for method in choices.methods or PLAYERS:
            title = f"{TASKS[name].env}, {method}"
            if method == "sb3-contrib" and find_spec("sb3_contrib") is None:
                yield title, MISSING["sb3_contrib"], "", "", ""
                continue
            task, choice, steps = TASKS[name], TASKS[name].choices[method], choices.steps or 100_000
            curves = []
            for seed in seeds:
                key = f"{task.env} {method} {choice.words} {choice.arguments} seed {seed} steps {steps}"
                curves.append(keep_result(KNOWN, key, partial(run, task, method, seed, steps)))
            for looks in zip(*curves, strict=True):
                test, train, seconds = ([look[key] for look in looks] for key in ("test", "train", "seconds"))
                words = f"{title}, {choice.words}, {looks[0]['mark']:,} steps"
                extremes = f"{min(test):.0f} to {max(test):.0f}"
                yield words, write_spread(test), extremes, write_spread(train), f"{np.mean(seconds):.1f}"


def run(task: PolicyTask, method: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """Learn from one seed, and look at the marks up to so many steps."""
    marks = [mark for mark in MARKS if mark < steps] + [steps]
    player = PLAYERS[method](task, task.choices[method], seed)
    with Progress(f"steps of {method} on {task.env}, seed {seed}", steps, None) as shown:
        looks = learn_to_marks(player, task, marks, lambda share: shown.update(round(share * steps), {}))
        return [dict(look) for look in looks]


def write_spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{np.mean(values):.0f}" + (f" ± {np.std(values, ddof=1):.0f}" if len(values) > 1 else "")
