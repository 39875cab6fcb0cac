"""One step of a metric as one linear system, as a pure function of what is known and what a batch told.

Its order is that of `natural_step`: the metric, (G + damping I)^-1 g, a rule that makes a step of it, the damping of
the next one. Who has a metric, residuals or a wave function says what its system is; the rest is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.families import Criterion
from natgrad.ground.spaces import Space
from natgrad.ground.typed_torch import measure_norm
from natgrad.layers import Layout, UnitLayout
from natgrad.metrics import Metric
from natgrad.operators import Arranged, Operator
from natgrad.optim.checks import inputs_of
from natgrad.optim.guard import Guard, NotFiniteError, are_finite, check_loss, stay_finite
from natgrad.optim.joined import check_in_step, join_choice
from natgrad.optim.objective import Objective, Proximal, verdict
from natgrad.optim.passes import Data
from natgrad.optim.processes import Ranks
from natgrad.optim.report import StateReport, read_cuts
from natgrad.optim.state import Outside
from natgrad.optim.step import bounded_below
from natgrad.rules import BentStep, Damping, FlatStep, Memory, Quadratic, Rule, Step, require_loss
from natgrad.solvers import Solution, Solver, Status
from natgrad.structures import OperatorStructure, Preconditioner, Structure, exchanging

SOLUTION = "solution"
"""Where the solver's last solution lies among the vectors of a state; the rest is the rule's, or its system's."""


@dataclass(frozen=True)
class FlatState:
    """All that the next step of a flat system depends on, besides parameters, groups and the batch.

    Attributes:
        level: The damping's own number.
        step: Steps so far.
        seen: Examples, where somebody counts them.
        judged: The step at which the damping compared the loss with its promise last, -1 before.
        vectors: By parameter and name: the last solution, and what the rule and the system remember.
        outside: What is known of losses that `opt.loss` was not told of.
        memory: The structure's; None before the first step.
        prepared: The preconditioner's.
        guard: What keeps bad batches from doing harm.
    """

    level: float
    step: int = 0
    seen: int = 0
    judged: int = -1
    vectors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict[str, Mapping[str, Tensor]])
    memory: dict[str, Any] | None = None
    prepared: dict[str, Any] | None = None
    guard: Guard = Guard()
    outside: Outside = Outside()

    def gather(self, space: Space) -> dict[str, Tensor]:
        """The vectors, (n,) each.

        Args:
            space: The order of the parameters in them.
        """
        held = {name: self.vectors.get(name, {}) for name in space.blocks}
        keys = {key for kept in held.values() for key in kept}
        return {key: space.flatten({n: kept[key] for n, kept in held.items() if key in kept}) for key in keys}


@dataclass(frozen=True)
class FlatChoices:
    """What does not change between steps.

    Attributes:
        rule: From a quadratic model to a step.
        damping: How the damping follows from its number.
        warm_start: The share of the last solution from which the solver starts.
        bounded: True if the loss is known to be at least 0.
        absolute: True if the solver makes G's eigenvalues positive.
        ranks: The processes.
    """

    rule: Rule
    damping: Damping
    warm_start: float
    bounded: bool
    absolute: bool
    ranks: Ranks

    def is_judged(self, state: FlatState) -> bool:
        """Whether the damping looks at the next step's ratio."""
        return self.damping.needs_ratio and state.step - state.judged >= (self.damping.every or 1)


@dataclass(frozen=True)
class Solved:
    """What a system came to.

    Attributes:
        solution: Of (G + damping I) x = g.
        damping: A number, or one per entry (n,).
        prepared: The preconditioner's memory.
        kept: Vectors (n,) that the system remembers.
    """

    solution: Solution
    damping: float | Tensor
    prepared: dict[str, Any] | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class LinearSystem(Protocol):
    """(G + damping I) x = g at a point."""

    @property
    def operator(self) -> Operator:
        """G."""
        ...

    @property
    def memory(self) -> dict[str, Any]:
        """The structure's, with this step's metric."""
        ...

    def solve(self, level: float, guess: Tensor | None) -> Solved:
        """The solution.

        Args:
            level: The damping's number.
            guess: Where an iteration starts, shape (n,).
        """
        ...


@dataclass(frozen=True)
class SystemEvidence:
    """What a batch told.

    Attributes:
        params: The active parameters, by name.
        gradient: Of the mean loss, shape (n,).
        system: The state -> what is to be solved.
        rates: The learning rates, by name.
        decays: The weight decay, by name.
        options: The rule's settings.
        loss: The mean loss, NaN where no target counts; None where it is not known.
        objective: The loss at trial points; None where it cannot be had.
        trial: What a rule looks at that uses the loss where it can be had; None: the objective.
        outside: What is known of losses that `opt.loss` was not told of; None: what was.
        examples: Counts the batch's, on this process.
        attempts: How often the system is solved, each time with more damping, until the rule takes its solution.
    """

    params: Mapping[str, Tensor]
    gradient: Tensor
    system: Callable[[FlatState], LinearSystem]
    rates: Mapping[str, float]
    decays: Mapping[str, float]
    options: Mapping[str, float]
    loss: Tensor | None = None
    objective: Objective | None = None
    examples: Callable[[], int] = int
    attempts: int = 1
    trial: Callable[[], Objective | Proximal | None] | None = None
    outside: Outside | None = None

    @property
    def space(self) -> Space:
        """The order of the parameters in a flat vector."""
        return Space(self.params)


Move = dict[str, Tensor]
"""The parameters after a step, by name."""


@dataclass(frozen=True)
class Attempt:
    """One solution, and what the rule made of it.

    Attributes:
        solved: The solution.
        model: What the rule was given.
        step: What is taken.
        memory: What the rule remembers.
        level: The damping's number from here on.
        ratio: True over predicted change of the loss; None where it was not asked for.
        failed: True if a number was not finite.
        refused: True if the loss after the step refused it.
    """

    solved: Solved
    model: Quadratic
    step: Step
    memory: Memory
    level: float
    ratio: float | None
    failed: bool
    refused: bool

    @property
    def rate(self) -> float:
        """The step's length relative to the proposal's."""
        proposed = float(measure_norm(flat(self.model.proposal)))
        return float(measure_norm(flat(self.step))) / proposed if proposed else 0.0


def flat_step(choices: FlatChoices, state: FlatState, evidence: SystemEvidence) -> tuple[Move, FlatState, StateReport]:
    """theta -> theta + d: the parameters that move, the next state, and the report.

    Pure: an error, Ctrl-C or NotFiniteError leaves `state` in force.
    """
    check_loss(evidence.loss, state.guard, choices.bounded, state.step)
    check_asks(choices, state, evidence.objective)
    system = evidence.system(state)
    counts = count_examples(choices, state, evidence, system.operator)
    vectors = state.gather(evidence.space)
    last = vectors.pop(SOLUTION, None)
    guess = None if last is None or choices.warm_start == 0 else choices.warm_start * last
    level, guard = state.level, state.guard
    remembered: Memory = dict(vectors)
    found = attempt(choices, state, evidence, system, level, guess, remembered, counts)
    for rises in range(1, evidence.attempts):
        if found.rate or not found.level > level:
            break
        guard = replace(guard, failures=guard.failures + found.failed, refused=guard.refused + found.refused)
        level = found.level
        for _ in range(rises):  # beside the one that the refusal brings: 2, 3, 4, 5 rises (Nielsen 1999)
            level = choices.damping.update(level, math.nan)
        # damping pulls to the guess: where it leads uphill, more damping would never help
        found = attempt(choices, state, evidence, system, level, None, found.memory, counts)
    guard = follow_attempt(replace(guard, skipped=state.guard.skipped), choices, found, evidence)
    moved, kept = find_changes(evidence, found, keeps=choices.warm_start > 0)
    after = FlatState(
        level=found.level,
        step=state.step + 1,
        seen=int(counts.get("seen", state.seen)),
        judged=state.judged if found.ratio is None else state.step,
        vectors={**state.vectors, **{name: {**state.vectors.get(name, {}), **one} for name, one in kept.items()}},
        memory=system.memory,
        prepared=found.solved.prepared,
        guard=guard,
        outside=evidence.outside or state.outside,
    )
    return moved, after, report_step(after, evidence.gradient, system.operator, found)


def leave_out(state: FlatState) -> tuple[FlatState, StateReport]:
    """The state after a step that is not taken since a number is not finite."""
    guard = state.guard.follow_loss(None, taken=False)
    guard = replace(guard, failures=guard.failures + 1, skipped=guard.skipped + 1)
    after = replace(state, step=state.step + 1, guard=guard)
    return after, StateReport(after.step, status="skipped", failures=guard.failures, refused=guard.refused)


def attempt(
    choices: FlatChoices,
    state: FlatState,
    evidence: SystemEvidence,
    system: LinearSystem,
    level: float,
    guess: Tensor | None,
    remembered: Memory,
    counts: Mapping[str, float],
) -> Attempt:
    """Solve, let the rule make a step of the solution, and let the damping judge it."""
    objective = evidence.objective
    solved = system.solve(level, guess)
    check_solution(solved.solution)
    model = quadratic(choices, state, evidence, system.operator, solved, counts)
    trial, known = objective, model
    if choices.rule.uses_loss and evidence.trial is not None:
        trial = evidence.trial()
        known = replace(model, loss=math.nan if trial is None else trial.before)
    step, memory = choices.rule.step(known, trial, remembered)
    ratio, refused = judge(choices.damping, model, step, objective) if choices.is_judged(state) else (None, False)
    # a loss that is not finite at the start already leaves nothing to compare with
    failed = not moves_finitely(evidence, step) or (objective is not None and math.isnan(objective.before))
    if failed or refused:
        step = model.nothing()
        memory = Memory(dict.fromkeys(memory, torch.zeros_like(evidence.gradient)))  # a fresh start
    check_in_step(choices.ranks, flat(step))
    failed = failed or solved.solution.status is Status.NON_FINITE
    level = level if ratio is None else choices.damping.update(level, ratio)
    return Attempt(solved, model, step, memory, level, ratio, failed, refused)


def follow_attempt(guard: Guard, choices: FlatChoices, found: Attempt, evidence: SystemEvidence) -> Guard:
    """The guard after a step."""
    unmoved = guard.unmoved
    if choices.rule.needs_loss and not (found.failed or found.refused):
        still = found.rate == 0 and bool(evidence.gradient.any())
        unmoved = guard.unmoved + 1 if still else 0
    return replace(
        guard.follow_loss(evidence.loss, not found.failed),
        failures=guard.failures + found.failed,
        refused=guard.refused + found.refused,
        skipped=guard.skipped + 1 if found.failed else 0,
        unmoved=unmoved,
    )


# the system of a metric


@dataclass(frozen=True)
class SystemChoices:
    """How a metric is stored, damped and inverted.

    Attributes:
        structure: How the metric is stored.
        solver: What solves.
        preconditioner: What helps it; None for nothing.
        damping: How the damping follows from its number.
        ranks: The processes.
    """

    structure: Structure
    solver: Solver
    preconditioner: Preconditioner | None
    damping: Damping
    ranks: Ranks


class MetricSystem:
    """(G + damping I) x = g for a metric at a step's data.

    Args:
        choices: What does not change between steps.
        metric: Which G, over all processes.
        params: The active parameters, by name.
        gradient: Of the mean loss, shape (n,).
        data: The metric's.
        state: The last step's.
        bound: From the damping's amount to what is added to G.
        operator: G, where it is known already.
    """

    def __init__(
        self,
        choices: SystemChoices,
        metric: Metric,
        params: Mapping[str, Tensor],
        gradient: Tensor,
        data: Data,
        state: FlatState,
        *,
        bound: Callable[[float], float] = float,
        operator: Operator | None = None,
    ) -> None:
        self.choices, self.metric, self.params, self.gradient = choices, metric, dict(params), gradient
        self.data, self.bound, self.last = data, bound, state.prepared
        structure = choices.structure
        if operator is not None:
            assert isinstance(structure, OperatorStructure)
            self.operator, self.memory = structure.average(state.memory, operator, self.params)
            return
        own, structure, exchange = join_choice(choices.ranks, metric, structure, data)
        with exchanging(exchange):
            inputs = inputs_of(metric, data)
            self.operator, self.memory = structure.update(state.memory, own, self.params, inputs, random=data.random)

    def solve(self, level: float, guess: Tensor | None) -> Solved:
        """The solution with the damping's number at `level`, from a guess (n,)."""
        system, amount, damping = self.operator, 0.0, self.choices.damping
        if damping.per_block:
            system, amount = shift_blocks(system, lambda part: self.bound(damping.amount(level, part)))
            rest = amount if isinstance(amount, float) else 0.0
        else:
            amount = rest = self.bound(damping.amount(level, system))
        solver, prepared = self._prepare(system, rest)
        return Solved(solver.solve(system, self.gradient, damping=rest, guess=guess), amount, prepared)

    def _prepare(self, system: Operator, damping: float) -> tuple[Solver, dict[str, Any] | None]:
        """The solver, with this step's preconditioner if there is one, and that one's memory."""
        choices = self.choices
        if choices.preconditioner is None:
            return choices.solver, None
        own, preconditioner, exchange = join_choice(choices.ranks, self.metric, choices.preconditioner, self.data)
        with exchanging(exchange):
            inputs = inputs_of(self.metric, self.data)
            inverse, memory = preconditioner.update(
                self.last, own, self.params, inputs, damping, system, self.data.random
            )
        return replace(choices.solver, preconditioner=inverse), memory  # type: ignore[call-arg]


# the rule's model


def quadratic(
    choices: FlatChoices,
    state: FlatState,
    evidence: SystemEvidence,
    operator: Operator,
    solved: Solved,
    counts: Mapping[str, float],
) -> Quadratic:
    """The model of the loss around the point, with the solver's result at the learning rates as its proposal."""
    solution, damping, objective = solved.solution, solved.damping, evidence.objective
    rated = partial(at_rates, evidence, operator)

    def propose(value: Tensor, image: Tensor, bend: Tensor | None = None) -> Step:
        metric = damping * value - image  # G x is the image less damping * x
        return rated(FlatStep(-value, metric) if bend is None else BentStep.of(-value, metric, -bend))

    return Quadratic(
        gradient=evidence.gradient,
        operator=operator,
        damping=damping,
        proposal=propose(solution.value, solution.image, solution.bend),
        nats=operator.nats,
        loss=math.nan if objective is None else objective.before,
        basis=solution.basis,
        earlier=[partial(propose, iterate.value, iterate.image) for iterate in solution.iterates],
        rated=rated,
        # the image of an absolute solution is of |G|
        indefinite=operator.indefinite and not (choices.absolute and len(set(evidence.rates.values())) == 1),
        steps=state.step,
        bounded=choices.bounded,
        full=solution.value @ evidence.gradient,
        options=evidence.options,
        counts=counts,
        length_unit=operator.length_unit,
    )


def check_asks(choices: FlatChoices, state: FlatState, objective: Objective | None) -> None:
    """ValueError where the damping or the rule needs a loss that cannot be evaluated."""
    if objective is None and choices.is_judged(state):
        raise ValueError(
            f"damping {type(choices.damping).__name__} compares the loss before and after the step: compute it with "
            "optimizer.loss(outputs, targets), or call optimizer.step(closure)"
        )
    require_loss(choices.rule, objective)


def count_examples(
    choices: FlatChoices, state: FlatState, evidence: SystemEvidence, operator: Operator
) -> dict[str, float]:
    """Examples of this step and seen so far with it: as the structure counted them, else here; {} if nobody asks."""
    if not choices.rule.needs_counts:
        return {}
    if "seen" in operator.counts:
        return dict(operator.counts)
    examples = int(choices.ranks.sum(torch.tensor(evidence.examples(), device=operator.device)))
    return {"examples": examples, "seen": state.seen + examples}


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


def at_rates(evidence: SystemEvidence, operator: Operator, step: Step) -> Step:
    """Every parameter's part times its rate; one more product where rates differ."""
    rates = {evidence.rates[name] for name in evidence.params}
    if len(rates) == 1:
        return step.scale_by(rates.pop())
    space = evidence.space
    vector = space.flatten({name: evidence.rates[name] * part for name, part in space.unflatten(flat(step)).items()})
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


def moves_finitely(evidence: SystemEvidence, step: Step) -> bool:
    """Whether no parameter becomes NaN or infinite: a step may be finite, and too long for the dtype."""
    vector, params = flat(step), evidence.params
    parts = evidence.space.unflatten(vector)
    return are_finite([[vector]])[0] and stay_finite(params, {name: params[name] + d for name, d in parts.items()})


def is_bounded(metric: Metric) -> bool:
    """Whether the loss that a metric belongs to is known to be at least 0."""
    criterion = getattr(metric, "criterion", None)
    return isinstance(criterion, Criterion) and bounded_below(criterion)


def check_solution(solution: Solution) -> None:
    """NotFiniteError where the metric's very first product overflowed."""
    if solution.status is Status.NON_FINITE and not bool(solution.value.any()):
        raise NotFiniteError(
            "the metric is not finite: its products overflow or are NaN; nothing was changed. Look for infinite "
            "derivatives (a square root at 0) or an overflow in the model"
        )


def find_changes(evidence: SystemEvidence, found: Attempt, keeps: bool) -> tuple[Move, dict[str, dict[str, Tensor]]]:
    """The parameters after a step and what is kept for each of them, by name.

    keeps: True to keep the solution, for a warm start of the next step.
    """
    vector, solution, space = flat(found.step), found.solved.solution, evidence.space
    taken = bool(vector.any()) and not (found.failed or found.refused)  # no step, no decay either
    kept = {key: value for key, value in found.memory.items() if isinstance(value, Tensor)} | dict(found.solved.kept)
    if keeps:
        # a space that was searched goes on from where the search ended (Vinyals & Povey 2012)
        kept[SOLUTION] = -vector if taken and solution.basis is not None else solution.value
    views = {key: space.unflatten(one) for key, one in kept.items()}
    parts = space.unflatten(vector)
    shares = {name: evidence.rates[name] * evidence.decays[name] if taken else 0.0 for name in parts}
    moved = {name: (evidence.params[name] * (1 - shares[name])).add_(part) for name, part in parts.items()}
    return moved, {name: {key: view[name].clone() for key, view in views.items()} for name in parts}


def report_step(state: FlatState, gradient: Tensor, operator: Operator, found: Attempt) -> StateReport:
    """What is told of a step. gradient: g, shape (n,). operator: G."""
    solution, damping, norm = found.solved.solution, found.solved.damping, float(measure_norm(gradient))
    return StateReport(
        step=state.step,
        loss=float(found.model.loss),
        kl=float(found.model.kl(found.step)),
        damping=float(damping.mean()) if isinstance(damping, Tensor) else damping,
        ratio=found.ratio,
        solver_steps=solution.steps,
        residual=float(solution.residual) / norm if norm else 0.0,
        status=str(solution.status),
        outside=left_over(gradient, solution, damping) / norm if norm else 0.0,
        rate=found.rate,
        gradient=norm,
        cuts=read_cuts(found.model.cuts),
        failures=state.guard.failures,
        refused=state.guard.refused,
        counts=dict(operator.counts),
    )


def left_over(gradient: Tensor, solution: Solution, damping: float | Tensor) -> float:
    """|g - G x|: G x is the image less damping * x."""
    return float(measure_norm((gradient - solution.image).add_(damping * solution.value)))
