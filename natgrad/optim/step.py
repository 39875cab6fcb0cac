"""One step, as a pure function of what is known and what a batch told: the same for every metric.

The order is that of Martens & Grosse 2015, algorithm 2: the metric, the direction, the length, the damping. What a
step may not do (a wild batch, a number that is not finite) is decided at its start and at its end, by `Guard`. What the
metric is says the evidence: blocks from a pass (`block_step.py`), or one linear system (`flat_step.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Bernoulli, Categorical, Criterion, GaussianPosterior, Heads
from natgrad.ground.states import amend
from natgrad.ground.typed_torch import read_scalars
from natgrad.optim.guard import Guard, describe_trouble
from natgrad.optim.processes import Processes
from natgrad.optim.state import State
from natgrad.rules import Damping, Memory, Objective, Quadratic, Rule, Step

Move = dict[str, Tensor]
"""The parameters after a step, by name."""


@dataclass(frozen=True)
class Choices:
    """What does not change between steps."""

    rule: Rule  # from a quadratic model to a step
    damping: Damping  # how the damping follows from its number
    processes: Processes  # the processes
    bounded: bool  # True if the loss is known to be at least 0
    judged_every: int = 1  # steps between two at which the damping compares the loss with its promise, where it does
    invert_every: int = 1  # most steps between two inversions of a metric in blocks
    warm_start: float = 0.0  # the share of the last solution from which a solver starts
    absolute: bool = False  # True if the solver makes G's eigenvalues positive

    def needs_derivatives(self, turned: bool) -> bool:
        """Whether the metric is asked for, and not second moments of inputs alone."""
        shapes = self.rule.shapes and (self.rule.turns_at is None or turned)
        return self.damping.needs_ratio or not (shapes and self.rule.reads_inputs(turned))

    def is_judged(self, state: State) -> bool:
        """Whether the step from this state is."""
        return self.damping.needs_ratio and state.step - state.pace.judged >= self.judged_every


@dataclass(frozen=True)
class StepReport:
    """What is told of a step."""

    # as scalar tensors, which nobody has asked for yet
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trouble: str = ""  # why it was left out; empty where it was taken
    # of the next step, by parameter; empty where they stay
    dampings: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Batch:
    """The gradient and loss of a batch over all processes."""

    gradients: Mapping[str, Tensor]  # of the mean loss, by name
    norm: Tensor  # of all together
    loss: Tensor | None  # the mean over all rows; None where none was told
    guard: Guard  # what is known of the batches before it; with it once it was judged
    damping: float | None = None  # its number, as the first parameter group has it; None where no group does
    cuts: bool = False  # True if a gradient that is far too long is cut
    norms: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # the gradients', by name, scalar tensors
    nats: Any = 1.0  # nats per example in one unit of the loss
    scale: Any = 1.0  # what the gradients were divided by
    uncut: Mapping[str, Tensor] | None = None  # the gradients before they were cut; None where they were not
    value: float | None = None  # the loss as a number, once it was judged

    @property
    def numbers(self) -> dict[str, Any]:
        """For the report."""
        known = {"gradient": self.norm, "damping": self.damping, "loss": self.loss}
        return {name: number for name, number in known.items() if number is not None}

    def judge(self, bounded: bool, steps: int) -> tuple[Batch, str]:
        """The batch with as much of its gradient as is fit for a step, and why it is left out; empty where it is not.

        One read of the device. bounded: True if the loss is known to be at least 0. steps: taken so far.
        """
        length, *values = read_scalars([self.norm, *([] if self.loss is None else [torch.as_tensor(self.loss)])])
        loss = values[0] if values else None
        wild = bounded and loss is not None and self.guard.is_wild(loss, steps)
        # a loss that is no number bounds no step (a batch without rows: its gradient is zero, but there is momentum)
        sound = math.isfinite(length) and not (loss is not None and math.isnan(loss))
        if wild or not sound:
            return self, describe_trouble(self.gradients, loss, wild)
        factor, guard = self.guard.cut_gradient(length, steps) if self.cuts else (1.0, self.guard)
        if factor == 1:
            return amend(self, guard=guard, value=loss), ""
        gradients, norms = ({n: factor * t for n, t in part.items()} for part in (self.gradients, self.norms))
        return amend(self, gradients=gradients, norms=norms, uncut=self.gradients, guard=guard, value=loss), ""

    def list_norms(self) -> dict[str, float]:
        """The gradients' norms by name: one read of the device."""
        return dict(zip(self.norms, read_scalars(self.norms.values()), strict=True))


class Evidence(ABC):
    """What a batch told, whoever made it: a pass of the user's, a metric, a field that knows its linear system.

    Attributes:
        examples: Counts the batch's, on this process; 0 where nobody knows them.
    """

    examples: Callable[[], int]

    @abstractmethod
    def pool(self, choices: Choices, state: State) -> Batch:
        """Gradient and loss over all processes."""

    @abstractmethod
    def open(self, choices: Choices, state: State, batch: Batch) -> Work:
        """A step from this state on a batch that is fit for one, with its metric."""

    def leave(self, choices: Choices, state: State) -> State:
        """What stays of a batch whose step is not taken: the state, with one failure more.

        Args:
            choices: What does not change between steps.
            state: Of the last step.
        """
        return amend(state, guard=amend(state.guard, failures=state.guard.failures + 1))


class Work(ABC):
    """One step under way. `state` is replaced as things become known; what it was made of never changes.

    Attributes:
        state: As it is so far.
        moved: The parameters after the step.
        report: Numbers of it, by name.
        dampings: The damping of the next step, by parameter; empty where it stays.
        loss: The batch's, as it was read; None where none was told.
    """

    def __init__(self, choices: Choices, state: State, batch: Batch, examples: Callable[[], int]) -> None:
        self.choices, self.batch, self.loss, self.rule = choices, batch, batch.value, choices.rule
        self.examples = examples
        self.state: State = state
        self.moved, self.report, self.dampings = Move(), batch.numbers, dict[str, float]()

    @abstractmethod
    def propose(self) -> Quadratic | None:
        """The quadratic model with the direction at its full rate; None where nothing can be solved yet."""

    def take(self, model: Quadratic) -> bool:
        """The rule's step, unless the loss after it refuses it. False: a solution with more damping is tried."""
        judged = self.choices.is_judged(self.state)
        with self.open_losses(model, judged) as (seen, loss_at):
            # 3 length: the rule's; Martens & Grosse 2015, section 6.4 go to the minimum of the quadratic model
            step, memory = self.rule.step(seen, loss_at, self.memory())
            # 4 damping: the true change over the promised one, by which `settle` adapts it (section 6.5)
            ratio, refused = self.compare_losses(model, step, loss_at) if judged else (None, False)
        return self.settle(model, step, memory, ratio, refused)

    @abstractmethod
    def open_losses(self, model: Quadratic, judged: bool) -> AbstractContextManager[tuple[Quadratic, Objective | None]]:
        """The model as a rule sees it, and the loss at trial points; None where it is not to be had."""

    @abstractmethod
    def compare_losses(self, model: Quadratic, step: Step, loss_at: Objective | None) -> tuple[float, bool]:
        """The true change of the loss over the promised one, and whether the step is refused."""

    def find_ratio(self, model: Quadratic, step: Step, change: float) -> tuple[float, bool]:
        """The ratio of a change of the loss to the promised one, NaN where none was; whether the step is refused."""
        promised = self.choices.damping.predict_change(float(model.change(step)), float(model.slope(step)))
        return (change / promised, math.isnan(change)) if promised < 0 else (math.nan, not change <= 0)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Examples of this step over all processes, who must all ask, and those seen so far with it."""
        own, processes = self.examples(), self.choices.processes
        if processes.size > 1:
            own = int(processes.sum(torch.tensor(float(own), device=self.batch.norm.device)))
        self.state = amend(self.state, seen=self.state.seen + own)
        return {"examples": own, "seen": self.state.seen} if own else {}

    @abstractmethod
    def memory(self) -> Memory:
        """What the rule remembers."""

    @abstractmethod
    def settle(self, model: Quadratic, step: Step, memory: Memory, ratio: float | None, refused: bool) -> bool:
        """The parameters after the step, the rule's memory, and the damping from here on."""

    @abstractmethod
    def is_sound(self) -> bool:
        """Whether the step can be taken: no parameter becomes NaN or infinite."""

    @abstractmethod
    def finish(self) -> State:
        """The state after it."""


def natural_step(choices: Choices, state: State, evidence: Evidence) -> tuple[Move, State, StepReport]:
    """theta -> theta + d: the parameters that move, the next state, and what is told.

    Pure: an error, Ctrl-C or a number that is not finite leaves `state` in force.
    """
    batch, trouble = evidence.pool(choices, state).judge(choices.bounded, state.step)
    if trouble:
        return leave_out(evidence.leave(choices, state), batch.numbers, trouble)
    # 1 the metric: statistics -> blocks -> damped inverses, or one linear system
    work = evidence.open(choices, state, batch)
    # 2 direction, 3 length, 4 damping; with more of it where a rule takes nothing of a solution
    model = work.propose()
    while model is not None and not work.take(model):
        model = work.propose()
    # all of it, or nothing
    if not work.is_sound():
        trouble = describe_trouble(batch.gradients, batch.value, wild=False)
        return leave_out(evidence.leave(choices, state), batch.numbers, trouble)
    return work.moved, work.finish(), StepReport(work.report, dampings=work.dampings)


def leave_out(state: State, numbers: Mapping[str, Any], trouble: str) -> tuple[Move, State, StepReport]:
    """No step, and the batch is counted."""
    after = amend(state, step=state.step + 1, guard=state.guard.follow_step(None, taken=False))
    return {}, after, StepReport(numbers, trouble)


def bounded_below(criterion: Criterion) -> bool:
    """Whether the loss is at least 0, so that a share of it says how much is left to gain."""
    if criterion.maximize:
        return False
    if isinstance(criterion.loss, (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss)):
        return True  # a loss of torch counts no normalising constant
    return is_never_negative(criterion.family)


def is_never_negative(family: Any) -> bool:
    """Whether -log p of a family is, as that of events that are counted, or a divergence; of all heads of several."""
    family = getattr(family, "family", family)
    if isinstance(family, Heads):
        return all(map(is_never_negative, family.families))
    return isinstance(family, (Bernoulli, Categorical, GaussianPosterior))
