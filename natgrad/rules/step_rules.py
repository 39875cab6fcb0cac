"""The rules: rate, measured length, momentum, trust region, line search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_share
from natgrad.ground.constants import AT_ONCE, FEW_PASSES, RADIUS_SLACK, SAME_LOSS
from natgrad.operators import Facts
from natgrad.rules.base import Objective, Rule, require_loss
from natgrad.rules.quadratic import FlatStep, Memory, Quadratic, Step, Vector, hold_kl, share_of_rate


@dataclass(frozen=True)
class Rate(Rule):
    """The proposal as it is: -lr * (G + damping I)^-1 g.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.kfac(model, nn.CrossEntropyLoss(), lr=0.1, rule=ng.Rate())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    needs_form = False

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        return model.proposal, memory


@dataclass(frozen=True)
class SafeRate(Rule):
    """The proposal, -lr * (G + damping I)^-1 g, halved until the loss of its own batch is not higher than before.

    Where the Fisher information vanishes far out (a rate behind an exponential, a bit that is nearly certain, a scale),
    it is small at the start of a step that is then far too long: from a mean of 1 to counts of 20, a Poisson regression
    would go to exp(19). Costs a forward pass; where the loss at trial points is not known, steps are taken as they are.

    Args:
        halvings: At most so many; then there is no step.

    Raises:
        ValueError: For less than one.
    """

    halvings: int = 60

    def __post_init__(self) -> None:
        check_integer("halvings", self.halvings)

    @property
    def uses_loss(self) -> bool:
        return True

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        step, before = model.proposal, float(model.loss)
        if loss_at is None or not math.isfinite(before):
            return step, memory
        most = before + SAME_LOSS * abs(before)  # near a minimum the loss changes by round-off
        for _ in range(self.halvings):
            if loss_at(step.vector) <= most:  # False for a NaN
                return step, memory
            step = step.scale_by(0.5)
        return model.nothing(), memory


@dataclass(frozen=True)
class MeasuredLength(Rule):
    """The proposal, followed to the minimum of the quadratic model with the metric as it was measured, within a bound.

    The length is a = min(1, p / d^T G d), p = d^T (G + damping I) d as the blocks promise it: 1 where they promise
    enough, so that damping shortens a step. Where the metric has fallen below the blocks' running averages to a share f
    of them, as it does when a loss falls by orders of magnitude, 1 / f takes the place of 1. Below that where the KL
    1/2 a^2 d^T G d reaches the least of `max_kl` and `kl_share` of the loss: where little is left to gain, little is
    risked. A learning rate below 1 takes that share of the bounded step; one above 1 meets the bound too.

    Args:
        max_kl: Most nats per example of a step, to second order on its own batch; math.inf for no bound.
        kl_share: Most nats per example as a share of the loss; of one nat per entry where the loss may be negative.
        warm: Steps over which the bound grows to its whole size: a fresh network is not as quadratic.

    Raises:
        ValueError: Unless max_kl, kl_share > 0 and warm >= 1.

    Both bounds are keys of the parameter groups: the least over the groups counts.
    """

    max_kl: float = math.inf
    kl_share: float = 0.05
    warm: int = 5

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if not value > 0:
                raise ValueError(f"{name} is {value}, expected a number of nats > 0; math.inf for no bound")
        if self.warm < 1:
            raise ValueError(f"warm is {self.warm}, expected a number of steps >= 1")

    @property
    def options(self) -> dict[str, float]:
        return {"max_kl": self.max_kl, "kl_share": self.kl_share}

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        return self.hold(model, self.find_length(model)), memory

    def find_length(self, model: Quadratic) -> Step:
        """The step within both bounds as far as they are estimated.

        Args:
            model: The quadratic model with its proposal.
        """
        proposal, nats = model.proposal, float(model.nats)
        promised = float(proposal.promised_form(model.damping))
        ratio = max(float(proposal.excess(model.damping)), model.layers.fallen)
        full = promised if model.system.full is None else max(float(model.system.full), promised)
        minimum = 1 / ratio  # of the quadratic model

        def find_rate(**options: float) -> float:
            """The length with other settings."""
            return least(minimum, longest(self.radius(model, **options), nats * ratio * full))

        rate = find_rate()
        for name in self.options:
            model.cuts[name] = find_rate(**{name: math.inf}) / rate if rate else math.nan
        model.cuts["lr"] = 1 / (share_of_rate(proposal) or math.nan)
        return proposal.scale_by(rate)

    def hold(self, model: Quadratic, step: Step) -> Step:
        """The step, shortened where it moves more than `max_kl` on its own batch.

        Args:
            model: Knows the number of steps, and how far a step moves.
            step: Any of this model.
        """
        most = (self.options | dict(model.run.options))["max_kl"]
        if math.isinf(most):
            return step
        return hold_kl(model, step, most * min(1.0, (model.run.steps + 1) / self.warm) * share_of_rate(step) ** 2)

    def radius(self, model: Quadratic, **options: float) -> float:
        """The bound on this step's KL, in nats per example; it grows over the first steps.

        Args:
            model: Knows the loss and the number of steps.
            **options: Settings that stand for those of the parameter groups.
        """
        known = self.options | dict(model.run.options) | options
        bound = least(share_loss(model, known["kl_share"]), known["max_kl"])
        return bound * min(1.0, (model.run.steps + 1) / self.warm)


def longest(radius: float, form: float) -> float:
    """a with 1/2 a^2 form = radius: infinite where there is no slope at all, NaN for a negative form."""
    if radius <= 0:
        return 0.0
    square = 2 * radius / form if form else math.inf
    return math.sqrt(square) if square >= 0 else math.nan


def least(first: float, second: float) -> float:
    """The smaller of two numbers; NaN if one of them is."""
    return second if math.isnan(second) else min(first, second)


def share_loss(model: Quadratic, share: float) -> float:
    """A share of the loss in nats, of one nat per entry where the loss may be negative."""
    bound, loss = float(model.nats) * share, float(model.loss)
    if not model.run.bounded or math.isinf(share) or math.isnan(loss):  # an infinite share of nothing is no bound
        return bound
    return bound * max(loss, 0.0)


@dataclass(frozen=True)
class Momentum(Rule):
    """v <- decay * v + proposal; the step is v, shortened to `radius` nats. One more product with G.

    Args:
        decay: Weight of the past, in [0, 1).
        radius: Most nats per example of a step; math.inf for no bound. The velocity itself is not shortened.

    Raises:
        ValueError: Unless 0 <= decay < 1 and radius > 0.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=ng.Momentum(0.9))
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    decay: float = 0.9
    radius: float = math.inf

    def __post_init__(self) -> None:
        check_share("decay", self.decay)
        if not self.radius > 0:
            raise ValueError(f"radius is {self.radius}, expected a positive number of nats per example, or math.inf")

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        step = model.proposal
        if "velocity" in memory:
            step = model.along(self.decay * memory["velocity"] + step.vector)  # type: ignore[operator]
        bounded = step if math.isinf(self.radius) else shorten(model, step, self.radius)
        return bounded, {"velocity": step.vector.clone()}


@dataclass(frozen=True)
class TrustRegion(Rule):
    """The proposal, shortened so that it moves at most `radius` nats per example: a = sqrt(2 radius / d^T G d).

    With `ng.hessian`, whose d^T H d may be negative or cancel, |d| |H d| stands for d^T G d: no less than d^T |H| d, so
    that a step never moves farther than the radius whatever the signs of the curvature.

    Args:
        radius: Most nats per example of a step.
        backtracks: Trial points at which the loss is re-evaluated; the first that does not raise it is taken; none: no
            step. 0: the model is trusted.
        shrink: Factor between two trial points, in (0, 1).

    Raises:
        ValueError: For radius <= 0, or numbers out of range.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=ng.TrustRegion(0.1))
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    radius: float
    backtracks: int = 0
    shrink: float = 0.5

    def __post_init__(self) -> None:
        check_radius(self.radius)
        check_backtracking(self.backtracks, self.shrink)

    @property
    def needs_loss(self) -> bool:
        return self.backtracks > 0

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        step = shorten(model, model.proposal, self.radius)
        if self.backtracks == 0:
            return step, memory
        return backtrack(self, step, model, loss_at, self.backtracks, self.shrink, 0.0), memory


@dataclass(frozen=True)
class OnlineRadius(Rule):
    """The proposal, shortened to sqrt(d^T G d) <= bound * unit * sqrt(b), from `hold` examples on times hold / seen.

    For learning from a stream, as in `ng.ang`. Over the first b / 50 steps it rises in proportion to them, since the
    metric of few steps does not say how soon it changes: at full length the first steps on 500 rows raised the loss of
    an energy by hundreds. Where noise dominates, lr * sqrt(g^T G^-1 g) is about lr * sqrt(n / b)
    for b examples a step, whatever the gradient's signal; a bound that grows with sqrt(b) lets the same number of
    examples move the parameters as far for every b, and 1 / seen averages the noise away in the end (Amari 1998).
    The unit is N / sqrt(tr Cov x) with `ng.AdaptiveInverse` and `ng.score_metric`, so that the step is the same
    whatever x is measured in; 5 for metrics in nats. Where that structure finds the same few rows again, the bound
    falls with the square of the passes over them, from one and a half on: the fit stops before it follows their noise.

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

    def length(self, examples: int, seen: int, passes: float = 1.0) -> float:
        """The bound, in units of length.

        Args:
            examples: Of the step.
            seen: So far, with these.
            passes: Over the same rows, weighed by how few they are; 1 for a stream.
        """
        begun = min(1.0, AT_ONCE * seen / examples**2)
        fallen = min(1.0, self.hold / max(seen, 1)) * min(1.0, FEW_PASSES / passes) ** 2
        return self.bound * math.sqrt(examples) * begun * fallen

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        counts: Mapping[str, float] = {} if model.operator is None else model.operator.counts
        counts = counts if "seen" in counts else {**model.run.counts(), **counts}
        unit = Facts().length_unit if model.operator is None else model.operator.length_unit
        if "seen" not in counts:
            raise ValueError(f"{self} counts examples: use structure=ng.AdaptiveInverse(), or rule=ng.TrustRegion(...)")
        bound = self.length(int(counts["examples"]), int(counts["seen"]), counts.get("passes", 1.0)) * unit
        length = model.proposal.form().clamp(min=0).sqrt()
        factor = torch.where(length > bound, bound / length, 1.0)
        model.cuts["bound"] = partial(torch.reciprocal, factor)
        return model.proposal.scale_by(factor), memory


@dataclass(frozen=True)
class LineSearch(Rule):
    """Backtracking from the proposal until loss(theta + d) <= loss(theta) + sufficient * g . d (Armijo).

    A loss that is not finite is a rejection. No point accepted: no step.

    Args:
        backtracks: Most trial points, at least 1.
        shrink: Factor between two trial points, in (0, 1).
        sufficient: Share of the decrease that the slope promises.
        iterates: True starts from the solver's best iterate instead of its last: it goes back over those that the
            solver kept (`ng.CG(keep=1.3)`) while the loss falls (Martens 2010, section 4.6): one evaluation each.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> fisher = ng.fisher(model, nn.CrossEntropyLoss())
        >>> opt = ng.NaturalGradient(model, fisher, rule=ng.LineSearch())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    needs_form = False
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


def shorten(model: Quadratic, step: Step, radius: float) -> Step:
    """The step, or so much of it that it moves `radius` nats per example.

    Args:
        model: Says how far it moves.
        step: Any.
        radius: Most nats per example.
    """
    kl = model.kl(step)
    factor = torch.where(kl > 0, (radius / kl).sqrt(), 1.0).clamp(max=1.0)
    model.cuts["radius"] = partial(torch.reciprocal, factor)
    return step.scale_by(factor)


def best_iterate(model: Quadratic, loss_at: Objective) -> Step:
    """The last iterate, or an earlier one: back while the loss falls; a loss that is not finite counts as infinite."""

    def value(step: Step) -> float:
        loss = loss_at(step.vector)
        return math.inf if math.isnan(loss) else loss

    best, lowest = model.proposal, value(model.proposal)
    for make in reversed(model.system.earlier):
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
        if loss_at(step.vector) <= float(model.loss) + sufficient * float(model.slope(step)):  # False for a NaN
            return step
        model.cuts.clear()  # the search ends below every bound
        step = step.scale_by(shrink)
    return model.nothing()


def check_backtracking(backtracks: int, shrink: float) -> None:
    """Check the numbers of a backtracking.

    Args:
        backtracks: Most trial points, >= 0.
        shrink: Factor between two of them, in (0, 1).

    Raises:
        ValueError: For a number out of range.
    """
    if backtracks < 0:
        raise ValueError(f"backtracks is {backtracks}, expected an integer >= 0")
    if not 0 < shrink < 1:
        raise ValueError(f"shrink is {shrink}, expected a number in (0, 1)")


# a step along a curve: the direction with its second-order correction


@dataclass(frozen=True)
class BentStep(FlatStep):
    """A step t v + t^2 b along a curve: its slope and forms are those of t v.

    Attributes:
        vector: t v + t^2 b, shape (n,).
        image: G t v.
        straight: t v, shape (n,).
    """

    straight: Tensor

    @property
    def tangent(self) -> Tensor:
        return self.straight

    @staticmethod
    def of(tangent: Tensor, image: Tensor, bend: Tensor) -> BentStep:
        """The step at t = 1.

        Args:
            tangent: v, shape (n,).
            image: G v, shape (n,).
            bend: b, shape (n,).
        """
        return BentStep(tangent + bend, image, tangent)

    def scale_by(self, factor: Tensor | float) -> BentStep:
        bend = factor * factor * (self.vector - self.straight)
        return BentStep(factor * self.straight + bend, factor * self.image, factor * self.straight)

    def form(self) -> Tensor:
        return self.image @ self.straight

    def damped_form(self, damping: Tensor | float) -> Tensor:
        return self.form() + (damping * self.straight) @ self.straight

    def nothing(self) -> BentStep:
        return BentStep(*(torch.zeros_like(self.vector) for _ in range(3)))


# the best of several lengths of a step, on a logarithmic grid


@dataclass(frozen=True)
class GridSearch(Rule):
    """The length among 1, shrink, shrink^2, ... times the proposal with the lowest loss; none where that is no lower.

    Every length costs one evaluation of the loss. A loss that is not finite counts as infinite. Backtracking stops at
    the first length that will do; where the best one is far below 1, as in energy natural gradients without damping,
    this is the search that their papers have.

    Args:
        trials: Lengths, at least 1.
        shrink: Factor between two of them, in (0, 1).

    Reference:
        Mueller & Zeinhofer 2023, section 4, with 31 lengths from 1 to 2^-30.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> opt = ng.NaturalGradient(net, ng.gauss_newton(net, nn.MSELoss()), rule=ng.rules.GridSearch())
        >>> opt.rule
        GridSearch(trials=13, shrink=0.5)
    """

    needs_form = False
    trials: int = 13
    shrink: float = 0.5

    def __post_init__(self) -> None:
        check_integer("trials", self.trials)
        check_backtracking(self.trials, self.shrink)

    @property
    def needs_loss(self) -> bool:
        return True

    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        require_loss(self, loss_at)
        assert loss_at is not None
        best, lowest = model.nothing(), float(model.loss)
        for k in range(self.trials):
            step = model.proposal.scale_by(self.shrink**k)
            loss = loss_at(step.vector)
            if not math.isnan(loss) and loss < lowest:
                best, lowest = step, loss
        return best, memory


# steps of a given length in nats, whatever the proposal's: by the measured KL, or by the damped form


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
            if kl <= self.radius * (1 - RADIUS_SLACK) and loss < float(model.loss):  # False for a NaN: a rejection
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


def refuse_measured_kl(rule: Rule) -> None:
    """ValueError for a rule that measures the KL at trial points, which a loss does not give.

    Args:
        rule: Which.
    """
    if isinstance(rule, MeasuredTrustRegion):
        raise ValueError(
            f"rule {rule} measures the KL at trial points, which only policies give (ng.TRPO): bound the KL of a step "
            "with rule=ng.TrustRegion(radius), or with max_kl= for ng.kfac and its like"
        )


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
