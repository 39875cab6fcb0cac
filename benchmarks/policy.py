"""One update of TRPO, collecting and learning, beside the TRPO of sb3-contrib: same batch, networks and CG steps."""

from __future__ import annotations

import gymnasium as gym

import natgrad as ng
from benchmarks.timing import Ratio, ratios

HEADS = ("time / sb3-contrib's",)
STEPS = 10
CASES = (("CartPole-v1", 1, 2048), ("CartPole-v1", 8, 2048), ("Pendulum-v1", 1, 2048), ("Acrobot-v1", 1, 2048))


def report(repeats: int) -> list[tuple[str, ...]]:
    """Rows: an environment, how many at a time, the batch, and the ratio."""
    return [
        (f"{env}, {envs} at a time, batch {batch}", str(ratio(env, envs, batch, repeats))) for env, envs, batch in CASES
    ]


def ratio(env: str, envs: int, batch: int, repeats: int) -> Ratio:
    """Ours over theirs: ten CG steps, ten epochs of Adam over batches of 128 for the critic on either side."""
    ours = ng.TRPO(
        None,
        [gym.make(env) for _ in range(envs)],
        batch=batch,
        solver=ng.CG(rtol=0.0, max_steps=STEPS),
        critic_epochs=10,
        critic_batch=128,
    )
    # sb3-contrib's TRPO with 64-64 tanh networks, its default
    from sb3_contrib import TRPO
    from stable_baselines3.common.env_util import make_vec_env

    theirs = TRPO(
        "MlpPolicy",
        make_vec_env(env, envs),
        n_steps=batch // envs,
        batch_size=128,
        cg_max_steps=STEPS,
        n_critic_updates=10,
        seed=0,
        device="cpu",
    )
    times = ratios(
        lambda: theirs.learn(batch, reset_num_timesteps=False), {"ours": lambda: ours.learn(1, progress=False)}, repeats
    )
    return times["ours"]
