"""From a direction to a step: rate, momentum, trust region, line search, search in a subspace."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from natgrad.linalg import eigh
from natgrad.operators import Operator
from natgrad.solvers import Subspace

Memory = dict[str, Tensor]
Objective = Callable[[Tensor], float]


@runtime_checkable
class Differentiable(Protocol):
    """An objective that knows its gradient: `loss_at` as an optimizer passes it to a rule."""

    def __call__(self, vector: Tensor) -> float:
        """The loss at theta + d, NaN where it is not finite."""
        ...

    def gradient(self, vector: Tensor) -> tuple[float, Tensor]:
        """The loss at theta + d and its gradient (n,) there."""
        ...


@dataclass(frozen=True)
class Step:
    """A step d (n,) with its image G d (n,)."""

    vector: Tensor
    image: Tensor

    def scaled(self, factor: float) -> Step:
        """factor * d."""
        return Step(factor * self.vector, factor * self.image)


def unchanged(step: Step) -> Step:
    """The step itself: rates of 1."""
    return step


@dataclass(frozen=True)
class Quadratic:
    """m(d) = g . d + d^T (G + damping I) d / 2, the model of the loss's change around the current point.

    gradient: g (n,).   operator: G.   proposal: the step at the full rate, -rate * (G + damping I)^-1 g.
    nats: nats per example in one unit of the loss; 1/2 d^T G d * nats is the KL that a step moves, to second order.
    indefinite: whether the images are of a G that may have negative eigenvalues, so that d^T G d measures no length.
    loss: the loss at d = 0, NaN where it is not known.   basis: the space that the solver searched, if it kept one.
    earlier: proposals from iterates that the solver kept on its way, oldest first, each made when it is called.
    rated: a step at rate 1 -> the same at the parameters' rates.
    """

    gradient: Tensor
    operator: Operator
    damping: float
    proposal: Step
    nats: float = 1.0
    loss: float = math.nan
    basis: Subspace | None = None
    earlier: Sequence[Callable[[], Step]] = ()
    rated: Callable[[Step], Step] = unchanged
    indefinite: bool = False

    def change(self, step: Step) -> float:
        """m(d): negative for a predicted decrease."""
        d = step.vector
        return float(self.gradient @ d + 0.5 * (step.image @ d + self.damping * (d @ d)))

    def slope(self, step: Step) -> float:
        """g . d, the first-order change."""
        return float(self.gradient @ step.vector)

    def kl(self, step: Step) -> float:
        """How far a step moves, in nats per example: 1/2 d^T G d; where G is indefinite 1/2 |d| |G d|.

        |d| |G d| >= d^T |G| d, since |G| d is as long as G d: positive and negative curvature along d do not cancel.
        It needs no product, and is equal along an eigenvector.
        """
        form = float(step.image @ step.vector)
        if self.indefinite or form < 0:
            form = float(step.vector.norm() * step.image.norm())
        return 0.5 * self.nats * form

    def nothing(self) -> Step:
        """The zero step."""
        # zeros, not 0 times a proposal that may be infinite
        return Step(torch.zeros_like(self.proposal.vector), torch.zeros_like(self.proposal.image))


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

    With `ng.hessian`, whose d^T H d may be negative or cancel, |d| |H d| stands for d^T G d: no less than d^T |H| d, so
    that a step never moves farther than the radius whatever the signs of the curvature.

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
class OnlineRadius(Rule):
    """The proposal, shortened to sqrt(d^T G d) <= bound * unit * sqrt(b), from `hold` examples on times hold / seen.

    For learning from a stream, as in `ng.ang`. Where noise dominates, lr * sqrt(g^T G^-1 g) is about lr * sqrt(n / b)
    for b examples a step, whatever the gradient's signal; a bound that grows with sqrt(b) lets the same number of
    examples move the parameters as far for every b, and 1 / seen averages the noise away in the end (Amari 1998).
    Needs `ng.AdaptiveInverse`, which counts examples and measures the unit: N / sqrt(tr Cov x) for `ng.score_metric`,
    so that the step is the same whatever x is measured in; 5 for metrics in nats.

    Args:
        bound: Units per sqrt(example).
        hold: Examples; math.inf for a bound that does not fall.

    Raises:
        ValueError: Unless bound, hold > 0.
    """

    bound: float = 0.033
    hold: float = 6000.0

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf:
            raise ValueError(f"bound is {self.bound}, expected a positive number, per square root of an example")
        if not self.hold > 0:
            raise ValueError(f"hold is {self.hold}, expected a positive number of examples")

    def length(self, examples: int, seen: int) -> float:
        """The bound, in units, at a step of so many examples with so many seen."""
        return self.bound * math.sqrt(examples) * min(1.0, self.hold / max(seen, 1))

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        counts, step, unit = model.operator.counts, model.proposal, model.operator.length_unit
        if "seen" not in counts:
            raise ValueError(f"{self} counts examples: use structure=ng.AdaptiveInverse(), or rule=ng.TrustRegion(...)")
        bound = self.length(counts["examples"], counts["seen"]) * unit
        length = math.sqrt(max(float(step.image @ step.vector), 0.0))
        return step.scaled(bound / length) if length > bound else step, memory


@dataclass(frozen=True)
class LineSearch(Rule):
    """Backtracking from the proposal until loss(theta + d) <= loss(theta) + sufficient * g . d (Armijo).

    At most `backtracks` trial points, each `shrink` times the last; a loss that is not finite is a rejection. None
    accepted: no step.   iterates: start from the solver's best iterate instead of its last: go back over those that
    it kept (`ng.CG(keep=1.3)`) while the loss falls (Martens 2010, section 4.6): one evaluation each.
    """

    backtracks: int = 10
    shrink: float = 0.5
    sufficient: float = 1e-4
    iterates: bool = False

    def __post_init__(self) -> None:
        check_backtracking(self.backtracks, self.shrink)
        if self.backtracks == 0:
            raise ValueError("backtracks is 0, expected at least one trial point; use Rate() for a fixed step")

    @property
    def needs_loss(self) -> bool:
        return True

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        start = model.proposal
        if self.iterates:
            require_loss(self, loss_at)
            assert loss_at is not None
            start = best_iterate(model, loss_at)
        return backtrack(self, start, model, loss_at, self.backtracks, self.shrink, self.sufficient), memory


@dataclass(frozen=True)
class SubspaceSearch(Rule):
    """Minimises the loss itself over the space that the solver searched, by BFGS: Krylov subspace descent.

    steps: of BFGS, at most; each costs a gradient of the loss at a trial point, and a loss more per backtracking.
    Needs a solver that keeps its basis, `ng.KrylovSubspace(dimension=)`. Starts from the damped solution in the space,
    or from 0 where that raises the loss. Stops when a step gains less than `progress` of what was gained so far. A loss
    that is not finite is a rejection. The learning rate is the share of the step found that is taken, 1 for all of it.
    The loss should be on other data than the basis (`opt.search_on`, `search_batch=`): the few dimensions are fitted to
    it.

    Vinyals & Povey 2012. ValueError for a solver without a basis, steps < 1 or progress < 0.
    """

    steps: int = 10
    progress: float = 1e-3

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps is {self.steps}, expected an integer >= 1")
        if not self.progress >= 0:
            raise ValueError(f"progress is {self.progress}, expected a number >= 0")

    @property
    def needs_loss(self) -> bool:
        return True

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        require_loss(self, loss_at)
        if model.basis is None:
            raise ValueError(f"{self} searches the solver's space: use solver=ng.KrylovSubspace(dimension=...)")
        if not isinstance(loss_at, Differentiable):
            raise ValueError(f"{self} needs the gradient of the loss at trial points, which {loss_at!r} does not give")
        if not len(model.basis.vectors):
            return model.nothing(), memory
        weights = _Bfgs(model, model.basis, loss_at, self).run()
        return model.rated(Step(model.basis.at(weights), model.basis.image_at(weights))), memory


class _Bfgs:
    """BFGS over the weights a of d = V^T a, started with the inverse of the quadratic model's matrix."""

    def __init__(self, model: Quadratic, basis: Subspace, loss_at: Differentiable, choices: SubspaceSearch) -> None:
        self.basis, self.loss_at, self.choices = basis, loss_at, choices
        values, vectors = eigh(basis.project_operator())
        values = values.abs() + model.damping
        # a direction without curvature gets the smallest that the dtype resolves, not an infinite step
        values = values.clamp(min=float(values.max()) * torch.finfo(values.dtype).eps ** 0.5)
        self.inverse = (vectors / values) @ vectors.mT
        self.point, self.loss = torch.zeros_like(values), model.loss
        self.first = self.loss
        start = -self.inverse @ (basis.vectors @ model.gradient)  # the damped solution in the space
        value, slope = self._at(start)
        if value < self.loss:
            self.point, self.loss, self.slope = start, value, slope
        else:
            self.slope = self._at(self.point)[1]

    def run(self) -> Tensor:
        """The weights of the lowest loss that was found."""
        for _ in range(self.choices.steps):
            before = self.loss
            if not self._advance():
                break
            if before - self.loss < self.choices.progress * (self.first - self.loss):
                break
        return self.point

    def _at(self, weights: Tensor) -> tuple[float, Tensor]:
        value, gradient = self.loss_at.gradient(self.basis.at(weights))
        return value, self.basis.vectors @ gradient

    def _advance(self) -> bool:
        """One step to a lower loss (Armijo, by halves), and the update of the inverse. False if there is none."""
        direction = -self.inverse @ self.slope
        promise = float(self.slope @ direction)
        if not -promise > 2 * self.choices.progress * (self.first - self.loss):  # -promise / 2 is the gain to expect
            return False
        rate = 1.0
        for trial in range(10):
            point = self.point + rate * direction
            value = self._at(point) if trial == 0 else (self.loss_at(self.basis.at(point)), None)
            if value[0] <= self.loss + 1e-4 * rate * promise:
                slope = self._at(point)[1] if value[1] is None else value[1]
                self._update(point - self.point, slope - self.slope)
                self.point, self.loss, self.slope = point, value[0], slope
                return True
            rate *= 0.5
        return False

    def _update(self, moved: Tensor, turned: Tensor) -> None:
        """B <- (I - s y^T / s.y) B (I - y s^T / s.y) + s s^T / s.y, where the curvature s.y is positive."""
        along = moved @ turned
        if not bool(along > torch.finfo(moved.dtype).eps * moved.norm() * turned.norm()):
            return
        left = torch.eye(len(moved), dtype=moved.dtype, device=moved.device) - torch.outer(moved, turned) / along
        self.inverse = left @ self.inverse @ left.mT + torch.outer(moved, moved) / along


def best_iterate(model: Quadratic, loss_at: Objective) -> Step:
    """The last iterate, or an earlier one: back while the loss falls; a loss that is not finite counts as infinite."""

    def value(step: Step) -> float:
        loss = loss_at(step.vector)
        return math.inf if math.isnan(loss) else loss

    best, lowest = model.proposal, value(model.proposal)
    for make in reversed(model.earlier):
        step = make()
        loss = value(step)
        if loss > lowest:
            break
        if loss < lowest:
            best, lowest = step, loss
    return best


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
