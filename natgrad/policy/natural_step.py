"""One natural step of a policy: what is proposed, how far a rule goes, and what it really moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import all_finite, stays_finite
from natgrad.ground.spaces import Space
from natgrad.operators import DiagonalOperator
from natgrad.policy.surrogate import SurrogateLoss, Trial
from natgrad.rules import FlatStep, Quadratic, Rule, Step, leads_down
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
    residual: float  # |g - (F + damping I) x| / |g|
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
    point, trouble, vector = None, find_trouble(proposal), flat(step).vector
    if bool(vector.any()):
        trial, point = loss_at.look_at(vector), loss_at.move(vector)
        if not trial.is_finite or not all(stays_finite(loss_at.params[name], p) for name, p in point.items()):
            point, trouble = None, "the policy after the step is not finite"
    elif loss_at.trials and not any(trial.is_finite for trial in loss_at.trials):
        trouble = "the policy was not finite at any trial of the step"
    return point, describe_move(proposal, loss_at.trials, accepted=point is not None, trouble=trouble)


def flat(step: Step) -> FlatStep:
    """The step, which is a vector (n,) with policies."""
    assert isinstance(step, FlatStep)
    return step


def find_trouble(proposal: Proposal) -> str | None:
    """What is not finite in a proposal."""
    if proposal.solution is None:
        return "the gradient of the surrogate is not finite"
    step = flat(proposal.model.proposal)
    if proposal.solution.status is Status.NON_FINITE or not all_finite(step.vector):
        return "the solver's step is not finite"
    return None if all_finite(step.image) else "the metric along the step is not finite"


def describe_move(proposal: Proposal, trials: list[Trial], *, accepted: bool, trouble: str | None) -> Move:
    """The record of the last trial, or of no move."""
    ratio = measure_ratio(proposal.model, trials[0]) if trials else math.nan
    steps = 0 if proposal.solution is None else proposal.solution.steps
    level = float(torch.as_tensor(proposal.model.damping).mean())  # of blocks of their own: in the mean
    solved = proposal.residual, steps, level
    if not accepted:
        return Move(False, 0.0, 0.0, 0.0, 0.0, ratio, *solved, len(trials), trouble)
    gain, kl = predict(proposal.model, trials[-1].vector)
    return Move(True, trials[-1].kl, kl, trials[-1].gain, gain, ratio, *solved, len(trials) - 1)


def measure_ratio(model: Quadratic, trial: Trial) -> float:
    """The smaller of real over predicted gain and predicted over real KL; NaN where one was not finite."""
    if not trial.is_finite:
        return math.nan
    gain, kl = predict(model, trial.vector)
    return min(trial.gain / gain, kl / trial.kl if trial.kl > 0 else 1.0)


def predict(model: Quadratic, vector: Tensor) -> tuple[float, float]:
    """The gain by the slope, and the KL by the quadratic model, of a multiple of the proposal."""
    gain, whole = -float(model.slope(FlatStep(vector, vector))), -float(model.slope(model.proposal))
    return gain, (gain / whole) ** 2 * float(model.kl(model.proposal))
