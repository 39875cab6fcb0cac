"""From a direction to a step: rate, momentum, trust region, line search."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from natgrad.operators import Operator

Memory = dict[str, Tensor]
Objective = Callable[[Tensor], float]


@dataclass(frozen=True)
class Step:
    """A step d (n,) with its image G d (n,)."""

    vector: Tensor
    image: Tensor

    def scaled(self, factor: float) -> Step:
        """factor * d."""
        return Step(factor * self.vector, factor * self.image)


@dataclass(frozen=True)
class Quadratic:
    """m(d) = g . d + d^T (G + damping I) d / 2, the model of the loss's change around the current point.

    gradient: g (n,).   operator: G.   proposal: the step at the full rate, -rate * (G + damping I)^-1 g.
    nats: nats per example in one unit of the loss; 1/2 d^T G d * nats is the KL that a step moves, to second order.
    loss: the loss at d = 0, NaN where it is not known.
    """

    gradient: Tensor
    operator: Operator
    damping: float
    proposal: Step
    nats: float = 1.0
    loss: float = math.nan

    def change(self, step: Step) -> float:
        """m(d): negative for a predicted decrease."""
        d = step.vector
        return float(self.gradient @ d + 0.5 * (step.image @ d + self.damping * (d @ d)))

    def slope(self, step: Step) -> float:
        """g . d, the first-order change."""
        return float(self.gradient @ step.vector)

    def kl(self, step: Step) -> float:
        """1/2 d^T G d in nats per example."""
        return 0.5 * self.nats * float(step.image @ step.vector)

    def nothing(self) -> Step:
        """The zero step."""
        return self.proposal.scaled(0.0)


class Rule(ABC):
    """Bounds a step. `step(model, loss_at, memory)` returns the step and the memory for the next."""

    @property
    def needs_loss(self) -> bool:
        """Whether the rule re-evaluates the loss at trial points."""
        return False

    @abstractmethod
    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        """The step and the memory for the next.

        model: the quadratic model with its proposal.   loss_at: d -> loss(theta + d), NaN where it is not finite; None
        if the loss cannot be re-evaluated.   memory: flat vectors (n,) by name, empty at first.
        """


@dataclass(frozen=True)
class Rate(Rule):
    """The proposal as it is: -lr * (G + damping I)^-1 g."""

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        return model.proposal, memory


@dataclass(frozen=True)
class Momentum(Rule):
    """v <- decay * v + proposal; the step is v. One more product with G. ValueError unless 0 <= decay < 1."""

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is {self.decay}, expected a number in [0, 1)")

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        if "velocity" not in memory:
            return model.proposal, {"velocity": model.proposal.vector.clone()}
        velocity = self.decay * memory["velocity"] + model.proposal.vector
        return Step(velocity, model.operator.mv(velocity)), {"velocity": velocity}


@dataclass(frozen=True)
class TrustRegion(Rule):
    """The proposal, shortened so that it moves at most `radius` nats per example: a = sqrt(2 radius / d^T G d).

    backtracks: trial points at which the loss is re-evaluated; the first that does not raise it is taken, each
    `shrink` times the last; none: no step. 0: the model is trusted. ValueError for radius <= 0.
    """

    radius: float
    backtracks: int = 0
    shrink: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.radius < math.inf:
            raise ValueError(f"radius is {self.radius}, expected a positive number of nats per example")
        check_backtracking(self.backtracks, self.shrink)

    @property
    def needs_loss(self) -> bool:
        return self.backtracks > 0

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        kl = model.kl(model.proposal)
        step = model.proposal.scaled(min(1.0, math.sqrt(self.radius / kl))) if kl > 0 else model.proposal
        if self.backtracks == 0:
            return step, memory
        return backtrack(self, step, model, loss_at, self.backtracks, self.shrink, 0.0), memory


@dataclass(frozen=True)
class LineSearch(Rule):
    """Backtracking from the proposal until loss(theta + d) <= loss(theta) + sufficient * g . d (Armijo).

    At most `backtracks` trial points, each `shrink` times the last; a loss that is not finite is a rejection. None
    accepted: no step.
    """

    backtracks: int = 10
    shrink: float = 0.5
    sufficient: float = 1e-4

    def __post_init__(self) -> None:
        check_backtracking(self.backtracks, self.shrink)
        if self.backtracks == 0:
            raise ValueError("backtracks is 0, expected at least one trial point; use Rate() for a fixed step")

    @property
    def needs_loss(self) -> bool:
        return True

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        step = backtrack(self, model.proposal, model, loss_at, self.backtracks, self.shrink, self.sufficient)
        return step, memory


def backtrack(
    rule: Rule, step: Step, model: Quadratic, loss_at: Objective | None, trials: int, shrink: float, sufficient: float
) -> Step:
    """The first of step, shrink * step, ... whose loss fell by `sufficient` times what the slope promised."""
    require_loss(rule, loss_at)
    assert loss_at is not None
    for _ in range(trials):
        if loss_at(step.vector) <= model.loss + sufficient * model.slope(step):  # False for a NaN: a rejection
            return step
        step = step.scaled(shrink)
    return model.nothing()


def require_loss(rule: Rule, loss_at: Objective | None) -> None:
    """ValueError where a rule needs the loss at trial points and it cannot be had."""
    if rule.needs_loss and loss_at is None:
        raise ValueError(
            f"{rule} re-evaluates the loss: call optimizer.step(closure), or compute the loss with optimizer.loss(...)"
        )


def check_backtracking(backtracks: int, shrink: float) -> None:
    """ValueError unless backtracks >= 0 and 0 < shrink < 1."""
    if backtracks < 0:
        raise ValueError(f"backtracks is {backtracks}, expected an integer >= 0")
    if not 0 < shrink < 1:
        raise ValueError(f"shrink is {shrink}, expected a number in (0, 1)")
