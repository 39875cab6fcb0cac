"""All that keeps one bad batch, one dead layer or one wild number from doing harm: one value.

A pass is looked at before it enters the averages: the inputs of its layers (`accept_inputs`). A batch is looked at
before its step: its loss (`is_wild`) and the length of its gradient (`cut_gradient`). What fails is left out and
counted; a run that no longer learns says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.ground.constants import (
    FAR_INPUTS,
    FIRST_WILD,
    HARDLY,
    HEADROOM,
    KEEPS,
    KNOWN_AFTER,
    LONG_GRADIENT,
    LONGEST_STEP,
    PATIENCE,
    SMALL_RATE,
    STOP,
    WARN,
    WILD,
    YOUNG,
)
from natgrad.ground.linalg import all_finite, stays_finite
from natgrad.ground.pure import leaves, map_tensors
from natgrad.ground.states import amend
from natgrad.ground.typed_torch import measure_norms, read_scalars
from natgrad.layers import Seen

OnTrouble = Literal["skip", "raise"]
Result = TypeVar("Result")

OVERDUE = (
    "the statistics of the last {count} steps were due and not read, so that these steps were taken with the metric of "
    "earlier ones: no optimizer.loss(outputs, targets) was computed in training mode. Call model.train() after an "
    "evaluation, and compute the loss with optimizer.loss on every step; to train in evaluation mode on purpose "
    "(dropout off, batch norm frozen), build the optimizer with train_in_eval=True"
)
UNUSABLE = (
    "the statistics of the last {count} steps were due and could not be used, so that these steps were taken with the "
    "metric of earlier ones, if at all: second moments of inputs or of derivatives overflow, or are not finite. Scale "
    "the inputs or the loss, or train in float64"
)
SKIPPED = (
    "the last {count} steps were skipped, because the loss, its gradient or the step was not finite: nothing is "
    "learnt. Look at the data and for an overflow in the model, or go back to a checkpoint; if the parameters "
    "themselves are not finite, another optimizer or an assignment wrote that"
)
UNMOVED = (
    "none of the last {count} steps moved anything, though the gradient is not zero: the rule found no length at which "
    "the loss is lower. Either it is at its minimum; or the proposal is far too long or points nowhere: raise the "
    "damping, or let the rule search shorter lengths; or the gradient is of another loss than optimizer.loss computed, "
    "whose value bounds steps or judges them: give that one the loss, or let optimizer.step(closure) return it"
)


class NotFiniteError(ValueError):
    """A loss, a gradient or a metric that is not finite: what `on_trouble` decides about."""


COUNTS = ("failures", "refused", "skipped", "late", "unmoved")
"""What a guard counts of a run, all of which a checkpoint has: a run that goes on is warned when it would have been."""


@dataclass(frozen=True)
class Guard:
    """What is known of the batches so far, and how many of them came to nothing."""

    failures: int = 0  # steps, readings and inverses that came to nothing
    refused: int = 0  # steps that were not taken because they would have raised the loss
    skipped: int = 0  # steps in a row, up to now, that were left out
    late: int = 0  # steps in a row, up to now, whose statistics were due and not read
    unmoved: int = 0  # steps in a row, up to now, that a loss held at hardly any length
    highest: float | None = None  # the highest loss of a step that was taken; None before the first
    wild: int = 0  # batches in a row, up to now, that were left out
    square: float = 0.0  # running mean of |g|^2 without its correction
    weight: float = 0.0  # what the weights of that mean add up to
    inputs: Mapping[str, float] = field(default_factory=dict[str, float])  # running mean square of each layer's inputs
    far: int = 0  # readings in a row, up to now, that were left out for their inputs

    # the loss

    def is_wild(self, loss: float, steps: int) -> bool:
        """True where a loss is far above all of the run's: its step is left out."""
        if self.highest is None or self.wild >= PATIENCE:
            return False
        return loss > (FIRST_WILD if steps < YOUNG else WILD) * self.highest > 0

    def is_fit(self, loss: float, steps: int, bounded: bool) -> bool:
        """True for a loss whose batch may enter the averages: finite, and not wild where it is known to be >= 0."""
        return math.isfinite(loss) and not (bounded and self.is_wild(loss, steps))

    def follow_step(self, loss: float | None, taken: bool, **counts: int) -> Guard:
        """The same after a step with this loss. counts: what else was counted."""
        if not taken:
            return amend(self, wild=self.wild + 1, skipped=self.skipped + 1, **counts)
        if loss is None:
            return amend(self, skipped=0, **counts)
        known = [value for value in (self.highest, loss) if value is not None and not math.isnan(value)]
        return amend(self, highest=max(known, default=math.nan), wild=0, skipped=0, **counts)

    def count_unmoved(self, rate: float, gradient: bool) -> int:
        """`unmoved` after a step of this share of the proposal. gradient: False where there is nothing to follow."""
        return self.unmoved + 1 if rate < HARDLY and gradient else 0

    # the gradient

    def cut_gradient(self, length: float, steps: int) -> tuple[float, Guard]:
        """What the gradient is multiplied by, at most 1, and the guard that knows its length.

        A batch with wrong labels, or with inputs that tell nothing, has a gradient that is many times too long. It
        would lead the momentum for dozens of steps. A gradient that grows by a third per step is never cut.
        """
        usual = math.sqrt(self.square / self.weight) if self.weight > 0 else 0.0
        factor = LONG_GRADIENT * usual / length if steps >= KNOWN_AFTER and length > LONG_GRADIENT * usual > 0 else 1.0
        square = KEEPS * self.square + (1 - KEEPS) * (factor * length) ** 2
        return factor, amend(self, square=square, weight=KEEPS * self.weight + 1 - KEEPS)

    # the inputs of layers

    def accept_inputs(self, layers: Sequence[Seen], squares: Mapping[str, Tensor]) -> tuple[bool, bool, Guard]:
        """Whether a pass may enter the averages, whether its inputs forbid it, and the guard that knows them.

        One row of a batch that is far too large would stay in the second moments of the inputs for as long as they
        remember, and hold a layer still along all others: with layer norm behind the layer the loss does not even show
        it. No second moment may overflow: every entry of a factor is at most the squared norm of its side, every entry
        of a block the product of both.
        """
        fresh, bounds, largest = measure_sides(layers, squares)
        if not all(bound * bound <= HEADROOM * largest for bound in bounds):  # comparisons with a NaN are false
            return False, False, self
        # a layer behind one that starts near zero may see a thousand times more within a step, and yet less than others
        most = max(self.inputs.values(), default=0.0)
        known = self.inputs
        far = any(square > max(FAR_INPUTS * known[key], most) for key, square in fresh.items() if key in known)
        if far and self.far < PATIENCE:
            return False, True, amend(self, far=self.far + 1)
        inputs = dict(known)
        for key, square in fresh.items():
            if square > 0:
                inputs[key] = square if far else KEEPS * (known.get(key) or square) + (1 - KEEPS) * square
        return True, False, amend(self, inputs=inputs, far=0)

    # checkpoints

    def save(self) -> dict[str, Any]:
        """For a checkpoint: plain values and tensors."""
        highest = torch.tensor(self.highest or 0.0, dtype=torch.float64)
        return {
            "wild": {"highest": highest, "refused": torch.tensor(self.wild)},
            "inputs": {"squares": dict(self.inputs), "refused": self.far},
        }

    @staticmethod
    def load(wild: Mapping[str, Tensor] | None, inputs: Mapping[str, Any] | None, **counts: Any) -> Guard:
        """From `save()`, and the counts; None in older checkpoints."""
        guard = Guard(**counts)
        if wild is not None and bool(wild["highest"] > 0):
            guard = amend(guard, highest=float(wild["highest"]), wild=int(wild["refused"]))
        if inputs is not None:
            guard = amend(guard, inputs=dict(inputs["squares"]), far=int(inputs["refused"]))
        return guard


def measure_sides(layers: Sequence[Seen], squares: Mapping[str, Tensor]) -> tuple[dict[str, float], list[float], float]:
    """The mean square of each layer's inputs, all norms whose squares must not overflow, and the largest number.

    By one read of the device.
    """
    parts = [(f"{seen.key} {i}", part) for seen in layers for i, part in enumerate(seen.split_parts())]
    deltas = [delta for _, part in parts for delta in part.deltas]
    inputs = [part.bound_inputs() for _, part in parts if not part.by_token]
    norms = [*measure_norms(deltas), *inputs, *(square.sum() for square in squares.values())]
    if not norms:
        return {}, [], 0.0
    numbers = iter(read_scalars(norms))
    lefts = [math.hypot(*islice(numbers, len(part.deltas))) for _, part in parts]
    means, bounds = dict[str, float](), list[float]()
    for (key, part), left in zip(parts, lefts, strict=True):
        right = 1.0
        if not part.by_token:
            right = next(numbers)
            size = right / max(part.positions, 1.0) ** 0.5
            means[key] = size * size
        bounds += [left, right, left * right]
    bounds += [math.sqrt(total) if total >= 0 else math.nan for total in numbers]
    return means, bounds, min(torch.finfo(dtype).max for dtype in {norm.dtype for norm in norms})


def least_damping(norms: Sequence[float]) -> float:
    """lambda with |(G + lambda I)^-1 g| <= `LONGEST_STEP`, for the norms |g| of a block's gradients.

    Where each softmax is saturated at a wrong class the Fisher information is 1e-37 and the gradient is not small: the
    step has no end then, and with this damping it goes along the gradient. A norm that is not finite counts as 0.
    """
    return math.hypot(*(norm for norm in norms if math.isfinite(norm))) / LONGEST_STEP


# whether numbers are finite: in one read of the device for many


def are_finite(groups: Sequence[Iterable[Tensor]]) -> list[bool]:
    """Of each group of tensors whether all of its entries are finite."""
    tensors = [[t if t.is_floating_point() else t.double() for t in group] for group in groups]
    sizes = iter(read_scalars(measure_norms([t for group in tensors for t in group])))
    pairs = [list(zip(group, islice(sizes, len(group)), strict=True)) for group in tensors]
    # the square of a large number may overflow
    return [all(math.isfinite(size) or bool(t.isfinite().all()) for t, size in group) for group in pairs]


def stay_finite(before: Mapping[str, Tensor], after: Mapping[str, Tensor], size: Tensor | float = 0.0) -> bool:
    """Whether no parameter becomes NaN or infinite; an entry that is so already, and stays, does no harm.

    size: a number that must be finite, such as the step's length in the metric: one that overflows is cut to nothing,
    and would be taken for a step.
    """
    # Euclidean norms cost a tenth of the largest entries; one that overflows is looked at entry by entry
    sizes = read_scalars([*measure_norms(list(after.values())), *([size] if isinstance(size, Tensor) else [])])
    if all(map(math.isfinite, sizes)) and (isinstance(size, Tensor) or math.isfinite(size)):
        return True
    return math.isfinite(float(size)) and all(stays_finite(before[name], new) for name, new in after.items())


# what is said of a run that no longer learns


@dataclass
class Accidents:
    """Steps that were left out because a number was not finite.

    Attributes:
        on_trouble: "skip" counts them, warns at the fifth in a row and raises RuntimeError at the 25th; "raise" raises
            ValueError for the first.
        count: So far.
        in_a_row: Of the last steps.
    """

    on_trouble: OnTrouble = "skip"
    count: int = 0
    in_a_row: int = 0

    def __post_init__(self) -> None:
        check_trouble(self.on_trouble)

    def meet(self, trouble: str | None) -> None:
        """A step is over.

        Args:
            trouble: Why it was left out; None where it was taken.

        Raises:
            ValueError: For trouble, with `on_trouble="raise"`.
            RuntimeError: For the 25th trouble in a row.
        """
        if trouble is None:
            self.in_a_row = 0
            return
        if self.on_trouble == "raise":
            raise ValueError(f"{trouble}; nothing was changed")
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        watch(self.in_a_row, SKIPPED)


def check_trouble(on_trouble: Any) -> OnTrouble:
    """The policy. ValueError for any other."""
    if on_trouble not in get_args(OnTrouble):
        raise ValueError(f"on_trouble is {on_trouble!r}, expected 'skip' or 'raise'")
    return on_trouble


def watch(count: int, text: str) -> None:
    """Warn at the fifth step in a row, raise RuntimeError from the 25th on; 0 where all is well."""
    if count >= STOP:
        raise RuntimeError(text.format(count=count))
    if count == WARN:
        warnings.warn(f"{text.format(count=count)}; after {STOP} steps in a row this is an error", stacklevel=2)


def watch_late(count: int, unusable: bool) -> None:
    """`watch` steps whose statistics were due and did not come, or could not be used."""
    watch(count, UNUSABLE if unusable else OVERDUE)


def watch_skipped(count: int, model: Any) -> None:
    """`watch` for skipped steps; the first of a row also warns if the pass has spoilt running statistics of the model.

    The user's own pass writes them before the loss is known: one NaN in an input stays in a batch norm for good.
    """
    if count == 1 and isinstance(model, nn.Module):
        spoilt = [n for n, b in model.named_buffers() if b.is_floating_point() and not all_finite(b)]
        if spoilt:
            warnings.warn(
                f"the buffer {spoilt[0]!r} of the model is not finite: the pass of a batch that was skipped wrote it, "
                "and evaluation mode gives no numbers any more. Take running statistics anew with "
                "ng.recalibrate(model, loader), or look at the data before the pass",
                stacklevel=2,
            )
    watch(count, SKIPPED)


def watch_unmoved(count: int) -> None:
    """Warn at the 25th step in a row that moved nothing: at a minimum that is as it should be."""
    if count == STOP:
        warnings.warn(UNMOVED.format(count=count), stacklevel=2)


def warn_without_gradient(parameters: Iterable[Tensor], computed: bool) -> None:
    """Warn if losses were computed for a step and no parameter has a gradient."""
    if computed and all(p.grad is None for p in parameters):
        warnings.warn(
            "this step does nothing: a loss was computed, and no parameter has a gradient. Call loss.backward() before "
            "optimizer.step(), and optimizer.zero_grad() before loss.backward()",
            stacklevel=4,
        )


def warn_of_strangers(strangers: Set[str]) -> None:
    """Say which parameters have gradients and no statistics."""
    warnings.warn(
        f"parameters {sorted(strangers)} have a gradient but no statistics, and are not moved: no "
        "optimizer.loss(outputs, targets) on an update step depends on them",
        stacklevel=3,
    )


def warn_of_rate(rate: float, cuts: Iterable[float]) -> None:
    """Warn if steps are over a hundred times shorter than the rule found: the rate is one of Adam's, carried over.

    rate: the largest of any group, or what its scheduler started from. cuts: of each step, how many times as long it
    would be at 1.
    """
    known = list(cuts)
    if min(known, default=1.0) <= 1 / SMALL_RATE:
        return
    warnings.warn(
        f"lr is {rate:.3g}, and it is a factor on the length that the rule finds: the last {len(known)} steps were at "
        f"least {min(known):.0f} times shorter than at lr=1. Leave lr at 1, and where the loop writes rates into the "
        "parameter groups or a schedule does, let them be factors, 1 for the largest",
        stacklevel=4,
    )


def describe_trouble(gradients: Mapping[str, Tensor], loss: float | None, wild: bool) -> str:
    """Why a step is left out: its loss is wild, or a gradient or the loss is not finite."""
    if wild:
        return (
            "the loss is more than ten times the highest of this run; nothing was changed. Look at this batch; data of "
            "another scale are taken from the fourth such batch in a row on"
        )
    wrong = [name for name, g in gradients.items() if not bool(torch.isfinite(g).all())]
    what = f"the gradient of {wrong[0]!r}" if wrong else "the step"
    if not wrong and loss is not None and not math.isfinite(loss):
        what = (
            "the loss (0 / 0 for an empty batch, or if all targets are ignored; or a layer's inputs are more "
            "than ten times as large as before, or too large to square)"
        )
    return (
        f"{what} is not finite; nothing was changed. Skip this batch, or look for an overflow in the loss (with "
        "GradScaler, scaler.step(optimizer) skips such steps)"
    )


def guard_steps(optimizer: Optimizer, run: Callable[[], Result]) -> tuple[Result, bool]:
    """Let an optimizer take steps, and take them back unless all is finite afterwards, or where they are interrupted.

    Args:
        optimizer: What takes them.
        run: Calls its `step`, once or several times.

    Returns:
        What `run` returned, and whether the steps stand.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    state = {p: map_tensors(dict(numbers), torch.clone) for p, numbers in optimizer.state.items()}
    stands = False
    try:
        result = run()
        fine = all(stays_finite(old, p.detach()) for old, p in zip(before, params, strict=True))
        stands = fine and all(all_finite(t) for numbers in optimizer.state.values() for t in leaves(dict(numbers)))
    finally:
        if not stands:
            with torch.no_grad():
                for old, p in zip(before, params, strict=True):
                    p.copy_(old)
            optimizer.state.clear()
            optimizer.state.update(state)
    return result, stands
