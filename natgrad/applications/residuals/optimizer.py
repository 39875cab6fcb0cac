"""Nonlinear least squares over named terms: the flat flow of the engine on residuals at points."""

from __future__ import annotations

import math
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
from natgrad.damping import Damping
from natgrad.operators import Operator
from natgrad.optim import FlatState, NaturalGradient, Objective, Solved, SystemEvidence
from natgrad.scoped_values import keep_gradient_mode
from natgrad.solvers import Solution, Solver
from natgrad.spaces import Space

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
        self._compared = (list(system.terms), system.weights, acceleration, scaling)

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
        checked = check_points(self.system, points, self._named) if alone else points
        losses = list[Tensor]()

        def gather() -> SystemEvidence:
            evidence, loss = self._gather_evidence(checked)
            losses.append(loss)
            return evidence

        super().step(evidence=gather)
        return losses[0] if losses and self.state_report().status != "skipped" else torch.full((), math.nan)

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

    def _gather_evidence(self, points: Any) -> tuple[SystemEvidence, Tensor]:
        """What these points tell, and the loss there."""
        params = self._find_trained()
        terms = self.system if self.processes.size == 1 else JoinedTerms(self.system, self.processes)
        now = terms.linearise(params, points)
        self.losses = {name: float(value) for name, value in now.losses.items()}
        gradient = now.operator.rows.mv(now.residuals)
        check_derivatives(self.system, now, points, gradient)
        objective = ResidualObjective(terms, points, now, params, now.operator.rows.space)

        def system(state: FlatState) -> ResidualSystem:
            chosen = (self.solver, self.damping, self.acceleration, self.scaling)
            return ResidualSystem(*chosen, objective, state.gather(objective.space).get("units"))

        return self.evidence(params, gradient, system, objective=objective, attempts=ATTEMPTS), now.loss


class ResidualSystem:
    """(G + level D) x = g + level D x_0, with the acceleration of its solution.

    Args:
        solver: The solver.
        damping: How the damping follows from its number.
        acceleration: Whether the second-order correction is added.
        scaling: Whether D is G's diagonal; else the identity.
        there: The residuals, around the point.
        largest: The largest diagonal of G before this step, shape (n,).
    """

    def __init__(
        self,
        solver: Solver,
        damping: Damping,
        acceleration: bool,
        scaling: bool,
        there: ResidualObjective,
        largest: Tensor | None,
    ) -> None:
        self.solver, self.damping, self.acceleration, self.there = solver, damping, acceleration, there
        self.operator: Operator = there.now.operator
        self.memory = dict[str, Any]()
        self.largest = None
        if scaling:
            diagonal = measure_units(self.operator)
            self.largest = diagonal if largest is None else torch.maximum(diagonal, largest)
        self._damped: DampedSystem | None = None

    def solve(self, level: float, guess: Tensor | None) -> Solved:
        """The solution with the damping's number at `level`, from a guess (n,)."""
        level = self.damping.amount(level, self.operator)
        if self._damped is None:
            self._damped = DampedSystem.of(self.solver, self.operator, self.units, level)
        else:
            self._damped = self._damped.change_damping(level)
        found = self._damped.solve(self.there.now.residuals, guess)
        if self.acceleration:
            found = self._accelerate(self._damped, found)
        units = self._damped.units
        kept = {} if self.largest is None else {"units": self.largest}
        return Solved(found, level if units is None else level * units, kept=kept)

    @property
    def units(self) -> Tensor | None:
        """D: the largest diagonal of G so far, with a share of its mean where an entry does nothing."""
        if self.largest is None:
            return None
        mean = self.largest.mean()
        return self.largest + torch.where(mean > 0, IDLE * mean, 1.0)

    def _accelerate(self, system: DampedSystem, found: Solution) -> Solution:
        """The step with half the acceleration of the geodesic through it (Transtrum & Sethna 2012)."""
        now, space = self.there.now, self.there.space
        moved = space.unflatten(space.flatten(self.there.params) - PROBE * found.value)
        slope = -now.operator.rows.rmv(found.value)
        bend = (2 / PROBE) * ((self.there.residuals(moved) - now.residuals) / PROBE - slope)
        return system.accelerate(found, bend, BEND) if bool(torch.isfinite(bend).all()) else found


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

    def residuals(self, params: dict[str, Tensor]) -> Tensor:
        """Of all terms at other parameters, (r,), with this step's weights of points."""
        return self.system.residuals(params, self.points, self.now)

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        if not any(bool(part.any()) for part in step.values()):
            return self.before
        moved = {name: p.detach() + step[name] for name, p in self.params.items()}
        return float(self.residuals(moved).square().sum() / 2)

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
