"""Steps of a given length in nats, whatever the proposal's: by the measured KL, or by the damped form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from natgrad.rules.base import Objective, Rule, require_loss
from natgrad.rules.parts import Memory, Vector
from natgrad.rules.quadratic import Quadratic, Step
from natgrad.rules.step_rules import check_backtracking

SLACK = 1e-3
"""A share of the radius left over: another sum order, or another precision, finds the KL within it too."""


@runtime_checkable
class Measuring(Protocol):
    """An objective that also knows how far a step really moves the model."""

    def __call__(self, vector: Vector) -> float:
        """The loss at theta + d, NaN where it is not finite.

        Args:
            vector: d, shape (n,).
        """
        ...

    def measure(self, vector: Vector) -> tuple[float, float]:
        """The loss at theta + d, and the KL that d moves in nats per example; NaN where they are not finite.

        Args:
            vector: d, shape (n,).
        """
        ...


@dataclass(frozen=True)
class MeasuredTrustRegion(Rule):
    """The longest trial along the proposal that lowers the loss and moves a measured KL of at most `radius` nats.

    It begins where the quadratic model of the KL meets the radius, a = sqrt(2 radius / d^T G d), be that longer or
    shorter than the proposal. A trial beyond the radius is shortened as if the KL went with a^2, and at least by
    `shrink`. None accepted: no step. Needs an objective that measures the KL, as those of policies do.

    Args:
        radius: In nats per example.
        backtracks: Number of trials.
        shrink: Factor between two trials.

    Raises:
        ValueError: For a radius that is not positive, no trial, or a factor that is not between 0 and 1.

    Reference:
        Schulman et al. 2015, appendix C.
    """

    needs_kl = True
    radius: float
    backtracks: int = 10
    shrink: float = 0.8

    def __post_init__(self) -> None:
        check_radius(self.radius)
        check_backtracking(self.backtracks, self.shrink)
        if self.backtracks == 0:
            raise ValueError("backtracks is 0, expected at least one trial: the KL of the step is measured there")

    @property
    def needs_loss(self) -> bool:
        return True

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        require_loss(self, loss_at)
        if not isinstance(loss_at, Measuring):
            raise ValueError(f"{self} measures the KL at trial points, which {loss_at!r} does not give")
        kl = float(model.kl(model.proposal))
        if not leads_down(model) or not 0 < kl < math.inf:
            return model.nothing(), memory
        rate = math.sqrt(self.radius / kl)
        for _ in range(self.backtracks):
            step = model.proposal.scale_by(rate)
            loss, kl = loss_at.measure(step.vector)
            if kl <= self.radius * (1 - SLACK) and loss < float(model.loss):  # False for a NaN: a rejection
                return step, memory
            rate *= self._shorten(kl)
        return model.nothing(), memory

    def _shorten(self, kl: float) -> float:
        """The factor after a trial that moved so many nats."""
        beyond = math.sqrt(self.radius / kl) * 0.98 if kl > self.radius else 1.0
        return min(self.shrink, beyond) if kl <= 1e3 * self.radius else self.shrink**3


@dataclass(frozen=True)
class NormalisedRate(Rule):
    """The proposal at the length where its damped form is the radius: a = sqrt(2 radius / d^T (G + damping I) d).

    For the natural gradient d = -(G + damping I)^-1 g that form is -g^T d. The quadratic model of the KL,
    1/2 d^T G d, is then at most the radius.

    Args:
        radius: In nats per example.

    Raises:
        ValueError: For a radius that is not positive.

    Reference:
        Rajeswaran et al. 2017.
    """

    needs_form = False
    radius: float

    def __post_init__(self) -> None:
        check_radius(self.radius)

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        if not leads_down(model):
            return model.nothing(), memory
        return model.proposal.scale_by(math.sqrt(2 * self.radius / -float(model.slope(model.proposal)))), memory


def leads_down(model: Quadratic) -> bool:
    """Whether the loss falls along the proposal, by a finite amount.

    Args:
        model: The quadratic model with its proposal.
    """
    return -math.inf < float(model.slope(model.proposal)) < 0


def check_radius(radius: float) -> None:
    """ValueError unless it is a positive number of nats."""
    if not 0 < radius < math.inf:
        raise ValueError(f"radius is {radius}, expected a positive number of nats per example")
