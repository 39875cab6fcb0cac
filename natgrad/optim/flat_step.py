"""The parts of one step: the proposal, its judgement, what is told of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from natgrad.damping import Damping
from natgrad.linalg import all_finite, stays_finite
from natgrad.operators import Operator
from natgrad.optim.objective import Objective
from natgrad.optim.state_report import StateReport
from natgrad.rules import Quadratic, Step
from natgrad.solvers import Solution, Status
from natgrad.spaces import Space


@dataclass(frozen=True)
class Point:
    """Where a step starts: the active parameters, the gradient of the mean loss (n,), the parameters' rates."""

    params: dict[str, Tensor]
    space: Space
    gradient: Tensor
    rates: Mapping[str, float]


def quadratic(
    point: Point, operator: Operator, solution: Solution, damping: float, loss: float, absolute: bool = False
) -> Quadratic:
    """The model of the loss around the point, with the solver's result at the learning rates as its proposal.

    absolute: whether the solution's image is of |G|, the absolute values of the eigenvalues.
    """
    rated = partial(at_rates, point, operator)

    def proposed(value: Tensor, image: Tensor) -> Step:
        return rated(Step(-value, damping * value - image))  # G x is the image less damping * x

    return Quadratic(
        gradient=point.gradient,
        operator=operator,
        damping=damping,
        proposal=proposed(solution.value, solution.image),
        nats=operator.nats,
        loss=loss,
        basis=solution.basis,
        earlier=[partial(proposed, iterate.value, iterate.image) for iterate in solution.iterates],
        rated=rated,
        indefinite=operator.indefinite and not (absolute and len(set(point.rates.values())) == 1),
    )


def at_rates(point: Point, operator: Operator, step: Step) -> Step:
    """Every parameter's part times its rate; one more product where rates differ."""
    rates = {point.rates[name] for name in point.params}
    if len(rates) == 1:
        return step.scaled(rates.pop())
    parts = {name: point.rates[name] * part for name, part in point.space.unflatten(step.vector).items()}
    vector = point.space.flatten(parts)
    return Step(vector, operator.mv(vector))


def judge(damping: Damping, model: Quadratic, step: Step, objective: Objective | None) -> tuple[float | None, bool]:
    """True over predicted change, and whether the step is refused: a loss that is not finite, or that rose.

    The ratio is NaN, and the damping rises, where the model promised no decrease: a rate above 2, a velocity that
    runs uphill. Such a step is taken all the same if the loss fell.
    """
    if not damping.needs_ratio or objective is None:
        return None, False
    predicted = damping.predicted(model.change(step), model.slope(step))
    return verdict(predicted, objective(step.vector) - objective.before)


def verdict(predicted: float, change: float) -> tuple[float, bool]:
    """`judge` from the two numbers."""
    if predicted < 0:
        return change / predicted, math.isnan(change)
    return math.nan, not change <= 0


def moves_finitely(point: Point, step: Step) -> bool:
    """Whether no parameter becomes NaN or infinite: a step may be finite, and too long for the dtype."""
    parts = point.space.unflatten(step.vector).items() if all_finite(step.vector) else ()
    return bool(parts) and all(stays_finite(point.params[name], point.params[name] + part) for name, part in parts)


def check_solution(solution: Solution) -> None:
    """ValueError where the metric's very first product overflowed."""
    if solution.status is Status.NON_FINITE and not bool(solution.value.any()):
        raise ValueError(
            "the metric is not finite: its products overflow or are NaN; nothing was changed. Look for infinite "
            "derivatives (a square root at 0) or an overflow in the model"
        )


def told(
    last: StateReport,
    model: Quadratic,
    step: Step,
    solution: Solution,
    ratio: float | None,
    failed: bool,
    refused: bool,
) -> StateReport:
    """The report of a step after `last`."""
    size, proposed = float(step.vector.norm()), float(model.proposal.vector.norm())
    norm = float(model.gradient.norm())
    return StateReport(
        step=last.step + 1,
        loss=model.loss,
        kl=model.kl(step),
        damping=model.damping,
        ratio=ratio,
        solver_steps=solution.steps,
        residual=float(solution.residual) / norm if norm else 0.0,
        status=str(solution.status),
        outside=left_over(model.gradient, solution, model.damping) / norm if norm else 0.0,
        rate=size / proposed if proposed else 0.0,
        gradient=norm,
        failures=last.failures + failed,
        refused=last.refused + refused,
        counts=dict(model.operator.counts),
    )


def left_over(gradient: Tensor, solution: Solution, damping: float) -> float:
    """|g - G x|: G x is the image less damping * x."""
    return float((gradient - solution.image).add_(solution.value, alpha=damping).norm())
