"""What every policy gradient method here has in common: collect, move the policy, fit the critic, write down."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import astuple, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from natgrad.ground.checks import check_integer, check_precision
from natgrad.ground.exchanges import any_asks
from natgrad.ground.linalg import all_finite
from natgrad.ground.messages import Columns, Explained, explain_calls, write_choices
from natgrad.ground.progress import Callbacks, Progress, join_callbacks
from natgrad.ground.pure import leaves, run_detached, set_modes_aside
from natgrad.ground.spaces import check_recorded
from natgrad.ground.state_files import read_state_file, write_state_file
from natgrad.ground.states import Stateful
from natgrad.metrics import fisher
from natgrad.operators import DiagonalOperator, Operator
from natgrad.optim import (
    Accidents,
    Attributes,
    meet_processes,
    read_parts,
    refuse_processes,
    shift_blocks,
    update_jointly,
    write_parts,
)
from natgrad.policy.actor import Actor, choose_probe_size, find_acting
from natgrad.policy.advantage import (
    BatchPart,
    Critic,
    RewardScale,
    Rollout,
    check_values,
    estimate_advantages,
    explain_variance,
)
from natgrad.policy.environments import Environments, Episode, take_action
from natgrad.policy.heads import GaussianHead, Head, choose_head
from natgrad.policy.rollout import ObservationScale, collect_steps, join_moments
from natgrad.policy.sb3 import ATTRIBUTES, ScalarLog, Translation, as_learning, as_policy, check_prediction, per_agent
from natgrad.policy.settings import CriticTraining, NaturalStep, Rollouts
from natgrad.policy.update import Surrogate, take_step
from natgrad.rules import FlatStep, LevenbergMarquardt, Quadratic, Rule, as_damping
from natgrad.solvers import Solution
from natgrad.structures import Exact

SEED_DISTANCE = 1_000_003  # between the seeds of two processes
LEAST = 0.1  # damping per entry of an action: below, a batch's noise leads the step, which no ratio tells
SHOWN = {"return": "return", "KL": "kl", "entropy": "entropy"}  # by `learn`, and where the history has it


class PolicyLearner(Explained):
    """A policy in an environment, under training. A subclass says by which rule a step gets its length.

    Args:
        policy: The network, or None or "MlpPolicy" for the default one.
        env: A gymnasium environment, vector environment, registered name, or a sequence of them.
        critic: A module from observations to (b,) or (b, 1), or None for the default one.
        head: The distribution of actions, or None for the space's own.
        choices: The keywords, as `translate_choices` gives them.
        groups: The groups of settings by name, as `read_groups` gives them.
    """

    rate = 1.0  # of the step that the rule is given
    _lengths: tuple[str, ...] = ("radius",)  # attributes that say how long a step is, for the representation

    @set_modes_aside
    def __init__(
        self,
        policy: nn.Module | str | None,
        env: Any,
        critic: nn.Module | None,
        head: Head | None,
        choices: Translation,
        groups: Mapping[str, Any],
    ) -> None:
        self.rollouts: Rollouts = groups["rollouts"]
        self.worlds, self.batch = Environments(env, self.rollouts.max_episode_steps), self.rollouts.batch
        if choices.steps is not None:
            self.batch = self.worlds.count * check_integer("n_steps", choices.steps, 1)
        self.head = choose_head(self.worlds.action_space, head)
        self.radius = self.head.entries * choices.target if choices.radius is None else choices.radius
        self.natural_step: NaturalStep = groups["natural_step"]
        if choices.cg_damping is not None:
            self.natural_step = replace(self.natural_step, damping=self.head.entries * choices.cg_damping)
        self.structure = self.natural_step.structure or Exact()
        given, least = self.natural_step.damping, LEAST * self.head.entries
        adaptive = LevenbergMarquardt(least, floor=least, ceiling=100 * least)
        self.damping = adaptive if given is None else as_damping(given)
        self.verbose, self.accidents = choices.verbose, Accidents(self.natural_step.on_trouble)
        self.generator = torch.Generator().manual_seed(self.rollouts.seed)
        policy = as_policy(policy)
        self._build(policy, critic, groups["critic_training"], choices)
        own = self.head if policy is None and head is None else None
        untouched = isinstance(own, GaussianHead) and bool((SHARE * own.units >= UNIT).all())
        self.width = WidthTrial(self._set_share, untouched)
        modules = nn.ModuleList([self.actor, *([self.critic.module] if self.critic.module is not None else [])])
        settings = self.rollouts.batch, self.natural_step, groups["critic_training"], self.rule
        self.processes = meet_processes(dict(modules.named_parameters()), self.rollouts.group, *settings)
        self._draws = torch.Generator(self.device).manual_seed(self.rollouts.seed + SEED_DISTANCE * self.processes.rank)
        self._predictions = torch.Generator(self.device).manual_seed(self.rollouts.seed + 1)
        self.scale = ObservationScale(self.worlds.shape, self.rollouts.normalize_observations and self.worlds.scalable)
        scaled = self.rollouts.normalize_rewards
        self.reward_scale = RewardScale(self.worlds.count, self.rollouts.gamma, scaled, self.processes)
        self.history = LearningHistory()
        self.log = ScalarLog(choices.log if self.processes.rank == 0 else None, type(self).__name__)
        self.rollout: Rollout | None = None
        self._callbacks = CallbackStates()
        self.steps, self.updates, self._begun, self._amount, self._memory = 0, 0, 0, self.damping.initial(), None

    def _build(self, policy: Any, critic: nn.Module | None, training: CriticTraining, choices: Translation) -> None:
        """The networks, checked on an example state; those not given are perceptrons drawn from the generator."""
        for name, module in (("policy", policy), ("critic", critic)):
            if not isinstance(module, (nn.Module, type(None))):
                raise TypeError(f"{name} is {type(module).__name__}, expected a torch.nn.Module or None")
            refuse_processes(module, name)
            for p in module.parameters() if module is not None else ():
                check_precision(name, p.dtype, f"call {name}.float(), and take torch.autocast inside of its forward")
                check_recorded(name, p)
        if policy is not None and choices.device is not None:
            raise TypeError("device is of the default network, but a policy was given: write policy.to(device) before")
        if policy is not None and (choices.hidden or choices.activation):
            raise TypeError("policy_kwargs is of the default network, but a policy was given: build it as it shall be")
        like = torch.zeros((), device=choices.device) if policy is None else next(policy.parameters(), None)
        if like is None:
            raise ValueError("policy has no parameter to train")
        like = like.detach()
        example, inputs = like.new_zeros(self.worlds.shape), max(math.prod(self.worlds.shape), 1)
        hidden, activation = choices.hidden or HIDDEN, choices.activation or nn.Tanh
        if policy is None:  # near zero at first
            sizes = [inputs, *hidden[0], getattr(self.head, "dimensions", self.head.width)]
            policy = build_perceptron(sizes, 0.01, activation, self.generator, like)
        self.policy, self.device = policy, like.device
        with use_eval_mode(policy):
            self.actor = Actor(policy, self.head, example).to(like.device)
            self.params = find_acting(self.actor, example)
        self._frozen = [name for name, p in self.actor.named_parameters() if not p.requires_grad]
        if critic is None and not self.actor.valued:
            critic = build_perceptron([inputs, *hidden[1], 1], 1.0, activation, self.generator, like)
        order: tuple[int, ...] = ()
        if critic is not None:
            with use_eval_mode(critic):
                order = check_values(critic, example, choose_probe_size(self.head))
        self.critic = Critic(critic, self.actor, self.params.values(), training, order)
        self.metric = fisher(self.actor, self.head.family)

    def __repr__(self) -> str:
        step, worlds = self.natural_step, self.worlds
        how = {"solver": step.solver, "structure": self.structure, "damping": self.damping}
        lengths = {name: getattr(self, name) for name in self._lengths}
        sizes = {"environments": worlds.count, "batch": self.batch}
        done = {"steps": self.steps, "updates": self.updates}
        return write_choices(self, policy=self.policy, head=self.head, **lengths, **sizes, **how, **done)

    if not TYPE_CHECKING:  # a checker knows the attributes that there are

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{text}: {ATTRIBUTES[name]}" if name in ATTRIBUTES else text, name=name, obj=self)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in ATTRIBUTES:  # which nothing would read
                advice = ATTRIBUTES["set_env" if name == "env" else name]
                raise AttributeError(f"{type(self).__name__}.{name} cannot be set: {advice}", name=name, obj=self)
            super().__setattr__(name, value)

    @property
    def failures(self) -> int:
        """Updates in which a number was not finite: policy or critic stayed as they were."""
        return self.accidents.count

    @property
    @abstractmethod
    def rule(self) -> Rule:
        """What gives a step its length."""

    @set_modes_aside
    def learn(
        self,
        total_steps: float | None = None,
        callback: Callbacks[Any] | None = None,
        progress: bool | None = None,
        **spelled: Any,
    ) -> LearningHistory:
        """Train in whole batches, and return the history so far. Ctrl-C ends it after the last whole update.

        Args:
            total_steps: At least so many more steps, of all environments together.
            callback: Called with the learner after each update, or a list of such functions; training stops if one
                returns True. One with `state_dict` and `load_state_dict` has its state in the learner's checkpoints.
            progress: True for a bar, False for none; None for one where the standard error is a terminal.
            **spelled: `total_timesteps` and `progress_bar`, as stable-baselines3 calls total_steps and progress.

        Raises:
            EnvironmentFault: If an environment raises, returns NaN or never ends. The current update is undone then.
        """
        steps, progress = as_learning(total_steps, progress, spelled)
        steps = int(steps) if isinstance(steps, float) and steps.is_integer() else steps  # 1e5 is meant so
        steps = check_integer("total_steps", steps, 1)
        trained = dict(self.actor.named_parameters())
        freed = [name for name in self._frozen if trained[name].requires_grad]
        if freed:
            raise ValueError(
                f"the parameters {freed} were frozen when the agent was built, and are trainable now: build a new "
                "agent on the policy, or freeze them again"
            )
        if not any(p.requires_grad for p in self.params.values()):
            raise ValueError("all parameters of the policy are frozen: unfreeze at least one")
        call = join_callbacks(callback, "the learner")
        self._callbacks.attach(callback)
        begun = self.steps
        with Progress("steps", steps, self.verbose if progress is None else progress) as shown, self.log as log:
            while self.steps < begun + steps:
                try:
                    self._update()
                    last = self.history.last()
                    log.write_update(last)
                    shown.update(self.steps - begun, {word: last[key] for word, key in SHOWN.items()})
                    if any_asks(self.processes, call(self), self.device):
                        break
                except KeyboardInterrupt:
                    break
        return self.history

    def _update(self) -> None:
        """One update, or none at all: whatever interrupts it, the state is as before."""
        start, before = time.perf_counter(), deepcopy(write_parts(self._parts()))
        try:
            with use_eval_mode(self.actor, self.critic.module):
                row = self._advance()
        except BaseException:
            read_parts(self._parts(), before, "an update")
            self.worlds.begin_anew()
            raise
        self.history.add({**row, "seconds": time.perf_counter() - start})

    def _advance(self) -> dict[str, Any]:
        rollout = self._collect()
        part = BatchPart.of(self.processes, len(rollout))
        params = {name: p for name, p in self.params.items() if p.requires_grad}  # the others were frozen since
        surrogate = Surrogate(self.actor, params, rollout, part, self.natural_step.entropy_weight)
        states, most = rollout.states, self.natural_step.metric_batch
        if most is not None and most < part.total:  # a draw of all processes' states
            chosen = part.choose(
                torch.randperm(part.total, generator=self.generator, device=self.generator.device)[:most]
            )
            states = states[chosen.to(states.device)]
        move = take_step(self.rule, *self._propose(surrogate, states), surrogate)
        self._amount = self.damping.update(self._amount, move.ratio)
        explained = explain_variance(*map(self.processes.gather_rows, (rollout.returns, rollout.values)))
        loss, fitted = self.critic.fit(rollout, part, self.generator)
        self.accidents.meet(move.trouble or (None if fitted else "the critic, fitted to the returns, is not finite"))
        self.width.look_at(rollout.episodes)
        self.rollout = rollout
        self.steps, self.updates = self.steps + part.total, self.updates + 1
        episodes = rollout.episodes
        return {
            "update": self.updates,
            "steps": self.steps,
            "episodes": len(episodes),
            "return": float(np.mean([episode.ret for episode in episodes])) if episodes else None,
            "length": float(np.mean([episode.length for episode in episodes])) if episodes else None,
            **{name: getattr(move, name) for name in COLUMNS if hasattr(move, name)},
            "entropy": float(part.mean(self.head.entropy(rollout.rows).mean())),
            "explained_variance": explained,
            "critic_loss": loss,
        }

    def _set_share(self, share: float) -> None:
        """What one unit of the policy's outputs is, as a share of half the bounds."""
        assert isinstance(self.head, GaussianHead)
        self.head = self.actor.head = replace(self.head, share=share)

    def _collect(self) -> Rollout:
        if self.worlds.observations is None:
            self._begun += 1
        seed = self.rollouts.seed + 7919 * (self._begun - 1) + SEED_DISTANCE * self.processes.rank
        before, size = copy(self.scale.moments), -(-self.batch // self.processes.size)
        with self.processes.failing_together(self.device):
            collected = collect_steps(self.actor, self.worlds, self.scale, size, seed, self._draws)
        self.scale.moments = join_moments(self.processes, before, self.scale.moments)
        shared = self.processes.share_objects([astuple(episode) for episode in self.worlds.take_episodes()])
        episodes = [Episode(*values) for part in shared for values in part]
        discounts = self.rollouts.gamma, self.rollouts.gae_lambda
        return estimate_advantages(collected, self.critic, self.reward_scale, *discounts, episodes)

    def _propose(self, surrogate: Surrogate, states: Tensor) -> tuple[Quadratic, Solution | None]:
        """The step -(F + damping I)^-1 of the loss's gradient, with the exact Fisher along it."""
        space, g = surrogate.space, surrogate.gradient
        if not all_finite(g):
            zeros = space.zeros()
            return Quadratic(zeros, DiagonalOperator(zeros), self._amount, FlatStep(zeros, zeros)), None
        params = {name: self.params[name] for name in space}
        known = self._memory, self.metric, params, states
        operator, memory = update_jointly(self.processes, self.structure, *known)
        if all(map(all_finite, leaves(memory))):
            self._memory = memory
        find_level = partial(self.damping.amount, self._amount)
        system, amount = shift_blocks(operator, find_level) if self.damping.per_block else (operator, None)
        amount = find_level(operator) if amount is None else amount
        solution = self.natural_step.solver.solve(system, g, damping=amount if isinstance(amount, float) else 0.0)
        x, exact = solution.value, operator
        if isinstance(self.structure, Exact):
            image = solution.image - amount * x
        else:
            exact = update_jointly(self.processes, Exact(), None, self.metric, params, states)[0]
            image = exact.mv(x)
        step = FlatStep(x, image).scale_by(self.rate)
        return Quadratic(-g, exact, amount, step, exact.nats, loss=0.0), solution

    @set_modes_aside
    def fisher(self, observations: Any = None) -> Operator:
        """The exact Fisher of the policy, a mean over states.

        Args:
            observations: As the environment gives them, shape (b, ...); None for the states of the last batch.
        """
        if observations is None:
            if self.rollout is None:
                raise ValueError("observations is None and there is no batch yet: call learn(), or pass observations")
            states = self.rollout.states
        else:
            states = self._states(observations)[0]
        with use_eval_mode(self.actor):
            return self.metric.at(self.params, states)

    @torch.no_grad()
    def predict(self, observation: Any, deterministic: bool = True, **spelled: Any) -> tuple[Any, None]:
        """(action, None) for an observation, scaled by what training has seen; ValueError for a wrong shape, or NaN.

        The None is the state of a recurrent policy, which none is here: `action, _ = agent.predict(observation)`.

        Args:
            observation: As the environment gives it, or a batch of them for a batch of actions.
            deterministic: True for the likeliest action, False for a draw, from a generator that training does not use.
            **spelled: `state` and `episode_start`, as stable-baselines3 passes them, are of no use.
        """
        check_prediction(deterministic, spelled)
        states, alone = self._states(observation)
        with use_eval_mode(self.actor):
            rows = run_detached(lambda: self.actor(states))
        draws = self.head.mode(rows) if deterministic else self.head.draw(rows, self._predictions)
        actions = self.head.actions(draws)
        return take_action(actions, 0) if alone else actions, None

    def _states(self, observation: Any) -> tuple[Tensor, bool]:
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
            raise TypeError("observation is a pair with a dict, as env.reset() returns: pass its first part")
        raw = np.asarray(observation)
        shape = self.worlds.observation_space.shape or ()
        alone = raw.shape == shape
        if not alone and raw.shape[1:] != shape:
            raise ValueError(f"observation has shape {raw.shape}, expected {shape}, or (b, ...) for a batch of them")
        rows = self.worlds.encode(raw[None] if alone else raw)
        if not np.isfinite(rows).all():
            raise ValueError("observation is not finite: the policy was not asked")
        return self.scale.states(rows, next(self.actor.parameters())), alone

    @explain_calls
    def evaluate(self, env: Any, episodes: int = 20, *, deterministic: bool = True, seed: int = 0) -> list[float]:
        """The returns of whole episodes, the policy and its scales frozen.

        Args:
            env: As for the learner. In the environments of the training, whose episodes are given up, as in others.
            episodes: How many. Of several environments each gives its share: long ones count as much as short ones.
            deterministic: True for the likeliest actions, False for draws.
            seed: Of the environments.
        """
        episodes = check_integer("episodes", episodes)
        worlds = Environments(env, None if self.worlds.limit == math.inf else self.worlds.limit)
        if worlds.shape != self.worlds.shape:
            raise ValueError(f"env has observations of shape {worlds.shape}, expected {self.worlds.shape}")
        if any(mine is theirs for mine in worlds.envs for theirs in self.worlds.envs):
            self.worlds.begin_anew()
        observations, returns = worlds.start(seed), []
        share, extra = divmod(episodes, worlds.count)
        left = [share + (i < extra) for i in range(worlds.count)]
        like = next(self.actor.parameters())
        with use_eval_mode(self.actor), torch.no_grad():
            while max(left) > 0:
                rows = run_detached(partial(self.actor, self.scale.states(observations, like)))
                draws = self.head.mode(rows) if deterministic else self.head.draw(rows, self._predictions)
                observations = worlds.step(self.head.actions(draws)).following
                for episode in worlds.take_episodes():
                    left[episode.index] -= 1
                    if left[episode.index] >= 0:
                        returns.append(episode.ret)
        return returns

    def save(self, path: str | Path) -> None:
        """All that the next update depends on, for `load` or torch.load(weights_only=True): whole, or not at all.

        Args:
            path: Of the file. Environments with plain attributes are in it; for others `load` begins new episodes.
        """
        write_state_file(self.state_dict(), path)

    @per_agent
    def load(self, path: str | Path) -> PolicyLearner:
        """Continue from `save`, bit for bit on the CPU where the environment could be saved. Returns the learner.

        Args:
            path: Of a file that `save` wrote; ValueError for a damaged one, another kind of file, or other networks.
        """
        self.load_state_dict(read_state_file(path, self.device))
        return self

    def state_dict(self) -> dict[str, Any]:
        """What `save` writes."""
        return {"algorithm": type(self).__name__, **write_parts(self._parts(between_updates=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Args:
            state: What that returned.
        """
        if not isinstance(state, dict) or state.get("algorithm") != type(self).__name__:
            came = state.get("algorithm", "no algorithm") if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"the file holds {came}, expected what {type(self).__name__}.save() wrote")
        parts, saver = self._parts(between_updates=True), f"{type(self).__name__}.save()"
        read_parts(parts, state, saver, optional={"accidents", "callbacks", "width"})

    def _parts(self, between_updates: bool = False) -> dict[str, Any]:
        """What an update changes, with what is saved beside it between two of them."""
        beside = {"history": self.history, "worlds": self.worlds, "callbacks": self._callbacks}
        return {
            "actor": self.actor,
            "critic": self.critic,
            "scale": self.scale.moments,
            "reward_scale": self.reward_scale,
            "generator": self.generator,
            "draws": self._draws,
            "predictions": self._predictions,
            "amount": Attributes(self, "_amount"),
            "memory": Attributes(self, "_memory"),
            "counts": Attributes(self, "steps", "updates", "_begun"),
            "width": self.width,
            "accidents": Attributes(self.accidents, "count", "in_a_row"),
            **(beside if between_updates else {}),
        }


@contextmanager
def use_eval_mode(*modules: nn.Module | None) -> Generator[None]:
    """Inside, modules are in eval mode: dropout off, batch norms with the statistics that they hold."""
    with ExitStack() as stack:
        for module in modules:
            for part in [] if module is None else module.modules():
                stack.callback(setattr, part, "training", part.training)
                part.training = False
        yield


class CallbackStates:
    """What the callbacks of `learn` remember, each under its kind and its place among its kind."""

    def __init__(self) -> None:
        self._callbacks = dict[str, Any]()
        self._waiting = dict[str, Any]()

    def attach(self, callback: Any) -> None:
        """Name those that have a state, and give them what waits for them."""
        listed = callback if isinstance(callback, (list, tuple)) else [callback]
        stateful = [each for each in listed if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]
        kinds = [type(each).__name__ for each in stateful]
        self._callbacks = {f"{kind} {kinds[:i].count(kind)}": stateful[i] for i, kind in enumerate(kinds)}
        for name in self._callbacks.keys() & self._waiting.keys():
            self._callbacks[name].load_state_dict(self._waiting.pop(name))

    def state_dict(self) -> dict[str, Any]:
        """The state of each by its name."""
        return {name: each.state_dict() for name, each in self._callbacks.items()} | self._waiting

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have these states wait until `learn` is given callbacks again."""
        self._waiting = dict(state)


# What training went through, update by update

COLUMNS = (
    "update", "steps", "episodes", "return", "length", "accepted", "kl", "predicted_kl", "gain", "predicted_gain",
    "backtracks", "cg_residual", "cg_steps", "damping", "entropy", "explained_variance", "critic_loss", "seconds",
)  # fmt: skip


class LearningHistory(Columns):
    """Lists of equal length, one entry per update: `history["return"]`, `history["kl"]`, ...

    The columns:

    - `update`, `steps`: how many so far.
    - `episodes`: how many ended in the update's batch.
    - `return`, `length`: means over these episodes; None where none ended.
    - `accepted`: True if the policy moved.
    - `kl`: the mean KL of the update, measured, in nats per state; 0 where the policy did not move.
    - `predicted_kl`: the same by the quadratic model that the step was taken by.
    - `gain`: of the surrogate, measured, in units of the standardised advantage.
    - `predicted_gain`: the same by the linear model.
    - `backtracks`: trials of the line search that were rejected.
    - `cg_residual`: |g - (F + damping I) x| / |g|.
    - `cg_steps`: products of the solver.
    - `damping`: lambda of the solve.
    - `entropy`: of the policy that acted, in nats.
    - `explained_variance`: of the returns, by the critic before it learned from them.
    - `critic_loss`: the critic's mean squared error over the last epoch.
    - `seconds`: of the update.
    """

    def __init__(self) -> None:
        super().__init__(COLUMNS, "updates")

    def add(self, row: dict[str, Any]) -> None:
        """Add one update.

        Args:
            row: A value for every column, by name.

        Raises:
            ValueError: Unless every column has its value.
        """
        if set(row) != set(self):
            raise ValueError(f"row has {sorted(row)}, expected {sorted(self)}")
        for name, value in row.items():
            self[name].append(value)

    def last(self) -> dict[str, Any]:
        """The last update's numbers."""
        return {name: column[-1] for name, column in self.items()}

    def plot(self) -> Any:
        """A matplotlib figure: return, KL against what was predicted, entropy, explained variance, over steps.

        Needs matplotlib.
        """
        from matplotlib.figure import Figure  # an extra: only where a picture is asked for

        figure = Figure(figsize=(9, 5.6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True)
        groups = (("return",), ("kl", "predicted_kl"), ("entropy",), ("explained_variance",))
        for axes, group in zip(panels.flat, groups, strict=True):
            for name in group:
                pairs = [(x, y) for x, y in zip(self["steps"], self[name], strict=True) if y is not None]
                axes.plot([x for x, _ in pairs], [y for _, y in pairs], label=name.replace("_", " "))
            axes.set_ylabel(group[0].replace("_", " "))
        panels[0, 1].legend()
        panels[1, 1].set_ylim(-1, 1.05)
        for axes in panels[1]:
            axes.set_xlabel("steps")
        return figure


# The networks of an agent that was given none: tanh perceptrons

HIDDEN = ((64, 64), (64, 64))  # sizes of the policy's layers and of the critic's


def build_perceptron(
    sizes: list[int], gain: float, activation: type[nn.Module], generator: torch.Generator, like: Tensor
) -> nn.Sequential:
    """Linear layers with orthogonal weights and zero biases; flattens its inputs."""
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (before, after) in enumerate(pairwise(sizes)):
        layer: Any = skip_init(nn.Linear, before, after, dtype=like.dtype)
        nn.init.orthogonal_(layer.weight, 2**0.5 if i < len(sizes) - 2 else gain, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1]).to(like.device)


# How widely real actions are explored at first: half the bounds, or a third of that where episodes last longer

SHARE = 1 / 3
"""Of half the bounds, the width that is tried."""
SURE = 3.0
"""Standard errors by which its mean return must be the higher one."""
UNIT = 1.0
"""Of the environment: a narrower width is not tried, since the second batch does not tell what it costs later on."""
FEWEST = 5
"""Episodes of a batch that decide anything."""


class WidthTrial(Stateful):
    """Tries a third of the width in the second batch, if the task ended all episodes of the first; keeps the better."""

    # A wide start throws a balanced pendulum over. A task whose episodes last until a time limit is left alone: there a
    # wide start is what swings it up.

    STATE = ("share", "left", "wide")

    def __init__(self, set_share: Callable[[float], None], possible: bool) -> None:
        self.set_share = set_share
        self.share, self.left = 1.0, 2 if possible else 0
        self.wide: list[float] = []

    def look_at(self, episodes: Sequence[Episode]) -> None:
        """Take in the episodes of a batch, and choose the width of the next one."""
        returns = [episode.ret for episode in episodes]
        first, second = self.left == 2, self.left == 1
        self.left = 0
        if first and len(returns) >= FEWEST and all(episode.terminated for episode in episodes):
            self.left, self.wide = 1, returns
            self._choose(SHARE)
        elif second and not is_higher(returns, self.wide):
            self._choose(1.0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        share = self.share
        super().load_state_dict(state)
        if self.share != share:
            self.set_share(self.share)

    def _choose(self, share: float) -> None:
        self.share = share
        self.set_share(share)


def is_higher(returns: Sequence[float], others: Sequence[float]) -> bool:
    """True if the mean of the first is the higher one by three standard errors."""
    if len(returns) < FEWEST:
        return False
    gain = float(np.mean(returns) - np.mean(others))
    return gain > SURE * math.sqrt(np.var(returns) / len(returns) + np.var(others) / len(others))
