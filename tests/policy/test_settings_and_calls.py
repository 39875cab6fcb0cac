"""Settings in groups, one by one and as stable-baselines3 writes them, as are calls; images from environments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium")
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from policy_worlds import Walk
from torch import nn

import natgrad as ng
from natgrad import policy as pg

SMALL: dict[str, Any] = {"batch": 32, "critic_epochs": 1, "seed": 0}


def agent_of(policy: Any = None, env: Any = None, kind: Any = ng.TRPO, **choices: Any) -> Any:
    return kind(policy, Walk() if env is None else env, **SMALL | choices)


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "n_steps": ({"n_steps": 32}, {"batch": 64}),  # of two environments
    "target_kl": ({"target_kl": 0.002}, {"radius": 0.002}),
    "learning_rate": ({"learning_rate": 1e-2, "batch_size": 16}, {"critic_lr": 1e-2, "critic_batch": 16}),
    "critic": ({"n_critic_updates": 3}, {"critic_epochs": 3}),
    "solver": ({"cg_max_steps": 2, "cg_damping": 0.1}, {"solver": ng.CG(rtol=1e-3, max_steps=2), "damping": 0.1}),
    "line search": (
        {"line_search_shrinking_factor": 0.5, "line_search_max_iter": 3},
        {"backtrack": 0.5, "backtracks": 3},
    ),
    "entropy": ({"ent_coef": 0.01}, {"entropy_weight": 0.01}),
    "nothing": (
        {"verbose": 0, "tensorboard_log": None, "device": "cpu", "use_sde": False, "normalize_advantage": True},
        {},
    ),
    "network": ({"policy_kwargs": {"net_arch": [64, 64], "activation_fn": nn.Tanh, "ortho_init": True}}, {}),
    "both": ({"policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}}, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_settings_that_mean_the_same_give_the_same_agent(name: str):
    found = []
    for choices in SAME[name]:
        common = {"seed": 0} if "n_steps" in choices else {"seed": 0, "batch": 64}
        agent = ng.TRPO("MlpPolicy", [Walk(), Walk()], **common | choices)
        agent.learn(64, progress=False)
        found.append(agent)
    first, second = found
    assert first.batch == second.batch == 64
    assert first.history["kl"] == second.history["kl"]
    assert first.history["critic_loss"] == second.history["critic_loss"]
    for one, other in zip(first.actor.parameters(), second.actor.parameters(), strict=True):
        assert torch.equal(one, other)


TRANSLATED: dict[str, tuple[dict[str, Any], str]] = {
    "schedule": ({"learning_rate": lambda left: left}, "learning_rate is a schedule: give a number"),
    "twice": ({"target_kl": 0.02, "radius": 0.03}, "radius and target_kl, which mean the same"),
    "both dampings": ({"cg_damping": 0.1, "damping": 0.1}, "damping and cg_damping, which mean the same"),
    "both batches": ({"n_steps": 32, "batch": 64}, "n_steps and batch, which both count"),
    "both names": ({"ent_coef": 0.0, "entropy_weight": 0.0}, "entropy_weight and ent_coef, which mean the same"),
    "sde": ({"use_sde": True}, "no 'use_sde': draws are independent"),
    "subsample": ({"sub_sampling_factor": 2}, "no 'sub_sampling_factor': metric_batch=256"),
    "PPO": ({"clip_range": 0.2}, "no 'clip_range': radius= bounds the KL"),
    "epochs": ({"n_epochs": 10}, "no 'n_epochs': the policy moves once per batch, and critic_epochs="),
    "std": ({"policy_kwargs": {"log_std_init": -1}}, "no 'log_std_init': write head="),
    "extractor": (
        {"policy_kwargs": {"features_extractor_class": nn.Linear}},
        "no 'features_extractor_class'.*write the",
    ),
    "sizes": ({"policy_kwargs": {"net_arch": ["lstm"]}}, "net_arch is"),
    "misspelt": ({"bacth": 32}, "no 'bacth': did you mean 'batch'"),
    "unknown": ({"zzz": 32}, "no 'zzz': its keywords are policy, env, radius"),
}


@pytest.mark.parametrize("name", TRANSLATED)
def test_other_settings_are_answered_by_what_to_write(name: str):
    choices, words = TRANSLATED[name]
    with pytest.raises(TypeError, match=words):
        ng.TRPO("MlpPolicy", Walk(), **choices)


def test_learning_takes_their_words_and_translates_the_others():
    ours, theirs = agent_of(), agent_of()
    ours.learn(64, progress=False)
    theirs.learn(total_timesteps=64, progress_bar=False)
    assert ours.history["kl"] == theirs.history["kl"]
    for choices, words in (
        ({}, "learn was given no total_steps"),
        ({"total_steps": 64, "total_timesteps": 64}, "total_steps and total_timesteps, which mean the same"),
        ({"total_timesteps": 64, "log_interval": 4}, "no 'log_interval': every update is in the history"),
        ({"total_timesteps": 64, "reset_num_timesteps": True}, "no 'reset_num_timesteps': learn always goes on"),
        ({"total_timesteps": 64, "steps": 4}, "no 'steps': its arguments are total_steps"),
    ):
        with pytest.raises(TypeError, match=words):
            ours.learn(**choices)
    with pytest.raises(ValueError, match="total_steps is 0"):
        ours.learn(total_timesteps=0)
    assert ours.steps == theirs.steps


def test_a_prediction_is_a_pair_of_action_and_state():
    agent, seen = agent_of(), np.zeros((3, 2), dtype=np.float32)
    action = agent.predict(seen, deterministic=True)[0]
    assert np.array_equal(agent.predict(seen[0])[0], action[0])
    for spelled in (
        {},
        {"state": None},
        {"episode_start": np.ones(3, dtype=bool)},
        {"state": None, "episode_start": None},
    ):
        found, state = agent.predict(seen, deterministic=True, **spelled)
        assert np.array_equal(found, action)
        assert state is None
    for arguments, choices, words in (
        ((None,), {}, r"deterministic is None.*predict\(observation, deterministic=True\)"),
        ((), {"state": (1,)}, "no recurrent state"),
        ((), {"mask": None}, "takes no 'mask'"),
    ):
        with pytest.raises(TypeError, match=words):
            agent.predict(seen, *arguments, **choices)


@pytest.mark.parametrize("kind", [ng.TRPO, ng.NaturalPolicyGradient])
def test_loading_is_an_agents_and_the_class_says_so(kind: Any, tmp_path: Any):
    path, agent = tmp_path / "agent", agent_of(kind=kind)
    agent.save(path)
    with pytest.raises(TypeError, match=rf"agent = ng.{kind.__name__}\(policy, env\).load\(path\) instead"):
        kind.load(path)
    assert agent_of(kind=kind).load(path).steps == agent.steps
    assert "Continue from `save`" in kind.load.__doc__


def test_groups_and_keywords_say_the_same():
    groups = {
        "rollouts": pg.Rollouts(batch=32, gamma=0.9, seed=3),
        "natural_step": pg.NaturalStep(damping=ng.Relative(0.1), metric_batch=16),
        "critic_training": pg.CriticTraining(lr=1e-2, epochs=2, batch=8),
        "backtracking": pg.Backtracking(0.5, 4),
    }
    keywords: dict[str, Any] = {
        "batch": 32,
        "gamma": 0.9,
        "seed": 3,
        "damping": ng.Relative(0.1),
        "metric_batch": 16,
        "critic_lr": 1e-2,
        "critic_epochs": 2,
        "critic_batch": 8,
        "backtrack": 0.5,
        "backtracks": 4,
    }
    found = []
    for choices in (groups, keywords, {**groups, "rollouts": pg.Rollouts(32, 0.5)} | {"gamma": 0.9, "seed": 3}):
        agent = ng.TRPO(None, Walk(), **choices)
        agent.learn(64, progress=False)
        found.append([agent.history["kl"], agent.history["critic_loss"], agent.history["damping"]])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("per", ["metric", "block"])
def test_damping_may_be_a_share_of_the_mean_eigenvalue(per: Any):
    choices: dict[str, Any] = {"batch": 64, "critic_epochs": 0, "solver": ng.Direct()}
    policy = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    agent = ng.TRPO(policy, Walk(), structure=ng.Kronecker(0.9), damping=ng.Relative(0.1, per=per), **choices)
    agent.learn(64, progress=False)
    assert agent.failures == 0
    assert agent.history["accepted"] == [True]
    exact = ng.TRPO(policy, Walk(), damping=ng.Relative(0.1, per=per), **choices)
    exact.learn(64, progress=False)
    assert exact.history["damping"][0] > 0
    assert exact.history["cg_residual"][0] < 1e-9


class Screen(gym.Env):
    """Images of one bright side, (h, w, c) or (c, h, w): the side is to be told."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> None:
        self.observation_space = spaces.Box(0, 255, shape, dtype)

    def _encode(self) -> Any:
        self.side = int(self.np_random.random() < 0.5)
        found = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        found[..., : 4 * self.side + 1] = 255
        return found

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self.time = 0
        return self._encode(), {}

    def step(self, action: Any):
        reward, self.time = float(action == self.side), self.time + 1
        return self._encode(), reward, False, self.time >= 8, {}


class Look(nn.Module):
    """A convolution that keeps what it saw."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.last, self.seen = nn.Conv2d(3, 4, 4), nn.Linear(4, outputs), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        return self.last(self.first(x).relu().mean((2, 3)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
@pytest.mark.parametrize("shape", [(8, 9, 3), (3, 8, 9)])
def test_images_come_from_zero_to_one_with_their_channels_where_a_convolution_wants_them(shape: Any, dtype: Any):
    policy, critic, world = Look(2), Look(1), Screen(shape, dtype)
    agent = agent_of(policy, world, critic=critic)
    agent.learn(64)
    for network in (policy, critic):
        assert network.seen.shape[1:] == (3, 8, 9)
        assert set(network.seen.unique().tolist()) == {0.0, 1.0}
    image = world.reset(seed=0)[0]
    assert agent.predict(image)[0] in (0, 1)
    last = image if shape[0] == 3 else np.moveaxis(image, -1, 0)
    assert np.allclose(policy.seen[0], last / 255)
