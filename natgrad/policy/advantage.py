"""How much better a batch went than expected: scaled rewards, GAE, and the critic that expects."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import check_followed, run_detached
from natgrad.ground.states import Stateful
from natgrad.optim import Processes, guard_steps
from natgrad.policy.actor import Actor, call_module, describe_outputs, find_channel_order, is_column
from natgrad.policy.environments import Array, Episode
from natgrad.policy.rollout import CollectedSteps, RunningMoments, join_moments
from natgrad.policy.settings import CriticTraining

Value = Callable[[Tensor], Tensor]
LEAST = 0.2  # of the returns' root mean square: a reward that is a whole return stays at half the cut


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


@torch.no_grad()
def estimate_advantages(
    collected: CollectedSteps, value: Value, scale: RewardScale, gamma: float, lam: float, episodes: list[Episode]
) -> Rollout:
    """Advantages by GAE under the critic, invalid steps left out."""
    steps, ends = collected
    *tensors, rewards, terminated, ended, valid = zip(*steps, strict=True)
    states, draws, rows = (torch.stack(column).flatten(0, 1) for column in tensors)
    rewards, terminated, ended, valid = map(np.stack, (rewards, terminated, ended, valid))  # (steps, n)
    all_values = run_detached(lambda: value(torch.cat([states, *ends.values()]))).split([len(states), len(ends)])
    values, bootstraps = (part.double().cpu().numpy() for part in all_values)
    values = values.reshape(rewards.shape)
    following = np.zeros_like(values)
    following[:-1] = values[1:]
    for place, bootstrap in zip(ends, bootstraps, strict=True):
        following[place] = bootstrap
    advantages = gae(scale(rewards, ended, valid), values, following, terminated, ended, gamma, lam)
    mask = torch.from_numpy(valid.reshape(-1)).to(states.device)

    def flatten(numbers: Array) -> Tensor:
        return torch.from_numpy(numbers.reshape(-1)).to(states.device, states.dtype)[mask]

    judged = flatten(values), flatten(advantages), flatten(advantages + values)
    return Rollout(states[mask], draws[mask], rows[mask], *judged, episodes)


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
    rewards, values, following = map(np.asarray, (rewards, values, following))
    terminated, ended = (np.asarray(each, dtype=bool) for each in (terminated, ended))  # ~ of a 1 is -2
    deltas = rewards + gamma * following * ~terminated - values
    weights = gamma * lam * ~ended
    advantages = np.empty_like(deltas)
    carried = np.zeros_like(deltas[0]) if len(deltas) else deltas  # A_t+1
    for t in reversed(range(len(deltas))):
        carried = deltas[t] + weights[t] * carried
        advantages[t] = carried
    return advantages


def explain_variance(returns: Tensor, values: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant; NaN for equal returns."""
    spread = returns.var()
    return float(1 - (returns - values).var() / spread) if bool(spread > 0) else float("nan")


class RewardScale(Stateful):
    """Rewards over the standard deviation of the discounted return so far, sign kept, cut at +-10.

    The divisor is at least LEAST of the returns' root mean square: rewards of -100 and -99 differ below the cut.
    """

    STATE = ("moments", "running")

    def __init__(self, count: int, gamma: float, on: bool, processes: Processes | None = None) -> None:
        self.on, self.gamma, self.processes = on, gamma, processes
        self.moments, self.running = RunningMoments(()), np.zeros(count)

    def __call__(self, rewards: Array, ended: Array, valid: Array) -> Array:
        """(steps, n) -> (steps, n): takes the batch in, then scales it as one."""
        if not self.on:
            return rewards
        seen = np.empty_like(rewards)
        for t in range(len(rewards)):
            self.running = np.where(valid[t], self.gamma * self.running + rewards[t], self.running)
            seen[t] = self.running
            self.running = np.where(ended[t], 0.0, self.running)
        before = copy(self.moments)
        self.moments.update(seen[valid])
        if self.processes is not None:
            self.moments = join_moments(self.processes, before, self.moments)
        level = np.hypot(self.moments.mean, np.sqrt(self.moments.var))
        return np.clip(rewards / np.maximum(self.moments.std, LEAST * level), -10.0, 10.0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; running returns of another number of environments begin anew."""
        begun = np.zeros_like(self.running)
        super().load_state_dict(state)
        self.running = self.running if self.running.shape == begun.shape else begun


@dataclass(frozen=True)
class BatchPart:
    """This process's transitions of a batch of all processes."""

    processes: Processes  # what exchanges
    first: int  # the place of its first one in the batch
    count: int  # its transitions
    total: int  # those of all

    @staticmethod
    def of(processes: Processes, count: int) -> BatchPart:
        """The part of a process that has so many transitions."""
        counts = [int(count) for (count,) in processes.share_numbers([count], torch.device("cpu"))]
        return BatchPart(processes, sum(counts[: processes.rank]), count, sum(counts))

    def mean(self, own: Tensor) -> Tensor:
        """The mean over all transitions, from the one over these."""
        return self.processes.sum(own * (self.count / self.total))

    def choose(self, places: Tensor) -> Tensor:
        """Of some places in the whole batch, those that are here, counted from this process's first."""
        here = places - self.first
        return here[(here >= 0) & (here < self.count)]


# The critic: a value of every state, fitted to the returns by Adam


class Critic:
    """V(states) -> (b,), and how it is trained: passes of Adam over minibatches, squared error."""

    def __init__(
        self,
        module: nn.Module | None,
        actor: Actor,
        acting: Collection[Tensor],
        training: CriticTraining,
        order: tuple[int, ...],
    ) -> None:
        self.module, self.actor, self.training, self.order = module, actor, training, order
        # A trunk that policy and critic share moves by the natural step alone: fitting values moves no action.
        reached = set(map(id, acting))
        own = (actor if module is None else module).named_parameters()
        self.named = {name: p for name, p in own if p.requires_grad and id(p) not in reached}
        self.params = list(self.named.values())
        if not self.params:
            raise ValueError("the critic has no trainable parameter of its own: every one also moves the actions")
        # Adam's fused kernel takes a third of the time on small networks
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in self.params)
        self.optimizer = torch.optim.Adam(self.params, training.lr, eps=1e-5, fused=fused)

    def __call__(self, states: Tensor) -> Tensor:
        """(b, ...) -> (b,)."""
        if self.module is None:
            return self.actor.value(states)
        return self.module(states.permute(self.order)).reshape(-1)

    def fit(self, rollout: Rollout, part: BatchPart, generator: torch.Generator) -> tuple[float, bool]:
        """Train on a rollout's returns; all of it is taken back where a parameter would not be finite."""
        loss, stands = guard_steps(self.optimizer, lambda: self._pass_through(rollout, part, generator))
        return loss, stands and math.isfinite(loss)

    def _pass_through(self, rollout: Rollout, part: BatchPart, generator: torch.Generator) -> float:
        loss = 0.0
        for _ in range(self.training.epochs):
            order = torch.randperm(part.total, generator=generator, device=generator.device).to(rollout.states.device)
            losses = [self._step(rollout, part, rows) for rows in order.split(self.training.batch)]
            loss = float(torch.stack(losses).mean())
        return loss

    def _step(self, rollout: Rollout, part: BatchPart, places: Tensor) -> Tensor:
        rows = places if part.processes.size == 1 else part.choose(places)
        loss, gradients = self._differentiate(rollout, rows)
        if part.processes.size > 1:
            loss, gradients = self._join(part, len(rows) / len(places), loss, gradients)
        for parameter, gradient in zip(self.params, gradients, strict=True):
            parameter.grad = gradient
        if all_finite(loss):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _differentiate(self, rollout: Rollout, rows: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The mean squared error of some rows, and its gradient."""
        if not len(rows):
            return rollout.returns.new_zeros(()), [None] * len(self.params)
        loss = nn.functional.mse_loss(self(rollout.states[rows]), rollout.returns[rows])
        named = {name: p for name, p in self.named.items() if p.requires_grad}  # the others were frozen since
        if not named:
            return loss, [None] * len(self.params)
        check_followed(loss, named)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return loss, [dict(zip(named, gradients, strict=True)).get(name) for name in self.named]

    def _join(
        self, part: BatchPart, share: float, loss: Tensor, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Those of the rows of all processes, from a mean over this one's that weighs `share`."""
        named = zip(self.named, self.params, gradients, strict=True)
        own = {name: (torch.zeros_like(p) if g is None else share * g).double() for name, p, g in named}
        sums = part.processes.sum_entries({"": share * loss.detach().double(), **own})
        return sums[""].to(loss), [sums[name].to(p) for name, p in self.named.items()]

    def state_dict(self) -> dict[str, Any]:
        """The module, where it is one of its own, and the optimiser."""
        own = {} if self.module is None else {"module": self.module.state_dict()}
        return {"optimizer": self.optimizer.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if self.module is not None:
            self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])


def check_values(module: nn.Module, example: Tensor, size: int) -> tuple[int, ...]:
    """The order of axes in which the module takes states. ValueError unless it gives one value per state."""
    states = example.expand(size, *example.shape).contiguous()
    order = find_channel_order(module, states)
    values = run_detached(lambda: call_module(module, states.permute(order)))
    if not is_column(values, size):
        raise ValueError(
            f"critic returned {describe_outputs(values)}, expected ({size},) or ({size}, 1) for {size} states"
        )
    return order
