"""The step of a metric as one linear system: the metric, (G + damping I)^-1 g, a rule that makes a step of it.

Who has a metric, residuals or a wave function says what its system is; the rest is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
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
from natgrad.optim.guard import NotFiniteError, are_finite, stay_finite
from natgrad.optim.joined import check_in_step, join_choice
from natgrad.optim.objective import Objective, Proximal
from natgrad.optim.passes import Data
from natgrad.optim.processes import Processes, describe_groups
from natgrad.optim.report import read_cuts
from natgrad.optim.state import OutsideLosses, State, SystemMemory
from natgrad.optim.step import Batch, Choices, Evidence, Work, bounded_below
from natgrad.rules import BentStep, Damping, FlatStep, Memory, Quadratic, RunFacts, Step, SystemFacts, require_loss
from natgrad.rules import Objective as LossAt
from natgrad.solvers import Solution, Solver, Status
from natgrad.structures import OperatorStructure, Preconditioner, Structure

SOLUTION = "solution"
"""Where the solver's last solution lies among the vectors of a state; the rest is the rule's, or its system's."""


@dataclass(frozen=True)
class Solved:
    """What a system came to.

    Attributes:
        solution: Of (G + damping I) x = g.
        damping: A number, or one per entry (n,).
        prepared: The preconditioner's memory.
        vectors: What the system remembers, (n,) each.
    """

    solution: Solution
    damping: float | Tensor
    prepared: dict[str, Any] | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


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
class SystemEvidence(Evidence):
    """What a batch told of a metric that is one linear system.

    Attributes:
        params: The active parameters, by name.
        gradient: Of the mean loss, shape (n,).
        system: The state -> what is to be solved.
        rates: The learning rates, by name.
        decays: The weight decay, by name.
        options: The rule's settings.
        loss: The mean loss, NaN where no target counts; None where it is not known.
        objective: The loss at trial points; None where it cannot be had.
        examples: Counts the batch's, on this process.
        attempts: How often the system is solved, each time with more damping, until the rule takes its solution.
        trial: What a rule looks at that uses the loss where it can be had; None: the objective.
        outside: What is known of losses that `opt.loss` was not told of; None: what was.
        complete: What more there is to tell of a batch that is fit for a step; None: nothing.
    """

    params: Mapping[str, Tensor]
    gradient: Tensor
    system: Callable[[State], LinearSystem]
    rates: Mapping[str, float]
    decays: Mapping[str, float]
    options: Mapping[str, float]
    loss: Tensor | None = None
    objective: Objective | None = None
    examples: Callable[[], int] = int
    attempts: int = 1
    trial: Callable[[], Objective | Proximal | None] | None = None
    outside: OutsideLosses | None = None
    complete: Callable[[SystemEvidence], SystemEvidence] | None = None

    @property
    def space(self) -> Space:
        """The order of the parameters in a flat vector."""
        return Space(self.params)

    def pool(self, choices: Choices, state: State) -> Batch:
        """The gradient as it is: it is that of all processes already. A loss must be a number, and finite.

        Args:
            choices: What does not change between steps.
            state: Of the last step.
        """
        loss = None if self.loss is None else torch.where(torch.isfinite(self.loss), self.loss, math.nan)
        return Batch(self.space.unflatten(self.gradient), measure_norm(self.gradient), loss, state.guard)

    def open(self, choices: Choices, state: State, batch: Batch) -> FlatWork:
        """The system of this batch.

        Args:
            choices: What does not change between steps.
            state: Of the last step.
            batch: What `pool` made, judged.
        """
        evidence = self if self.complete is None else self.complete(self)
        check_asks(choices, state, evidence.objective)
        return FlatWork(choices, replace(state, guard=batch.guard), batch, evidence)


class FlatWork(Work):
    """One step of a linear system; solved again with more damping where the rule takes nothing of a solution.

    Attributes:
        system: What is solved.
        level: The damping's number.
        guess: Where an iteration starts, shape (n,).
        remembered: What the rule remembers.
        tries: Solutions so far.
    """

    def __init__(self, choices: Choices, state: State, batch: Batch, evidence: SystemEvidence) -> None:
        super().__init__(choices, state, batch, evidence.examples)
        self.evidence, self.space = evidence, evidence.space
        self.system = evidence.system(state)
        vectors = state.gather(self.space)
        last = vectors.pop(SOLUTION, None)
        self.guess = None if last is None or choices.warm_start == 0 else choices.warm_start * last
        self.level, self.remembered, self.tries = state.system.level, Memory(vectors), 0
        self.vectors: Mapping[str, Mapping[str, Tensor]] = state.vectors

    def propose(self) -> Quadratic:
        """The model around the point, with the solver's result at the learning rates as its proposal."""
        self.solved, self.tries = self.system.solve(self.level, self.guess), self.tries + 1
        check_solution(self.solved.solution)
        choices, evidence, operator = self.choices, self.evidence, self.system.operator
        solution, damping, objective = self.solved.solution, self.solved.damping, evidence.objective
        rated = partial(at_rates, evidence, operator)

        def make(value: Tensor, image: Tensor, bend: Tensor | None = None) -> Step:
            metric = damping * value - image  # G x is the image less damping * x
            return rated(FlatStep(-value, metric) if bend is None else BentStep.of(-value, metric, -bend))

        return Quadratic(
            gradient=evidence.gradient,
            operator=operator,
            damping=damping,
            proposal=make(solution.value, solution.image, solution.bend),
            nats=operator.nats,
            loss=math.nan if objective is None else objective.before,
            run=RunFacts(self.state.step, choices.bounded, evidence.options, lambda: self.counts),
            system=SystemFacts(
                full=solution.value @ evidence.gradient,
                basis=solution.basis,
                earlier=[partial(make, iterate.value, iterate.image) for iterate in solution.iterates],
                rated=rated,
                # the image of an absolute solution is of |G|
                indefinite=operator.indefinite and not (choices.absolute and len(set(evidence.rates.values())) == 1),
            ),
        )

    def memory(self) -> Memory:
        """The rule's vectors, (n,) each."""
        return self.remembered

    @contextmanager
    def open_losses(self, model: Quadratic, judged: bool) -> Generator[tuple[Quadratic, LossAt | None]]:
        """The objective of the evidence, or what stands for it."""
        trial, seen = self.evidence.objective, model
        if self.rule.uses_loss and self.evidence.trial is not None:
            trial = self.evidence.trial()
            seen = replace(model, loss=math.nan if trial is None else trial.before)
        yield seen, trial

    def compare_losses(self, model: Quadratic, step: Step, loss_at: LossAt | None) -> tuple[float, bool]:
        """True over predicted change of the evidence's own loss, and whether the step is refused.

        The ratio is NaN, and the damping rises, where the model promised no decrease: a rate above 2, a velocity that
        runs uphill. Such a step is taken all the same if the loss fell.
        """
        objective = self.evidence.objective
        assert objective is not None
        return self.find_ratio(model, step, objective(step.vector) - objective.before)

    def settle(self, model: Quadratic, step: Step, memory: Memory, ratio: float | None, refused: bool) -> bool:
        """The parameters after the step. False where none was taken of this solution, and more damping may help."""
        objective, state = self.evidence.objective, self.state
        # a loss that is not finite at the start already leaves nothing to compare with
        failed = not moves_finitely(self.evidence, step) or (objective is not None and math.isnan(objective.before))
        if failed or refused:
            step = model.nothing()
            memory = Memory(dict.fromkeys(memory, torch.zeros_like(self.evidence.gradient)))  # a fresh start
        check_in_step(self.choices.processes, flat(step), self.describe_groups())
        failed = failed or self.solved.solution.status is Status.NON_FINITE
        level = self.level if ratio is None else self.choices.damping.update(self.level, ratio)
        guard = state.guard
        guard = replace(guard, failures=guard.failures + failed, refused=guard.refused + refused)
        self.state = replace(state, guard=guard)
        proposed = float(measure_norm(flat(model.proposal)))
        rate = float(measure_norm(flat(step))) / proposed if proposed else 0.0
        if self.tries < self.evidence.attempts and not rate and level > self.level:
            for _ in range(self.tries):  # beside the one that the refusal brings: 2, 3, 4, 5 rises (Nielsen 1999)
                level = self.choices.damping.update(level, math.nan)
            # damping pulls to the guess: where it leads uphill, more damping would never help
            self.level, self.remembered, self.guess = level, memory, None
            return False
        self.level = level
        self.move(flat(step), memory, taken=not (failed or refused))
        self.follow(ratio, rate, failed, refused)
        self.tell(model, step, ratio, rate)
        return True

    def describe_groups(self) -> str:
        """The numbers of the parameter groups that this step is made with."""
        evidence = self.evidence
        groups = dict.fromkeys(zip(evidence.rates.values(), evidence.decays.values(), strict=True))
        known = [{"lr": lr, "weight_decay": decay, **evidence.options} for lr, decay in groups]
        return describe_groups(known, "lr", "weight_decay", *evidence.options)

    def move(self, vector: Tensor, memory: Memory, taken: bool) -> None:
        """The parameters after the step, and what is kept for each of them."""
        evidence, solution, space = self.evidence, self.solved.solution, self.space
        taken = taken and bool(vector.any())  # no step, no decay either
        vectors = {key: value for key, value in memory.items() if isinstance(value, Tensor)} | dict(self.solved.vectors)
        if self.choices.warm_start > 0:
            # a space that was searched goes on from where the search ended (Vinyals & Povey 2012)
            vectors[SOLUTION] = -vector if taken and solution.basis is not None else solution.value
        views = {key: space.unflatten(flat) for key, flat in vectors.items()}
        for name, part in space.unflatten(vector).items():
            share = evidence.rates[name] * evidence.decays[name] if taken else 0.0
            self.moved[name] = (evidence.params[name] * (1 - share)).add_(part)
            held = {key: view[name].clone() for key, view in views.items()}
            self.vectors = {**self.vectors, name: {**self.vectors.get(name, {}), **held}}

    def follow(self, ratio: float | None, rate: float, failed: bool, refused: bool) -> None:
        """What the guard knows of the step, and when it was judged."""
        state, unmoved = self.state, self.state.guard.unmoved
        if self.rule.uses_loss and not (failed or refused):
            unmoved = state.guard.count_unmoved(rate, bool(self.evidence.gradient.any()))
        guard = state.guard.follow_step(self.loss, taken=not failed, unmoved=unmoved)
        pace = state.pace if ratio is None else replace(state.pace, judged=state.step)
        self.state = replace(state, guard=guard, pace=pace)

    def tell(self, model: Quadratic, step: Step, ratio: float | None, rate: float) -> None:
        """What is told of the step."""
        solution, damping, norm = self.solved.solution, self.solved.damping, float(self.batch.norm)
        if self.evidence.objective is not None:
            self.report["loss"] = model.loss
        self.report |= {
            "kl": model.kl(step),
            "damping": damping.mean() if isinstance(damping, Tensor) else damping,
            "solver_steps": solution.steps,
            "residual": float(solution.residual) / norm if norm else 0.0,
            "status": str(solution.status),
            "outside": left_over(self.evidence.gradient, solution, damping) / norm if norm else 0.0,
            "rate": rate,
            "cuts": read_cuts(model.cuts),
            "counts": dict(self.system.operator.counts),
        }
        if ratio is not None:
            self.report["ratio"] = ratio

    def is_sound(self) -> bool:
        """Whether the step can be taken: it was looked at already."""
        return True

    def finish(self) -> State:
        """The state after it."""
        return replace(
            self.state,
            step=self.state.step + 1,
            vectors=self.vectors,
            system=SystemMemory(self.level, self.system.memory, self.solved.prepared),
            outside=self.evidence.outside or self.state.outside,
        )


# the system of a metric


@dataclass(frozen=True)
class SystemChoices:
    """How a metric is stored, damped and inverted."""

    structure: Structure  # how the metric is stored
    solver: Solver  # what solves
    preconditioner: Preconditioner | None  # what helps it; None for nothing
    damping: Damping  # how the damping follows from its number
    processes: Processes  # the processes


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
        state: State,
        *,
        bound: Callable[[float], float] = float,
        operator: Operator | None = None,
    ) -> None:
        self.choices, self.metric, self.params, self.gradient = choices, metric, dict(params), gradient
        self.data, self.bound, self.last = data, bound, state.system.preconditioner
        structure = choices.structure
        if operator is not None:
            assert isinstance(structure, OperatorStructure)
            self.operator, self.memory = structure.average(state.system.structure, operator, self.params)
            return
        own, structure = join_choice(choices.processes, metric, structure, data)
        inputs = inputs_of(metric, data)
        self.operator, self.memory = structure.update(
            state.system.structure, own, self.params, inputs, random=data.random
        )

    def solve(self, level: float, guess: Tensor | None) -> Solved:
        """The solution with the damping's number at `level`, from a guess (n,)."""
        system, amount, damping = self.operator, 0.0, self.choices.damping
        if damping.per_block:
            system, amount = shift_blocks(system, lambda part: self.bound(damping.amount(level, part)))
            rest = amount if isinstance(amount, float) else 0.0
        else:
            amount = rest = self.bound(damping.amount(level, system))
        solver, prepared = self._prepare(system, rest)
        # here lambda joins G; what blocks have of their own is in the system already
        return Solved(solver.solve(system, self.gradient, damping=rest, guess=guess), amount, prepared)

    def _prepare(self, system: Operator, damping: float) -> tuple[Solver, dict[str, Any] | None]:
        """The solver, with this step's preconditioner if there is one, and that one's memory."""
        choices = self.choices
        if choices.preconditioner is None:
            return choices.solver, None
        own, preconditioner = join_choice(choices.processes, self.metric, choices.preconditioner, self.data)
        inputs = inputs_of(self.metric, self.data)
        inverse, memory = preconditioner.update(self.last, own, self.params, inputs, damping, system, self.data.random)
        return replace(choices.solver, preconditioner=inverse), memory  # type: ignore[call-arg]


# what a step asks


def check_asks(choices: Choices, state: State, objective: Objective | None) -> None:
    """ValueError where the damping or the rule needs a loss that cannot be evaluated."""
    if objective is None and choices.is_judged(state):
        raise ValueError(
            f"damping {type(choices.damping).__name__} compares the loss before and after the step: compute it with "
            "optimizer.loss(outputs, targets), or call optimizer.step(closure)"
        )
    require_loss(choices.rule, objective)


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


def left_over(gradient: Tensor, solution: Solution, damping: float | Tensor) -> float:
    """|g - G x|: G x is the image less damping * x."""
    return float(measure_norm((gradient - solution.image).add_(damping * solution.value)))
