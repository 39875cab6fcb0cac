"""One natural step of a policy: surrogate, direction, length, and what it really moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.applications.policy.actor import Actor
from natgrad.applications.policy.rollout import Rollout
from natgrad.linalg import all_finite
from natgrad.pure import run_detached
from natgrad.spaces import Params, Space

SLACK = 1e-3
"""A share of the radius left over: another sum order, or another precision, finds the KL within it too."""


@dataclass(frozen=True)
class Move:
    """What an update did to the policy; KL in nats per state, gains in units of the normalised advantage.

    kl, gain: measured over all visited states.   predicted_kl, predicted_gain: of the step taken, by the quadratic and
    the linear model.   ratio: of the first trial, what the damping learns from; NaN where there was none.   residual:
    |g - (F + damping I) x| / |g|.   backtracks: trials that were rejected.
    """

    accepted: bool
    kl: float
    predicted_kl: float
    gain: float
    predicted_gain: float
    ratio: float
    residual: float
    cg_steps: int
    damping: float
    backtracks: int


class Surrogate:
    """L(theta) = mean of p_theta(a|s) / p(a|s) A(s, a) + weight * entropy, and KL(p, p_theta), on a rollout.

    Advantages are standardised. Schulman et al. 2015, eq. 14; the expectation is over the rollout's states.
    """

    def __init__(self, actor: Actor, rollout: Rollout, entropy_weight: float = 0.0) -> None:
        self.actor, self.rollout, self.entropy_weight = actor, rollout, entropy_weight
        with torch.no_grad():
            rows = rollout.rows
            self.log_prob = actor.head.log_prob(rows, rollout.draws)
            self.rows = rows.double()  # KL of a small step is a difference of near-equals
        self.advantages = standardised(rollout.advantages)
        self.value = self._value(rollout.rows)

    def at(self, params: Params) -> Tensor:
        """The action parameters of another policy, (B, width)."""
        return torch.func.functional_call(self.actor, dict(params), (self.rollout.states,))

    def gradient(self, params: Params) -> dict[str, Tensor]:
        """dL / d theta at the policy that acted; parameters that it does not depend on are left out."""
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            value = self._value(self.at(leaves))
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}

    @torch.no_grad()
    def measure(self, params: Params) -> tuple[float, float]:
        """(gain, mean KL) of another policy, in nats per state."""
        rows = run_detached(lambda: self.at(params))
        kl = self.actor.head.kl(self.rows, rows.double()).mean()
        return float(self._value(rows) - self.value), max(float(kl), 0.0) if math.isfinite(float(kl)) else math.nan

    def _value(self, rows: Tensor) -> Tensor:
        ratio = (self.actor.head.log_prob(rows, self.rollout.draws) - self.log_prob).exp()
        value = (ratio * self.advantages).mean()
        if self.entropy_weight:
            value = value + self.entropy_weight * self.actor.head.entropy(rows).mean()
        return value


@dataclass(frozen=True)
class Direction:
    """x ~ (F + damping I)^-1 g (n,), with x^T F x, g^T x and what the solver says."""

    space: Space
    vector: Tensor
    curvature: float
    slope: float
    residual: float
    cg_steps: int
    damping: float

    @property
    def usable(self) -> bool:
        """Whether it goes uphill by a finite amount, and changes the policy."""
        return all_finite(self.vector) and self.slope > 0 and 0 < self.curvature < math.inf

    def from_point(self, params: Params, rate: float) -> dict[str, Tensor]:
        """theta + rate x."""
        step = self.space.unflatten(rate * self.vector)
        return {name: params[name].detach() + step[name] for name in self.space}


def standing(direction: Direction, backtracks: int, ratio: float = math.nan) -> Move:
    """No move: the policy stays as it is."""
    return Move(False, 0.0, 0.0, 0.0, 0.0, ratio, direction.residual, direction.cg_steps, direction.damping, backtracks)


def line_search(
    surrogate: Surrogate, params: Params, direction: Direction, radius: float, shrink: float, trials: int
) -> tuple[Mapping[str, Tensor] | None, Move]:
    """The longest of at most `trials` steps with a real gain and a measured mean KL within the radius, or none.

    It begins where the quadratic model of the KL meets the radius, a = sqrt(2 radius / x^T F x). A trial beyond the
    radius is shortened as if KL went with a^2, and at least by `shrink`. Schulman et al. 2015, appendix C.
    """
    if not direction.usable:
        return None, standing(direction, 0)
    rate, ratio = math.sqrt(2 * radius / direction.curvature), math.nan
    for trial in range(trials):
        point = direction.from_point(params, rate)
        gain, kl = surrogate.measure(point)
        predicted_kl, predicted_gain = rate**2 * direction.curvature / 2, rate * direction.slope
        if trial == 0:
            ratio = (
                min(gain / predicted_gain, predicted_kl / kl if kl > 0 else 1.0) if math.isfinite(gain) else math.nan
            )
        if kl <= radius * (1 - SLACK) and gain > 0:
            return point, taken(direction, gain, kl, predicted_gain, predicted_kl, ratio, trial)
        beyond = math.sqrt(radius / kl) * 0.98 if kl > radius else 1.0
        rate *= min(shrink, beyond) if kl <= 1e3 * radius else shrink**3
    return None, standing(direction, trials, ratio)


def taken(
    direction: Direction, gain: float, kl: float, predicted_gain: float, predicted_kl: float, ratio: float, trial: int
) -> Move:
    """The record of an accepted step."""
    solved = direction.residual, direction.cg_steps, direction.damping
    return Move(True, kl, predicted_kl, gain, predicted_gain, ratio, *solved, trial)


def standardised(values: Tensor) -> Tensor:
    """(v - mean) / std, (B,); zeros where all are equal."""
    centred = values - values.mean()
    return centred / (centred.square().mean().sqrt() + torch.finfo(values.dtype).tiny).clamp(min=1e-8)
