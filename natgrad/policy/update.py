"""One natural step of a policy on a batch: the surrogate of its return, how far a rule goes, and what really moved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import all_finite, stays_finite
from natgrad.ground.pure import call_with, run_detached
from natgrad.ground.spaces import Params, Space
from natgrad.policy.actor import Actor
from natgrad.policy.advantage import BatchPart, Rollout
from natgrad.rules import FlatStep, Quadratic, Rule, Vector, leads_down
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


def take_step(rule: Rule, model: Quadratic, solution: Solution | None, surrogate: Surrogate) -> Move:
    """Move the policy's parameters to where the rule ends, or leave them where they are.

    solution: the solver's, of the model's proposal; None where the gradient is not finite.
    """
    # A step after which the policy, or what it gives, is not finite is not taken.
    step, proposal = rule.step(model, surrogate, {})[0] if leads_down(model) else model.nothing(), model.proposal
    assert isinstance(step, FlatStep) and isinstance(proposal, FlatStep)  # noqa: PT018 a vector (n,) with policies
    point = trouble = None
    if solution is None:
        trouble = "the gradient of the surrogate is not finite"
    elif solution.status is Status.NON_FINITE or not all_finite(proposal.vector):
        trouble = "the solver's step is not finite"
    elif not all_finite(proposal.image):
        trouble = "the metric along the step is not finite"
    if bool(step.vector.any()):
        trial, point = surrogate.look_at(step.vector), surrogate.move(step.vector)
        if not trial.is_finite or not all(stays_finite(surrogate.params[name], p) for name, p in point.items()):
            point, trouble = None, "the policy after the step is not finite"
    elif surrogate.trials and not any(trial.is_finite for trial in surrogate.trials):
        trouble = "the policy was not finite at any trial of the step"
    if point is not None:
        with torch.no_grad():
            for name, value in point.items():
                surrogate.params[name].copy_(value)
    return describe_move(model, solution, surrogate.trials, accepted=point is not None, trouble=trouble)


def describe_move(
    model: Quadratic, solution: Solution | None, trials: list[Trial], *, accepted: bool, trouble: str | None
) -> Move:
    """The record of the last trial, or of no move."""
    ratio = residual = math.nan
    if trials and trials[0].is_finite:
        gain, kl = predict_move(model, trials[0].vector)
        ratio = min(trials[0].gain / gain, kl / trials[0].kl if trials[0].kl > 0 else 1.0)
    if solution is not None:
        norm = model.gradient.norm()
        residual = float(solution.residual / norm) if bool(norm > 0) else 0.0
    level = float(torch.as_tensor(model.damping).mean())  # of blocks of their own: in the mean
    solved = ratio, residual, 0 if solution is None else solution.steps, level
    if not accepted:
        return Move(False, 0.0, 0.0, 0.0, 0.0, *solved, len(trials), trouble)
    gain, kl = predict_move(model, trials[-1].vector)
    return Move(True, trials[-1].kl, kl, trials[-1].gain, gain, *solved, len(trials) - 1)


def predict_move(model: Quadratic, vector: Tensor) -> tuple[float, float]:
    """The gain by the slope, and the KL by the quadratic model, of a multiple of the proposal."""
    # the vector is s times the proposal: its gain is s times, its KL s^2 times that of the proposal
    gain, proposed = -float(model.slope(FlatStep(vector, vector))), -float(model.slope(model.proposal))
    return gain, (gain / proposed) ** 2 * float(model.kl(model.proposal))


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


class Surrogate:
    """d -> L(theta) - L(theta + d), the loss that a rule lowers, with the KL that d moves; keeps every trial.

    L(theta) = mean of p_theta(a|s) / p(a|s) A(s, a) + weight * entropy over a rollout's states, with standardised
    advantages: Schulman et al. 2015, eq. 14.
    """

    def __init__(
        self, actor: Actor, params: Params, rollout: Rollout, part: BatchPart, entropy_weight: float = 0.0
    ) -> None:
        self.actor, self.params, self.rollout, self.part = actor, params, rollout, part
        self.entropy_weight = entropy_weight
        self.trials: list[Trial] = []
        with torch.no_grad():
            self.log_prob = actor.head.log_prob(rollout.rows, rollout.draws)
        self.rows = rollout.rows.double()  # KL of a small step is a difference of near-equals
        centred = rollout.advantages - part.mean(rollout.advantages.mean())
        spread = part.mean(centred.square().mean()).sqrt() + torch.finfo(centred.dtype).tiny
        self.advantages = centred / spread.clamp(min=1e-8)  # zeros where all are equal
        self.value = self._value(rollout.rows)  # here, as all that is a mean over this process's states
        # dL / d theta at the policy that acted; parameters that it does not depend on are left out
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            value = self._value(call_with(actor, leaves, rollout.states))
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        gradient = {name: part.mean(g) for name, g in zip(leaves, gradients, strict=True) if g is not None}
        self.space = Space({name: params[name] for name in gradient})
        self.gradient = self.space.flatten(gradient)

    def __call__(self, vector: Vector) -> float:
        """The loss at theta + d, NaN where it is not finite."""
        return self.measure(vector)[0]

    @torch.no_grad()
    def measure(self, vector: Vector) -> tuple[float, float]:
        """The loss at theta + d, and the mean KL that d moves in nats per state."""
        assert isinstance(vector, Tensor)
        rows = run_detached(lambda: call_with(self.actor, self.move(vector), self.rollout.states))
        kl = float(self.part.mean(self.actor.head.kl(self.rows, rows.double()).mean()))
        gain = float(self.part.mean(self._value(rows) - self.value))
        self.trials.append(Trial(vector, gain, max(kl, 0.0) if math.isfinite(kl) else math.nan))
        return -gain, self.trials[-1].kl

    def look_at(self, vector: Tensor) -> Trial:
        """The trial at d; what was measured last is not measured again."""
        if not self.trials or not torch.equal(self.trials[-1].vector, vector):
            self.measure(vector)
        return self.trials[-1]

    def move(self, vector: Tensor) -> dict[str, Tensor]:
        """theta + d."""
        step = self.space.unflatten(vector)
        return {name: self.params[name].detach() + step[name] for name in self.space}

    def _value(self, rows: Tensor) -> Tensor:
        # eq. 14, with the states of the rollout: E_a~p [p_theta / p A]
        ratio = (self.actor.head.log_prob(rows, self.rollout.draws) - self.log_prob).exp()
        value = (ratio * self.advantages).mean()
        if self.entropy_weight:
            value = value + self.entropy_weight * self.actor.head.entropy(rows).mean()
        return value
