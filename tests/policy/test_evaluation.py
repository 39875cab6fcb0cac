"""Evaluations during learning, several environments by name, TensorBoard: as in stable-baselines3."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium")
import gymnasium as gym
from policy_worlds import Walk

import natgrad as ng
from natgrad.policy import EvalCallback, make_vec_env

SMALL: dict[str, Any] = {"batch": 32, "critic_epochs": 1, "seed": 0}


def test_evaluations_come_at_multiples_of_their_frequency_and_change_nothing():
    plain, watched = (ng.TRPO(None, Walk(), **SMALL) for _ in range(2))
    watch = EvalCallback(Walk(), n_eval_episodes=3, eval_freq=80)
    plain.learn(256)
    watched.learn(128, callback=watch)
    watched.learn(128, callback=watch)
    assert watch.history["steps"] == [96, 160, 256]
    assert plain.history["kl"] == watched.history["kl"]
    assert plain.history["return"] == watched.history["return"]
    assert all(torch.equal(a, b) for a, b in zip(plain.actor.parameters(), watched.actor.parameters(), strict=True))
    assert watch.last_mean_reward == watch.history["mean_reward"][-1]
    assert watch.best_mean_reward == max(watch.history["mean_reward"])
    returns = watched.evaluate(Walk(), 3)
    assert watch.last_mean_reward == pytest.approx(sum(returns) / 3)


def test_the_best_agent_is_saved(tmp_path: Path):
    agent = ng.TRPO(None, "CartPole-v1", n_steps=128, seed=0)
    kept: list[dict[str, Any]] = []
    watch = EvalCallback(
        "CartPole-v1",
        callback_on_new_best=lambda agent: kept.append({k: v.clone() for k, v in agent.actor.state_dict().items()}),
        n_eval_episodes=2,
        eval_freq=128,
        best_model_save_path=tmp_path / "best",
    )
    agent.learn(128 * 4, callback=watch)
    assert len(watch.history["mean_reward"]) == 4
    best = ng.TRPO(None, "CartPole-v1").load(tmp_path / "best" / "best_model.pt")
    assert all(torch.equal(value, kept[-1][name]) for name, value in best.actor.state_dict().items())
    assert sum(best.evaluate("CartPole-v1", 2)) / 2 == watch.best_mean_reward


def test_what_was_best_is_known_to_a_run_that_goes_on(tmp_path: Path):
    def build(folder: Path) -> tuple[Any, EvalCallback]:
        agent = ng.TRPO(None, "CartPole-v1", n_steps=128, seed=0)
        return agent, EvalCallback(
            "CartPole-v1", n_eval_episodes=2, eval_freq=128, best_model_save_path=tmp_path / folder
        )

    straight, watch = build(Path("straight"))
    straight.learn(128 * 4, callback=[lambda agent: None, watch])
    agent, first = build(Path("resumed"))
    agent.learn(128 * 2, callback=[first])
    agent.save(tmp_path / "agent.pt")
    other, second = build(Path("resumed"))
    other.load(tmp_path / "agent.pt").save(tmp_path / "again.pt")  # nobody has asked for what the callback knew yet
    other.load(tmp_path / "again.pt").learn(128 * 2, callback=second)
    assert second.history == watch.history
    assert (second.best_mean_reward, second.last_mean_reward) == (watch.best_mean_reward, watch.last_mean_reward)
    states = [torch.load(tmp_path / name / "best_model.pt", weights_only=True) for name in ("straight", "resumed")]
    assert states[0]["counts"] == states[1]["counts"]
    assert [state["evaluation"]["mean_reward"] for state in states] == [watch.best_mean_reward] * 2


def test_a_worse_model_does_not_take_the_place_of_a_better_one(tmp_path: Path):
    """Its checkpoint was written before the best evaluation, by a callback in front of it."""

    def watch(**how: Any) -> EvalCallback:
        return EvalCallback(Walk(), eval_freq=32, best_model_save_path=tmp_path, **how)

    agent = ng.TRPO(None, Walk(), **SMALL)
    agent.learn(64, callback=[lambda agent: agent.save(tmp_path / "agent.pt"), watch()])
    best = torch.load(tmp_path / "best_model.pt", weights_only=True)
    torch.save(best | {"evaluation": best["evaluation"] | {"mean_reward": 1e6}}, tmp_path / "best_model.pt")
    for again, kept in ((watch(), True), (watch(n_eval_episodes=2), False), (watch(), False)):
        fresh = ng.TRPO(None, Walk(), **SMALL).load(tmp_path / "agent.pt")
        assert fresh.learn(32, callback=again)["steps"][-1] == 96
        saved = torch.load(tmp_path / "best_model.pt", weights_only=True)["evaluation"]["mean_reward"]
        assert (saved == 1e6) == kept  # other evaluations are not compared
        assert again.best_mean_reward == (1e6 if kept else max(again.history["mean_reward"]))
    (tmp_path / "best_model.pt").unlink()
    again = watch()
    ng.TRPO(None, Walk(), **SMALL).load(tmp_path / "agent.pt").learn(32, callback=again)
    assert (tmp_path / "best_model.pt").exists()


def test_a_new_best_can_end_learning():
    agent = ng.TRPO(None, Walk(), **SMALL)
    agent.learn(320, callback=EvalCallback([Walk(), Walk()], lambda agent: True, eval_freq=64))
    assert agent.steps == 64


def test_what_is_no_evaluation_is_refused():
    with pytest.raises(ValueError, match="eval_freq is 0"):
        EvalCallback(Walk(), eval_freq=0)
    with pytest.raises(TypeError, match="callback is int"):
        EvalCallback(Walk(), [print, 5])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="env has observations of shape"):
        ng.TRPO(None, Walk(), **SMALL).learn(32, callback=EvalCallback("CartPole-v1", eval_freq=32))
    with pytest.raises(ValueError, match="episodes is 0"):
        ng.TRPO(None, Walk(), **SMALL).evaluate(Walk(), 0)


def test_several_environments_by_name():
    envs = make_vec_env("CartPole-v1", n_envs=3, env_kwargs={"sutton_barto_reward": True}, wrapper_class=Counted)
    assert len({id(env) for env in envs}) == 3
    agent = ng.TRPO("MlpPolicy", envs, n_steps=8, seed=0)
    agent.learn(24)
    assert [env.steps for env in envs] == [8, 8, 8]
    assert all(env.unwrapped._sutton_barto_reward for env in envs)
    assert len(make_vec_env(Walk, 2)) == 2
    with pytest.raises(TypeError, match=r"no 'seed': the agent seeds its environments, ng.TRPO"):
        make_vec_env("CartPole-v1", 2, 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="n_envs is 0"):
        make_vec_env("CartPole-v1", 0)


class Counted(gym.Wrapper):
    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        return super().step(action)


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_update_and_the_evaluations(tmp_path: Path):
    pytest.importorskip("tensorboard")
    agent = ng.TRPO(None, Walk(), **SMALL, tensorboard_log=str(tmp_path))
    agent.learn(64, callback=EvalCallback(Walk(), eval_freq=32))
    agent.learn(32)
    ng.TRPO(None, Walk(), **SMALL, tensorboard_log=tmp_path).learn(32)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["TRPO_1", "TRPO_2"]
    scalars = read_scalars(tmp_path / "TRPO_1")
    assert [step for step, _ in scalars["train/kl_divergence_loss"]] == [32, 64, 96]
    assert [value for _, value in scalars["train/kl_divergence_loss"]] == pytest.approx(agent.history["kl"], rel=1e-6)
    assert [step for step, _ in scalars["eval/mean_reward"]] == [32, 64]
    ends = [(n, r) for n, r in zip(agent.history["steps"], agent.history["return"], strict=True) if r is not None]
    assert [step for step, _ in scalars["rollout/ep_rew_mean"]] == [step for step, _ in ends]


def test_nothing_is_written_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    ng.TRPO(None, Walk(), **SMALL).learn(32)
    assert not list(tmp_path.iterdir())


def test_without_tensorboard_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ImportError, match="tensorboard_log is 'runs', which needs tensorboard: pip install tensorboard"
    ):
        ng.TRPO(None, Walk(), **SMALL, tensorboard_log="runs")
