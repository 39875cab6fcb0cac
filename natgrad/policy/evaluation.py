"""Evaluations during learning, and environments side by side: named as stable-baselines3 names them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from natgrad.ground.checks import check_integer
from natgrad.ground.messages import Explained, explain_calls, write_choices
from natgrad.ground.progress import Callbacks, join_callbacks
from natgrad.ground.state_files import read_state_file, write_state_file
from natgrad.policy.environments import import_gymnasium, make_environment

if TYPE_CHECKING:
    from natgrad.policy.learner import PolicyLearner

BEST = "best_model.pt"


class EvalCallback(Explained):
    """Evaluates a policy now and then and saves the best one: `agent.learn(100_000, ng.policy.EvalCallback(env))`.

    Every evaluation has the same seed, so that policies are compared on the same starts. It changes nothing of the
    training. What it measured is in the agent's checkpoints: a run that goes on from one with the same evaluations
    does not overwrite a better model with a worse one.

    Args:
        eval_env: As for the agent; other environments than those of the training.
        callback_on_new_best: Called with the agent after an evaluation that was the best so far; learning stops if it
            returns True.
        n_eval_episodes: Episodes of an evaluation.
        eval_freq: Steps of all environments together: an evaluation follows the update in which a multiple of it is
            reached.
        best_model_save_path: Folder in which the best agent is saved, as `best_model.pt`; None for nowhere.
        deterministic: True for the likeliest actions, False for draws.
        seed: Of the environments.

    Attributes:
        history: `history["steps"]`, `history["mean_reward"]` and `history["std_reward"]`, an entry per evaluation.
        last_mean_reward: Of the last evaluation.
        best_mean_reward: The largest so far.

    Example:
        >>> watch = ng.policy.EvalCallback("CartPole-v1", n_eval_episodes=2, eval_freq=64)
        >>> history = ng.TRPO(None, "CartPole-v1", batch=64).learn(128, callback=watch)
        >>> watch.history["steps"]
        [64, 128]
    """

    def __init__(
        self,
        eval_env: Any,
        callback_on_new_best: Callbacks[PolicyLearner] | None = None,
        n_eval_episodes: int = 5,
        eval_freq: int = 10_000,
        best_model_save_path: str | Path | None = None,
        deterministic: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        several = isinstance(eval_env, (list, tuple))
        self.eval_env = [make_environment(env) for env in eval_env] if several else make_environment(eval_env)
        self.callback_on_new_best = join_callbacks(callback_on_new_best, "the learner")
        self.n_eval_episodes = check_integer("n_eval_episodes", n_eval_episodes)
        self.eval_freq = check_integer("eval_freq", eval_freq)
        self.file = None if best_model_save_path is None else Path(best_model_save_path) / BEST
        self.deterministic, self.seed = deterministic, seed
        self.history: dict[str, list[float]] = {"steps": [], "mean_reward": [], "std_reward": []}
        self.last_mean_reward = self.best_mean_reward = -math.inf

    def __repr__(self) -> str:
        return write_choices(self, n_eval_episodes=self.n_eval_episodes, eval_freq=self.eval_freq)

    def __call__(self, agent: PolicyLearner) -> bool:
        """Evaluate, if it is time. True if learning is to stop.

        Args:
            agent: Under training.
        """
        before = agent.history["steps"][-2] if agent.updates > 1 else 0
        if agent.steps // self.eval_freq == before // self.eval_freq:
            return False
        returns = agent.evaluate(self.eval_env, self.n_eval_episodes, deterministic=self.deterministic, seed=self.seed)
        self.last_mean_reward = float(np.mean(returns))
        row = {"steps": agent.steps, "mean_reward": self.last_mean_reward, "std_reward": float(np.std(returns))}
        for name, value in row.items():
            self.history[name].append(value)
        agent.log.write({"eval/mean_reward": self.last_mean_reward}, agent.steps)
        better = self.last_mean_reward > self.best_mean_reward
        self.best_mean_reward = max(self.best_mean_reward, self.last_mean_reward)
        if self.file is not None and agent.processes.rank == 0 and (better or not self.file.exists()):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            evaluation = {"how": self._describe(), "mean_reward": self.last_mean_reward}
            write_state_file({**agent.state_dict(), "evaluation": evaluation}, self.file)
        return better and self.callback_on_new_best(agent)

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far, and how: it is in the checkpoints of the agent."""
        return {"history": {name: list(column) for name, column in self.history.items()}, "how": self._describe()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; where evaluations were others then, begin anew.

        A better model that is in the folder already, since it was saved after the checkpoint, stays as well.

        Args:
            state: What `state_dict` returned.
        """
        if state["how"] != self._describe():
            return
        self.history = {name: list(column) for name, column in state["history"].items()}
        returns = [-math.inf, *self.history["mean_reward"]]
        self.last_mean_reward, self.best_mean_reward = returns[-1], max(returns)
        if self.file is not None and self.file.exists():
            saved = read_state_file(self.file, "cpu").get("evaluation", {})
            if saved.get("how") == state["how"]:
                self.best_mean_reward = max(self.best_mean_reward, saved["mean_reward"])

    def _describe(self) -> list[Any]:
        """What makes two evaluations comparable: environments, episodes, seed, draws."""
        environments = self.eval_env if isinstance(self.eval_env, list) else [self.eval_env]
        specs = [getattr(env, "spec", None) for env in environments]
        names = [type(env).__name__ if spec is None else spec.id for env, spec in zip(environments, specs, strict=True)]
        return [names, self.n_eval_episodes, self.seed, self.deterministic]


@explain_calls
def make_vec_env(
    env_id: str | Callable[..., Any],
    n_envs: int = 1,
    seed: None = None,
    *,
    env_kwargs: dict[str, Any] | None = None,
    wrapper_class: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Several environments of one kind, for an agent: `ng.TRPO("MlpPolicy", ng.policy.make_vec_env("CartPole-v1", 4))`.

    Args:
        env_id: A registered name, or what makes an environment.
        n_envs: How many.
        seed: Of the agent, and not of its environments.
        env_kwargs: Given to each as it is made.
        wrapper_class: Around each.

    Raises:
        TypeError: If a seed is given.

    Example:
        >>> agent = ng.TRPO("MlpPolicy", ng.policy.make_vec_env("CartPole-v1", n_envs=4), n_steps=16, seed=0)
        >>> agent.learn(64)["steps"]
        [64]
    """
    if seed is not None:
        raise TypeError("make_vec_env takes no 'seed': the agent seeds its environments, ng.TRPO(policy, env, seed=0)")
    gym, own = import_gymnasium(), env_kwargs or {}
    make = gym.make if isinstance(env_id, str) else lambda make, **own: make(**own)
    environments = [make(env_id, **own) for _ in range(check_integer("n_envs", n_envs))]
    return environments if wrapper_class is None else [wrapper_class(env) for env in environments]
