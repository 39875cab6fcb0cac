"""Nonlinear least squares over named terms: the flat flow of the engine on residuals at points."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from natgrad.applications.residuals.damped_system import DampedSystem
from natgrad.applications.residuals.joined_terms import JoinedTerms
from natgrad.applications.residuals.stacked_rows import RowsOperator
from natgrad.applications.residuals.system import (
    LinearisedTerms,
    Points,
    ResidualMetric,
    System,
    check_derivatives,
    check_points,
)
from natgrad.checks import check_share
from natgrad.metrics import Metric
from natgrad.operators import Operator
from natgrad.optim import NaturalGradient, Objective, Point
from natgrad.scoped_values import keep_gradient_mode
from natgrad.solvers import Solution
from natgrad.spaces import Params, Space

PROBE = 0.1
"""The step of the finite difference along the direction, as a share of it (Transtrum & Sethna 2012, section 4)."""
BEND = 0.375
"""The longest acceleration that is trusted, relative to the direction; the paper has 0.75 for twice that."""
ATTEMPTS = 5
"""How often the system of one step is solved, each time with more damping, until the rule takes its solution."""
IDLE = 1e-6
"""The share of the mean unit that every entry has, so that one that does nothing yet is damped too."""


class ResidualOptimizer(NaturalGradient):
    """What `ng.residuals` returns: build it by that.

    Args:
        model: The module whose parameters are trained.
        system: The terms.
        lr: Share of the step that is taken.
        acceleration: Whether the second-order correction is added.
        scaling: Whether damping is in units of the metric's diagonal.
        momentum: Share of the last solution from which the next one starts.
        **options: As `ng.NaturalGradient` has them.

    Attributes:
        losses: Name -> mean square of the term before the last step.
        system: The terms.
    """

    def __init__(
        self,
        model: Any,
        system: System,
        lr: float,
        acceleration: bool,
        scaling: bool,
        momentum: float,
        **options: Any,
    ) -> None:
        check_share("momentum", momentum)
        super().__init__(model, ResidualMetric(system), lr, warm_start=momentum, **options)
        self.detach()  # it reads no pass of the user's
        self.system, self.acceleration, self.scaling = system, acceleration, scaling
        self.losses: dict[str, float] = {}
        self._measured: Tensor | None = None
        self._points: Any = None  # as they were given, until they are checked
        self._now: LinearisedTerms | None = None
        self._system: DampedSystem | None = None
        self._start: Tensor | None = None

    @keep_gradient_mode
    @torch.no_grad()
    def step(self, closure: None = None, /, **points: Any) -> Tensor:  # type: ignore[override]
        """One step on these points.

        Args:
            closure: Of no use here: the terms say what the loss is.
            **points: The points of each term by its name, a tensor (b, d), or a tuple of tensors (b, ...) for a term
                that takes more than a point.

        With several processes (`group=`) these are this process's points; a term may have none on some of them.

        Returns:
            The loss before the step, the sum of weight times mean square over the terms. NaN for a step that was left
            out because a number was not finite.

        Raises:
            ValueError: For missing or unusable points; with `on_trouble="raise"` for a residual that is not finite.
        """
        if closure is not None:
            raise TypeError("step takes points and no closure: step(inside=x, boundary=y)")
        alone = self.processes.size == 1  # otherwise the others would wait where an error came now
        self._points = check_points(self.system, points, self._named) if alone else points
        try:
            super().step()
            found = self._now
            if found is None:
                return torch.full((), math.nan)
            return found.loss
        finally:
            self._points = self._now = self._measured = self._system = self._start = None

    def evaluate(self, /, **points: Any) -> dict[str, Tensor]:
        """The residuals of the terms, without a step.

        Args:
            **points: As for `step`, of the terms that are wanted.

        Returns:
            Name -> residuals, shape (b, m).
        """
        some = System({n: t for n, t in self.system.terms.items() if n in points}, self.system.weights)
        found = check_points(some if points else self.system, points, self._named)
        return {name: self.system.terms[name].values(self._find_trained(), found[name]) for name in found}

    def _find_trained(self) -> dict[str, Tensor]:
        active = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        return {name: p for name, p in self._named.items() if id(p) in active}

    # one step

    def _list_settings(self) -> tuple[object, ...]:
        system = self.system
        return (*super()._list_settings(), list(system.terms), system.weights, self.acceleration, self.scaling)

    def _join_terms(self) -> System | JoinedTerms:
        """The terms over the points of all processes."""
        return self.system if self.processes.size == 1 else JoinedTerms(self.system, self.processes)

    def _step(self, called: Any) -> None:
        assert self._points is not None
        params = self._find_trained()
        self._now = self._join_terms().linearise(params, self._points)
        self.observe(self._points)  # these are the step's data, and no pass of the model's
        self.losses = {name: float(value) for name, value in self._now.losses.items()}
        space = self._now.operator.rows.space
        gradient = self._now.operator.rows.mv(self._now.residuals)
        check_derivatives(self.system, self._now, self._points, gradient)
        point = Point(params, space, gradient, self._rates("lr"))
        self._start = self._guess(point)
        self._attempt(point, self._objective(point, called))

    def _attempt(self, point: Point, objective: Objective | None) -> None:
        """Solve and move; where the rule took nothing and the damping rose, again: the linear model stays."""
        step, judged = self._last.step, self._judged
        for failures in range(ATTEMPTS):
            for _ in range(failures):  # beside the one that the refusal brings: 2, 3, 4, 5 rises (Nielsen 1999)
                self._level = self.damping.update(self._level, math.nan)
            level = self._level
            self._move(point, objective, None)
            if self._last.rate or not self._level > level:
                break
            self._last, self._judged = replace(self._last, step=step), judged  # it counts steps, and not attempts
            self._start = None  # damping pulls to it: where it leads uphill, more damping would never help

    def _skip(self, trouble: Any) -> None:
        self._now = None
        super()._skip(trouble)

    def _objective(self, point: Point, called: Any) -> Objective | None:
        assert self._now is not None
        assert self._points is not None
        return ResidualObjective(self._join_terms(), self._points, self._now, point.params, point.space)

    def _operator(self, point: Point, metric: Metric) -> tuple[Operator, dict[str, Any]]:
        assert self._now is not None
        return self.structure.update(self._memory, Given(self._now.operator), point.params, None)

    def _solve(
        self, point: Point, metric: Metric, operator: Operator
    ) -> tuple[Solution, float | Tensor, dict[str, Any] | None]:
        """(G + level D) x = g + level D momentum x_before, and its acceleration."""
        assert self._now is not None
        level = self.damping.amount(self._level, operator)
        if self._system is None:
            units = self._units(point, operator) if self.scaling else None
            self._system = DampedSystem.of(self.solver, operator, units, level)
        else:
            self._system = self._system.change_damping(level)
        found = self._system.solve(self._now.residuals, self._start)
        if self.acceleration:
            found = self._accelerate(point, self._system, found)
        units = self._system.units
        return found, level if units is None else level * units, None

    def _units(self, point: Point, operator: Operator) -> Tensor:
        """D: the largest diagonal of G so far, with a share of its mean where an entry does nothing."""
        diagonal = measure_units(operator)
        last = super()._flat_state(point).get("units")
        self._measured = measured = diagonal if last is None else torch.maximum(diagonal, last)
        mean = measured.mean()
        return measured + torch.where(mean > 0, IDLE * mean, 1.0)

    def _accelerate(self, point: Point, system: DampedSystem, found: Solution) -> Solution:
        """The step with half the acceleration of the geodesic through it (Transtrum & Sethna 2012)."""
        assert self._now is not None
        assert self._points is not None
        moved = point.space.unflatten(point.space.flatten(point.params) - PROBE * found.value)
        there = self._join_terms().residuals(moved, self._points, self._now)
        slope = -self._now.operator.rows.rmv(found.value)
        bend = (2 / PROBE) * ((there - self._now.residuals) / PROBE - slope)
        return system.accelerate(found, bend, BEND) if bool(torch.isfinite(bend).all()) else found

    def _flat_state(self, point: Point) -> dict[str, Tensor]:
        held = super()._flat_state(point)
        # the rule hands on what it is given: so the units are kept, and saved, beside its own memory
        return held | {"units": self._measured} if self._measured is not None else held


class Given(Metric):
    """An operator that is known already, as the metric of this step.

    Args:
        operator: The operator.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    def at(self, params: Params, inputs: Any, *, random: Any = None) -> Operator:
        return self.operator


class ResidualObjective(Objective):
    """d -> the loss at theta + d on the step's points.

    Args:
        system: The terms.
        points: By term.
        now: The linearisation at theta.
        params: theta, by name.
        space: The order of the parameters in d.
    """

    def __init__(
        self,
        system: System | JoinedTerms,
        points: Points,
        now: LinearisedTerms,
        params: dict[str, Tensor],
        space: Space,
    ) -> None:
        super().__init__(params, space, float(now.loss))
        self.system, self.points, self.now = system, points, now

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        if not any(bool(part.any()) for part in step.values()):
            return self.before
        moved = {name: p.detach() + step[name] for name, p in self.params.items()}
        return float(self.system.residuals(moved, self.points, self.now).square().sum() / 2)

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        moved = {name: p.detach() + step[name] for name, p in self.params.items()}
        found = self.system.linearise(moved, self.points)
        return float(found.loss), self.space.unflatten(found.operator.rows.mv(found.residuals))


def measure_units(operator: Operator) -> Tensor:
    """The diagonal of G; of a G whose root is not written out, its mean over each parameter."""
    diagonal = operator.diagonal()
    if not isinstance(operator, RowsOperator) or operator.rows.is_written:
        return diagonal
    space = operator.rows.space
    means = {name: part.mean().expand(part.shape) for name, part in space.unflatten(diagonal).items()}
    return space.flatten(means)
