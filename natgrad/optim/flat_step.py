"""The parts of one step: the proposal, its judgement, what is told of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.damping import Damping
from natgrad.families import Criterion
from natgrad.layers import Layout, UnitLayout
from natgrad.linalg import all_finite, stays_finite
from natgrad.metrics import Metric
from natgrad.operators import Arranged, Operator
from natgrad.optim.distributed import Ranks
from natgrad.optim.guard import Guard, NotFiniteError, describe_trouble
from natgrad.optim.objective import Objective
from natgrad.optim.recorded_pass import Data
from natgrad.optim.state_report import StateReport, read_cuts
from natgrad.optim.step_length import bounded_below
from natgrad.pure import as_call
from natgrad.rules import BentStep, FlatStep, Memory, Quadratic, Rule, Step
from natgrad.solvers import Solution, Solver, Status
from natgrad.spaces import Space
from natgrad.typed_torch import measure_norm


@dataclass(frozen=True)
class Point:
    """Where a step of the flat flow starts.

    Args:
        params: The active parameters, by name.
        space: Their order in a flat vector.
        gradient: Of the mean loss, shape (n,).
        rates: The learning rates, by name.
    """

    params: dict[str, Tensor]
    space: Space
    gradient: Tensor
    rates: Mapping[str, float]


@dataclass(frozen=True)
class Circumstances:
    """What a rule may know besides the system: see `Quadratic`."""

    loss: float = math.nan
    absolute: bool = False
    steps: int = 0
    bounded: bool = False
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


def quadratic(
    point: Point, operator: Operator, solution: Solution, damping: float | Tensor, known: Circumstances
) -> Quadratic:
    """The model of the loss around the point, with the solver's result at the learning rates as its proposal.

    Args:
        point: Where the step starts.
        operator: G.
        solution: Of (G + damping I) x = g.
        damping: A number, or one per entry (n,).
        known: `absolute`: the solution's image is of |G|, the absolute values of the eigenvalues.
    """
    rated = partial(at_rates, point, operator)

    def propose(value: Tensor, image: Tensor, bend: Tensor | None = None) -> Step:
        metric = damping * value - image  # G x is the image less damping * x
        return rated(FlatStep(-value, metric) if bend is None else BentStep.of(-value, metric, -bend))

    return Quadratic(
        gradient=point.gradient,
        operator=operator,
        damping=damping,
        proposal=propose(solution.value, solution.image, solution.bend),
        nats=operator.nats,
        loss=known.loss,
        basis=solution.basis,
        earlier=[partial(propose, iterate.value, iterate.image) for iterate in solution.iterates],
        rated=rated,
        indefinite=operator.indefinite and not (known.absolute and len(set(point.rates.values())) == 1),
        steps=known.steps,
        bounded=known.bounded,
        full=solution.value @ point.gradient,
        options=known.options,
        counts=known.counts,
        length_unit=operator.length_unit,
    )


def describe_circumstances(
    objective: Objective | None,
    solver: Solver,
    metric: Metric,
    steps: int,
    options: Mapping[str, float],
    counts: Mapping[str, float],
) -> Circumstances:
    """What a rule may know besides the system.

    Args:
        objective: The loss at trial points, if it is known.
        solver: What solves the system.
        metric: Which G.
        steps: Taken so far.
        options: The rule's settings.
        counts: Examples of this step, and seen so far.
    """
    before = math.nan if objective is None else objective.before
    return Circumstances(before, getattr(solver, "absolute", False), steps, is_bounded(metric), options, counts)


def count_examples(
    rule: Rule, operator: Operator, ranks: Ranks, read: Callable[[], Data], seen: int
) -> dict[str, float]:
    """Examples of this step and seen so far with it: as the structure counted them, else here; {} if nobody asks."""
    if not rule.needs_counts:
        return {}
    if "seen" in operator.counts:
        return dict(operator.counts)
    own = torch.tensor(as_call(read().inputs).batch(), device=operator.device)
    examples = int(ranks.sum(own))
    return {"examples": examples, "seen": seen + examples}


def shift_blocks(operator: Operator, amount: Callable[[Operator], float]) -> tuple[Operator, float | Tensor]:
    """G + damping of each block's own, and the damping of every entry (n,).

    Args:
        operator: G. One that is not made of blocks is one block.
        amount: A block's operator -> its damping.
    """
    if not isinstance(operator, Arranged):
        return operator, amount(operator)
    parts, entries = list[tuple[Layout | UnitLayout, Operator]](), dict[str, Tensor]()
    for layout, part in operator.parts:
        level = amount(part)
        parts.append((layout, part.shift(level)))
        shapes = {name: operator.space.blocks[name].shape for name in layout.names}
        entries |= {
            name: torch.full(shape, level, dtype=operator.dtype, device=operator.device)
            for name, shape in shapes.items()
        }
    return Arranged(operator.space, parts), operator.space.flatten(entries)


def at_rates(point: Point, operator: Operator, step: Step) -> Step:
    """Every parameter's part times its rate; one more product where rates differ."""
    rates = {point.rates[name] for name in point.params}
    if len(rates) == 1:
        return step.scale_by(rates.pop())
    vector = flat(step)
    parts = {name: point.rates[name] * part for name, part in point.space.unflatten(vector).items()}
    vector = point.space.flatten(parts)
    return FlatStep(vector, operator.mv(vector))


def flat(step: Step) -> Tensor:
    """The vector (n,) of a step of this flow."""
    assert isinstance(step.vector, Tensor)
    return step.vector


def judge(damping: Damping, model: Quadratic, step: Step, objective: Objective | None) -> tuple[float | None, bool]:
    """True over predicted change, and whether the step is refused: a loss that is not finite, or that rose.

    The ratio is NaN, and the damping rises, where the model promised no decrease: a rate above 2, a velocity that
    runs uphill. Such a step is taken all the same if the loss fell.
    """
    if objective is None:
        return None, False
    predicted = damping.predict_change(float(model.change(step)), float(model.slope(step)))
    return verdict(predicted, objective(step.vector) - objective.before)


def verdict(predicted: float, change: float) -> tuple[float, bool]:
    """`judge` from the two numbers."""
    if predicted < 0:
        return change / predicted, math.isnan(change)
    return math.nan, not change <= 0


def moves_finitely(point: Point, step: Step) -> bool:
    """Whether no parameter becomes NaN or infinite: a step may be finite, and too long for the dtype."""
    parts = point.space.unflatten(flat(step)).items() if all_finite(flat(step)) else ()
    return bool(parts) and all(stays_finite(point.params[name], point.params[name] + part) for name, part in parts)


def is_bounded(metric: Metric) -> bool:
    """Whether the loss that a metric belongs to is known to be at least 0."""
    criterion = getattr(metric, "criterion", None)
    return isinstance(criterion, Criterion) and bounded_below(criterion)


def check_loss(loss: Tensor | None, seen: Guard, bounded: bool, steps: int) -> None:
    """NotFiniteError for a batch in which no target counts, or whose loss is far above any of the run.

    Args:
        loss: The mean loss of the step, NaN where no target counts; None where it is not known.
        seen: The losses so far.
        bounded: True if the loss is at least 0.
        steps: Taken so far.
    """
    if loss is not None:
        wild = bounded and bool(seen.is_wild(loss, steps))
        if wild or not bool(torch.isfinite(loss)):
            raise NotFiniteError(describe_trouble({}, loss, wild))


def check_solution(solution: Solution) -> None:
    """NotFiniteError where the metric's very first product overflowed."""
    if solution.status is Status.NON_FINITE and not bool(solution.value.any()):
        raise NotFiniteError(
            "the metric is not finite: its products overflow or are NaN; nothing was changed. Look for infinite "
            "derivatives (a square root at 0) or an overflow in the model"
        )


def find_changes(
    point: Point,
    step: Step,
    memory: Memory,
    solution: Solution,
    decays: Mapping[str, float],
    keeps: bool,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The parameters after a step and what is kept for each of them, by name.

    Args:
        point: Where the step starts.
        step: What is taken.
        memory: The rule's.
        solution: The solver's.
        decays: The weight decay by name; {} for none.
        keeps: True to keep the solution, for a warm start of the next.
    """
    vector = flat(step)
    taken = bool(decays) and bool(vector.any())  # no step, no decay either
    kept = {key: value for key, value in memory.items() if isinstance(value, Tensor)}
    if keeps:
        # a space that was searched goes on from where the search ended (Vinyals & Povey 2012)
        kept["solution"] = -vector if taken and solution.basis is not None else solution.value
    views = {key: point.space.unflatten(vector) for key, vector in kept.items()}
    parts = point.space.unflatten(vector)
    shares = {name: point.rates[name] * decays[name] if taken else 0.0 for name in parts}
    moved = {name: (point.params[name] * (1 - shares[name])).add_(part) for name, part in parts.items()}
    return moved, {name: {key: view[name].clone() for key, view in views.items()} for name in parts}


def commit(
    params: Mapping[str, Tensor],
    state: MutableMapping[Tensor, dict[str, Any]],
    moved: Mapping[str, Tensor],
    kept: Mapping[str, dict[str, Tensor]],
    owner: MutableMapping[str, Any],
    values: Mapping[str, Any],
) -> None:
    """Write a step: all of it, or nothing.

    Args:
        params: The parameters by name.
        state: The optimizer's, by parameter.
        moved: The parameters' new values, by name.
        kept: New entries of the state, by the parameter's name.
        owner: The optimizer's own attributes.
        values: Their new values.
    """

    def write() -> None:
        for name, new in moved.items():
            params[name].copy_(new)
            state[params[name]].update(kept[name])
        owner.update(values)

    try:
        write()
    except BaseException:
        write()  # known values to known places: a second time finishes what Ctrl-C cut
        raise


def report_step(
    counted: StateReport,
    operator: Operator,
    gradient: Tensor,
    model: Quadratic,
    step: Step,
    solution: Solution,
    ratio: float | None,
) -> StateReport:
    """The report of a step.

    Args:
        counted: Who has counted the step already.
        operator: G.
        gradient: g, shape (n,).
        model: What the rule was given.
        step: What it made of it.
        solution: Of (G + damping I) x = g.
        ratio: True over predicted decrease; None where it was not asked for.
    """
    size, proposed = float(measure_norm(flat(step))), float(measure_norm(flat(model.proposal)))
    norm, damping = float(measure_norm(gradient)), model.damping
    return replace(
        counted,
        loss=float(model.loss),
        kl=float(model.kl(step)),
        damping=float(damping.mean()) if isinstance(damping, Tensor) else damping,
        ratio=ratio,
        solver_steps=solution.steps,
        residual=float(solution.residual) / norm if norm else 0.0,
        status=str(solution.status),
        outside=left_over(gradient, solution, damping) / norm if norm else 0.0,
        rate=size / proposed if proposed else 0.0,
        gradient=norm,
        cuts=read_cuts(model.cuts),
        counts=dict(operator.counts),
    )


def left_over(gradient: Tensor, solution: Solution, damping: float | Tensor) -> float:
    """|g - G x|: G x is the image less damping * x."""
    return float(measure_norm((gradient - solution.image).add_(damping * solution.value)))
