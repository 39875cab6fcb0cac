"""One natural step of a policy on a batch: the surrogate of its return, how far a rule goes, and what really moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import all_finite, stays_finite
from natgrad.ground.pure import call_with, run_detached
from natgrad.ground.spaces import Params, Space
from natgrad.operators import DiagonalOperator
from natgrad.policy.actor import Actor
from natgrad.policy.advantage import BatchPart, Rollout
from natgrad.rules import FlatStep, Quadratic, Rule, Step, Vector, leads_down
from natgrad.solvers import Solution, Status


@dataclass(frozen=True)
class Move:
    """What an update did to the policy; KL in nats per state, gains in units of the standardised advantage."""

    accepted: bool  # whether the policy moved
    kl: float  # measured over all visited states
    predicted_kl: float  # of the step taken, by the quadratic model
    gain: float  # of the surrogate, measured
    predicted_gain: float  # of the step taken, by the linear model
    ratio: float  # of the first trial, what the damping learns from; NaN where there was none
    cg_residual: float  # |g - (F + damping I) x| / |g|
    cg_steps: int  # products of the solver
    damping: float  # lambda of the solve
    backtracks: int  # trials that were rejected
    trouble: str | None = None  # what was not finite, so that the policy stays as it was; None where all was well


@dataclass(frozen=True)
class Proposal:
    """A natural step before it has a length."""

    space: Space  # the parameters that the surrogate L depends on
    model: Quadratic  # of the loss -L, with x = (F + damping I)^-1 dL/dtheta at its rate as the proposal
    solution: Solution | None  # the solver's; None where the gradient was not finite

    @property
    def residual(self) -> float:
        """|g - (F + damping I) x| / |g|, NaN where nothing was solved."""
        norm = self.model.gradient.norm()
        if self.solution is None:
            return math.nan
        return float(self.solution.residual / norm) if bool(norm > 0) else 0.0


def propose_nothing(space: Space, damping: float) -> Proposal:
    """What stands for a step where the gradient is not finite: none."""
    zeros = space.zeros()
    return Proposal(space, Quadratic(zeros, DiagonalOperator(zeros), damping, FlatStep(zeros, zeros)), None)


def take_step(rule: Rule, proposal: Proposal, loss_at: SurrogateLoss) -> tuple[Mapping[str, Tensor] | None, Move]:
    """The policy's parameters where the rule ends, or None where it stays, and what was moved."""
    # A step after which the policy, or what it gives, is not finite is not taken.
    model = proposal.model
    step = rule.step(model, loss_at, {})[0] if leads_down(model) else model.nothing()
    point, trouble, vector = None, find_trouble(proposal), as_flat_step(step).vector
    if bool(vector.any()):
        trial, point = loss_at.look_at(vector), loss_at.move(vector)
        if not trial.is_finite or not all(stays_finite(loss_at.params[name], p) for name, p in point.items()):
            point, trouble = None, "the policy after the step is not finite"
    elif loss_at.trials and not any(trial.is_finite for trial in loss_at.trials):
        trouble = "the policy was not finite at any trial of the step"
    return point, describe_move(proposal, loss_at.trials, accepted=point is not None, trouble=trouble)


def as_flat_step(step: Step) -> FlatStep:
    """The step, which is a vector (n,) with policies."""
    assert isinstance(step, FlatStep)
    return step


def find_trouble(proposal: Proposal) -> str | None:
    """What is not finite in a proposal."""
    if proposal.solution is None:
        return "the gradient of the surrogate is not finite"
    step = as_flat_step(proposal.model.proposal)
    if proposal.solution.status is Status.NON_FINITE or not all_finite(step.vector):
        return "the solver's step is not finite"
    return None if all_finite(step.image) else "the metric along the step is not finite"


def describe_move(proposal: Proposal, trials: list[Trial], *, accepted: bool, trouble: str | None) -> Move:
    """The record of the last trial, or of no move."""
    ratio = measure_ratio(proposal.model, trials[0]) if trials and trials[0].is_finite else math.nan
    steps = 0 if proposal.solution is None else proposal.solution.steps
    level = float(torch.as_tensor(proposal.model.damping).mean())  # of blocks of their own: in the mean
    solved = proposal.residual, steps, level
    if not accepted:
        return Move(False, 0.0, 0.0, 0.0, 0.0, ratio, *solved, len(trials), trouble)
    gain, kl = predict_move(proposal.model, trials[-1].vector)
    return Move(True, trials[-1].kl, kl, trials[-1].gain, gain, ratio, *solved, len(trials) - 1)


def measure_ratio(model: Quadratic, trial: Trial) -> float:
    """The smaller of real over predicted gain and predicted over real KL."""
    gain, kl = predict_move(model, trial.vector)
    return min(trial.gain / gain, kl / trial.kl if trial.kl > 0 else 1.0)


def predict_move(model: Quadratic, vector: Tensor) -> tuple[float, float]:
    """The gain by the slope, and the KL by the quadratic model, of a multiple of the proposal."""
    # the vector is s times the proposal: its gain is s times, its KL s^2 times that of the proposal
    gain, proposed = -float(model.slope(FlatStep(vector, vector))), -float(model.slope(model.proposal))
    return gain, (gain / proposed) ** 2 * float(model.kl(model.proposal))


# The surrogate of the expected return on a rollout, as the loss that a rule lowers


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
        self.advantages = standardise_values(rollout.advantages, part)
        self.value = self._value(rollout.rows)  # here, as all that is a mean over this process's states

    def at(self, params: Params) -> Tensor:
        """The action parameters of another policy, (B, width)."""
        return call_with(self.actor, params, self.rollout.states)

    def gradient(self, params: Params) -> dict[str, Tensor]:
        """dL / d theta at the policy that acted; parameters that it does not depend on are left out."""
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            value = self._value(self.at(leaves))
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        return {name: self.part.mean(g) for name, g in zip(leaves, gradients, strict=True) if g is not None}

    @torch.no_grad()
    def measure(self, params: Params) -> tuple[float, float]:
        """(gain, mean KL) of another policy, in nats per state."""
        rows = run_detached(lambda: self.at(params))
        kl = self.part.mean(self.actor.head.kl(self.rows, rows.double()).mean())
        gain = float(self.part.mean(self._value(rows) - self.value))
        return gain, max(float(kl), 0.0) if math.isfinite(float(kl)) else math.nan

    def _value(self, rows: Tensor) -> Tensor:
        # eq. 14, with the states of the rollout: E_a~p [p_theta / p A]
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


def standardise_values(values: Tensor, part: BatchPart) -> Tensor:
    """(v - mean) / std over all processes' values, (B,); zeros where all are equal."""
    centred = values - part.mean(values.mean())
    return centred / (part.mean(centred.square().mean()).sqrt() + torch.finfo(values.dtype).tiny).clamp(min=1e-8)
