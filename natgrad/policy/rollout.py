"""From steps in environments to a batch: what was seen, done, and how much better it went than expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import run_detached
from natgrad.policy.actor import Actor
from natgrad.policy.environments import Environments, Episode
from natgrad.policy.normalise import ObservationScale, RewardScale

Change = Callable[[Tensor], Tensor]

ELEMENTWISE: dict[type[nn.Module], Change] = {nn.Tanh: torch.tanh, nn.ReLU: torch.relu, nn.Identity: lambda x: x}


def prepare_acting(actor: Actor) -> Change:
    """states (b, ...) -> rows (b, width), without a graph, by the actor's parameters of now."""
    # A plain perceptron of few units spends two thirds of its time in the calls around its products: they are made
    # directly, with the same numbers to the last bit. Every other network is called as it is.
    changes = list_changes(actor)
    if changes is None:
        return lambda states: run_detached(partial(actor, states))

    def act(states: Tensor) -> Tensor:
        found = states.permute(actor.order).flatten(1)
        for change in changes:
            found = change(found)
        return actor.rows(found).detach()

    return torch.no_grad()(act)


def list_changes(actor: Actor) -> list[Change] | None:
    """The layers of a plain perceptron as functions; None for another network, or where somebody listens to it."""
    policy = actor.policy
    if type(policy) is not nn.Sequential or actor.valued or any(map(has_hooks, actor.modules())):
        return None
    parts = list(policy)
    if not parts or type(parts[0]) is not nn.Flatten or (parts[0].start_dim, parts[0].end_dim) != (1, -1):
        return None
    changes: list[Change] = []
    for part in parts[1:]:
        if type(part) is nn.Linear:
            bias = None if part.bias is None else part.bias.detach()
            changes.append(partial(functional.linear, weight=part.weight.detach(), bias=bias))
        elif type(part) in ELEMENTWISE:
            changes.append(ELEMENTWISE[type(part)])
        else:
            return None
    return changes


def has_hooks(module: nn.Module) -> bool:
    """Whether a forward pass of the module runs functions that were registered on it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


# From steps in environments to a batch: what was seen, done, and how much better it went than expected

Array = np.ndarray
Value = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rollout:
    """A batch of B transitions, all environments together, steps without an action left out.

    Attributes:
        states: As the networks saw them, shape (B, ...).
        draws: Of the head, shape (B, ...).
        rows: Action parameters of the policy that acted, shape (B, width).
        values: The critic's, before it learned from the batch, shape (B,).
        advantages: By `gae`, shape (B,), in units of the scaled rewards.
        returns: advantages + values, shape (B,).
        episodes: Those that ended in the batch.
    """

    states: Tensor
    draws: Tensor
    rows: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    episodes: list[Episode]

    def __len__(self) -> int:
        return len(self.states)


def explain_variance(returns: Tensor, values: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant; NaN for equal returns."""
    spread = returns.var()
    return float(1 - (returns - values).var() / spread) if bool(spread > 0) else float("nan")


@dataclass
class CollectedSteps:
    """Raw steps, lists over time; `ends` holds the successors of episodes' last steps, by (step, environment)."""

    states: list[Tensor]
    draws: list[Tensor]
    rows: list[Tensor]
    rewards: list[Array]
    terminated: list[Array]
    ended: list[Array]
    valid: list[Array]
    ends: dict[tuple[int, int], Tensor]


@torch.no_grad()
def collect(
    actor: Actor, worlds: Environments, scale: ObservationScale, size: int, seed: int, generator: torch.Generator
) -> CollectedSteps:
    """At least `size` transitions with the policy as it is, and as few more as come in step."""
    # While no episode has ended in environments without a time limit, it goes on: until one does, or they are found to
    # be endless. So nothing is learned from a task that never ends. Observations enter the running moments as they
    # come, and are scaled by the moments of then.
    like = next(actor.parameters())
    kept = CollectedSteps([], [], [], [], [], [], [], {})
    fresh = worlds.observations is None
    observations = worlds.start(seed)
    if fresh:
        scale.learn(observations)
    count, act = 0, prepare_acting(actor)

    def scale_states(values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(scale(values))).to(like.device, like.dtype)

    while count < size or not worlds.patient:
        states = scale_states(observations)
        rows = act(states)
        if not all_finite(rows):
            raise ValueError("the policy's outputs are not finite: look for a NaN in its parameters, or in a layer")
        draws = actor.head.draw(rows, generator)
        stepped = worlds.step(actor.head.actions(draws))
        over = stepped.is_over
        time, count = len(kept.states), count + int(np.count_nonzero(stepped.valid))
        last = count >= size and worlds.patient
        if last or over.any():
            for i in np.flatnonzero((stepped.truncated & ~stepped.terminated) | (last & ~over)):
                kept.ends[time, int(i)] = scale_states(stepped.successors[i : i + 1])
        kept.states.append(states)
        kept.draws.append(draws)
        kept.rows.append(rows)
        kept.rewards.append(stepped.rewards)
        kept.terminated.append(stepped.terminated)
        kept.ended.append(over)
        kept.valid.append(stepped.valid)
        observations = stepped.following
        scale.learn(observations)
    return kept


@torch.no_grad()
def estimate_advantages(
    kept: CollectedSteps, value: Value, scale: RewardScale, gamma: float, lam: float, episodes: list[Episode]
) -> Rollout:
    """Advantages by GAE under the critic, invalid steps left out."""
    states = torch.stack(kept.states)  # (T, n, ...)
    steps, count = states.shape[:2]
    ends = list(kept.ends.values())
    found = run_detached(lambda: value(torch.cat([states.flatten(0, 1), *ends])))
    values = found[: steps * count].view(steps, count).double().cpu().numpy()
    following = np.zeros_like(values)
    following[:-1] = values[1:]
    ended, valid = np.stack(kept.ended), np.stack(kept.valid)
    for (t, i), bootstrap in zip(kept.ends, found[steps * count :].double().cpu().numpy(), strict=True):
        following[t, i] = bootstrap
    rewards = scale(np.stack(kept.rewards), ended, valid)
    advantages = gae(rewards, values, following, np.stack(kept.terminated), ended, gamma, lam)
    mask = torch.from_numpy(valid.reshape(-1)).to(states.device)

    def flatten(numbers: Array) -> Tensor:
        return torch.from_numpy(numbers.reshape(-1)).to(states.device, states.dtype)[mask]

    def join_steps(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).flatten(0, 1)[mask]

    return Rollout(
        states.flatten(0, 1)[mask],
        join_steps(kept.draws),
        join_steps(kept.rows),
        flatten(values),
        flatten(advantages),
        flatten(advantages + values),
        episodes,
    )


def gae(
    rewards: Array, values: Array, following: Array, terminated: Array, ended: Array, gamma: float, lam: float
) -> Array:
    """A_t = delta_t + gamma lam A_t+1 within an episode, where delta_t = r_t + gamma V(s_t+1) - V(s_t).

    Args:
        rewards: r, shape (steps, n) for n environments.
        values: V of the state before each step, shape (steps, n).
        following: V of the state after each step and before any reset, shape (steps, n). It counts where an episode was
            truncated, and does not where it terminated.
        terminated: True where the task ended the episode, shape (steps, n).
        ended: True where the episode ended, by the task or by a time limit, shape (steps, n).
        gamma: Discount of rewards, in [0, 1].
        lam: Weight of the later steps, in [0, 1]: 0 takes one step's advantage, 1 the whole return's.

    Returns:
        Advantages A, shape (steps, n).

    Reference:
        Schulman, Moritz, Levine, Jordan & Abbeel 2016, eq. 11-16.

    Example:
        >>> import numpy as np
        >>> from natgrad.policy import gae
        >>> zeros, over = np.zeros((2, 1)), np.array([[False], [True]])
        >>> gae(np.ones((2, 1)), zeros, zeros, over, over, gamma=0.5, lam=1.0)
        array([[1.5],
               [1. ]])
    """
    deltas = rewards + gamma * following * ~terminated - values
    weights = gamma * lam * ~ended
    advantages = np.empty_like(deltas)
    carried = np.zeros_like(deltas[0]) if len(deltas) else deltas
    for t in reversed(range(len(deltas))):
        carried = deltas[t] + weights[t] * carried
        advantages[t] = carried
    return advantages
