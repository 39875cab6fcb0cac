"""The surrogate of a policy's expected return on a rollout, as the loss that a rule lowers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.pure import call_with, run_detached
from natgrad.ground.spaces import Params, Space
from natgrad.policy.actor import Actor
from natgrad.policy.joined_rollouts import BatchPart
from natgrad.policy.rollout import Rollout
from natgrad.rules import Vector


class Surrogate:
    """L(theta) = mean of p_theta(a|s) / p(a|s) A(s, a) + weight * entropy, and KL(p, p_theta), on a rollout.

    Advantages are standardised. Schulman et al. 2015, eq. 14; the expectation is over the rollout's states.
    """

    def __init__(self, actor: Actor, rollout: Rollout, part: BatchPart, entropy_weight: float = 0.0) -> None:
        self.actor, self.rollout, self.part, self.entropy_weight = actor, rollout, part, entropy_weight
        with torch.no_grad():
            rows = rollout.rows
            self.log_prob = actor.head.log_prob(rows, rollout.draws)
            self.rows = rows.double()  # KL of a small step is a difference of near-equals
        self.advantages = standardise(rollout.advantages, part)
        self.value = self._value(rollout.rows)  # here, as all that is a mean over this process's states

    def at(self, params: Params) -> Tensor:
        """The action parameters of another policy, (B, width)."""
        return call_with(self.actor, params, self.rollout.states)

    def gradient(self, params: Params) -> dict[str, Tensor]:
        """dL / d theta at the policy that acted; parameters that it does not depend on are left out."""
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            value = self._value(self.at(leaves))
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        own = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
        return {name: self.part.mean(g) for name, g in own.items()}

    @torch.no_grad()
    def measure(self, params: Params) -> tuple[float, float]:
        """(gain, mean KL) of another policy, in nats per state."""
        rows = run_detached(lambda: self.at(params))
        kl = self.part.mean(self.actor.head.kl(self.rows, rows.double()).mean())
        gain = float(self.part.mean(self._value(rows) - self.value))
        return gain, max(float(kl), 0.0) if math.isfinite(float(kl)) else math.nan

    def _value(self, rows: Tensor) -> Tensor:
        ratio = (self.actor.head.log_prob(rows, self.rollout.draws) - self.log_prob).exp()
        value = (ratio * self.advantages).mean()
        if self.entropy_weight:
            value = value + self.entropy_weight * self.actor.head.entropy(rows).mean()
        return value


@dataclass(frozen=True)
class Trial:
    """A policy that a rule looked at."""

    vector: Tensor  # the step d to it, shape (n,)
    gain: float  # L(theta + d) - L(theta), in units of the standardised advantage; NaN where it is not finite
    kl: float  # the mean KL that d moves, in nats per state; NaN where it is not finite

    @property
    def is_finite(self) -> bool:
        """Whether both numbers are."""
        return math.isfinite(self.gain) and math.isfinite(self.kl)


class SurrogateLoss:
    """d -> L(theta) - L(theta + d), the loss that a rule lowers, with the KL that d moves; keeps every trial."""

    def __init__(self, surrogate: Surrogate, params: Params, space: Space) -> None:
        self.surrogate, self.params, self.space = surrogate, params, space
        self.trials: list[Trial] = []

    def __call__(self, vector: Vector) -> float:
        """The loss at theta + d, NaN where it is not finite."""
        return self.measure(vector)[0]

    def measure(self, vector: Vector) -> tuple[float, float]:
        """The loss at theta + d, and the mean KL that d moves in nats per state."""
        assert isinstance(vector, Tensor)
        gain, kl = self.surrogate.measure(self.move(vector))
        self.trials.append(Trial(vector, gain, kl))
        return -gain, kl

    def look_at(self, vector: Tensor) -> Trial:
        """The trial at d; what was measured last is not measured again."""
        if not self.trials or not torch.equal(self.trials[-1].vector, vector):
            self.measure(vector)
        return self.trials[-1]

    def move(self, vector: Tensor) -> dict[str, Tensor]:
        """theta + d."""
        step = self.space.unflatten(vector)
        return {name: self.params[name].detach() + step[name] for name in self.space}


def standardise(values: Tensor, part: BatchPart) -> Tensor:
    """(v - mean) / std over all processes' values, (B,); zeros where all are equal."""
    centred = values - part.mean(values.mean())
    return centred / (part.mean(centred.square().mean()).sqrt() + torch.finfo(values.dtype).tiny).clamp(min=1e-8)
