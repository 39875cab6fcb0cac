"""Steps that are left out or taken back: numbers that are not finite, batches far off, runs that no longer learn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.linalg import all_finite, stays_finite
from natgrad.pure import leaves, map_tensors

OnTrouble = Literal["skip", "raise"]
Result = TypeVar("Result")

WARN, STOP = 5, 25  # steps in a row: of the warning, of the error

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
    "the loss is lower. Either it is at its minimum, or the proposal is far too long or points nowhere: raise the "
    "damping, or let the rule search shorter lengths"
)

WILD = 10.0  # times the highest loss so far, the first ones included: no step of a sound run raises it so far at once
PATIENCE = 3  # batches in a row that are left out; the next one counts, since the data must have changed
EARLIEST = 10  # steps until such a loss is wild
FIRST = 1e4  # times the highest loss before that: the first losses alone do not say much
LONG = 3.0  # times the root mean square of the gradients so far: a longer one is cut before it enters the momentum
FADES = 0.9  # of that mean, per step
KNOWN_AFTER = 5  # steps until it is known


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
        if self.on_trouble not in get_args(OnTrouble):
            raise ValueError(f"on_trouble is {self.on_trouble!r}, expected 'skip' or 'raise'")

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


def watch(count: int, text: str) -> None:
    """Warn at the fifth step in a row, raise from the 25th on.

    Args:
        count: Steps in a row so far, 0 where all is well.
        text: What is wrong and what to do, with a place for the count.

    Raises:
        RuntimeError: If it has lasted for 25 steps.
    """
    if count >= STOP:
        raise RuntimeError(text.format(count=count))
    if count == WARN:
        warnings.warn(f"{text.format(count=count)}; after {STOP} steps in a row this is an error", stacklevel=2)


def watch_late(count: int, unusable: bool) -> None:
    """`watch` steps whose statistics were due and did not come.

    Args:
        count: Of them, in a row; 0 for none.
        unusable: True if they were read and could not be used.
    """
    watch(count, UNUSABLE if unusable else OVERDUE)


def watch_skipped(count: int, model: Any) -> None:
    """`watch` for skipped steps; the first of a row also warns if the pass has spoilt running statistics of the model.

    The user's own pass writes them before the loss is known: one NaN in an input stays in a batch norm for good.

    Args:
        count: Steps in a row so far that were skipped.
        model: The network.
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


def count_unmoved(count: int, rate: float, gradient: float) -> int:
    """Steps in a row that moved nothing, with this one; warns at the 25th. At a minimum that is as it should be.

    Args:
        count: Before this step.
        rate: How much of the proposal was taken.
        gradient: |g|.
    """
    count = count + 1 if rate == 0 and gradient > 0 else 0
    if count == STOP:
        warnings.warn(UNMOVED.format(count=count), stacklevel=2)
    return count


def warn_without_gradient(parameters: Iterable[Tensor], computed: bool) -> None:
    """Warn if losses were computed for a step and no parameter has a gradient.

    Args:
        parameters: All that are trained.
        computed: Whether there were any, in the loop or in a closure.
    """
    if computed and all(p.grad is None for p in parameters):
        warnings.warn(
            "this step does nothing: a loss was computed, and no parameter has a gradient. Call loss.backward() before "
            "optimizer.step(), and optimizer.zero_grad() before loss.backward()",
            stacklevel=4,
        )


def warn_of_strangers(strangers: Set[str], warned: Set[str]) -> set[str]:
    """Say, once, which parameters have gradients and no statistics: a loss was added that was not the optimizer's.

    Args:
        strangers: Their names.
        warned: Those that were told.

    Returns:
        Those that were told now too.
    """
    fresh = sorted(strangers - warned)
    if fresh:
        warnings.warn(
            f"parameters {fresh} have a gradient but no statistics, and are not moved: no optimizer.loss(outputs, "
            "targets) on an update step depends on them",
            stacklevel=3,
        )
    return set(warned | strangers)


@dataclass(frozen=True)
class WildBatches:
    """What the losses of a run were like.

    Attributes:
        highest: The highest loss of a step that was taken, a scalar tensor; None before the first.
        refused: Batches in a row, up to now, that were left out.
    """

    highest: Tensor | None = None
    refused: int = 0

    def is_wild(self, loss: Tensor, steps: int) -> Tensor:
        """Whether a step with this loss is left out, a scalar tensor.

        Args:
            loss: Of the step, at least 0 by its criterion.
            steps: Taken so far.
        """
        if self.highest is None or self.refused >= PATIENCE:
            return torch.zeros_like(loss, dtype=torch.bool)
        highest = self.highest.to(loss)
        return (loss > (FIRST if steps < EARLIEST else WILD) * highest) & (highest > 0)

    def is_fit(self, loss: Tensor, steps: int, bounded: bool) -> bool:
        """Whether the statistics of a batch may be averaged with those before: a finite loss that is not wild.

        Args:
            loss: Of the batch.
            steps: Taken so far.
            bounded: True if the loss is at least 0 by its criterion.
        """
        return bool(torch.isfinite(loss) & ~(self.is_wild(loss, steps) & bounded))

    def after(self, loss: Tensor | None, taken: bool) -> WildBatches:
        """The same after one more step."""
        if loss is None or not taken:
            return WildBatches(self.highest, self.refused + (not taken))
        before = loss if self.highest is None else self.highest.to(loss)
        return WildBatches(torch.fmax(before, loss).detach(), 0)

    def save(self) -> dict[str, Tensor]:
        """For a checkpoint: tensors of the same dtype and device, whatever happened so far."""
        highest = torch.zeros(()) if self.highest is None else self.highest
        return {"highest": highest.double().cpu(), "refused": torch.tensor(self.refused)}

    @staticmethod
    def load(saved: Mapping[str, Tensor] | None) -> WildBatches:
        """From `save()`; None in older checkpoints."""
        if saved is None or not bool(saved["highest"] > 0):
            return WildBatches()
        return WildBatches(saved["highest"], int(saved["refused"]))


def find_cut(sizes: Sequence[float], length: float, steps: int) -> tuple[float, list[float]]:
    """What a gradient is multiplied by, at most 1, and the running sums with it.

    A batch with wrong labels, or with inputs that tell nothing, has a gradient that is many times too long. It would
    lead the momentum for dozens of steps, and pass for noise where the share of signal decides on the kind of steps. A
    gradient that grows by a third per step is never cut.

    Args:
        sizes: The running mean of squares without its correction, and what its weights add up to.
        length: |g|, finite.
        steps: Taken so far.
    """
    square, weight = sizes
    usual = math.sqrt(square / weight) if weight > 0 else 0.0
    factor = LONG * usual / length if steps >= KNOWN_AFTER and length > LONG * usual > 0 else 1.0
    return factor, [FADES * square + (1 - FADES) * (factor * length) ** 2, FADES * weight + 1 - FADES]


def cut(factor: float, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients, or their norms, times a factor.

    Args:
        factor: At most 1.
        gradients: By name.
    """
    return gradients if factor == 1 else {name: factor * g for name, g in gradients.items()}


def guard_steps(optimizer: Optimizer, run: Callable[[], Result]) -> tuple[Result, bool]:
    """Let an optimizer take steps, and take them back unless all is finite afterwards, or where they are interrupted.

    Args:
        optimizer: What takes them.
        run: Calls its `step`, once or several times.

    Returns:
        What `run` returned, and whether the steps stand.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.detach().clone() for p in params]
    state = {p: map_tensors(dict(numbers), torch.clone) for p, numbers in optimizer.state.items()}
    stands = False
    try:
        result = run()
        fine = all(stays_finite(old, p.detach()) for old, p in zip(kept, params, strict=True))
        stands = fine and all(all_finite(t) for numbers in optimizer.state.values() for t in leaves(dict(numbers)))
    finally:
        if not stands:
            with torch.no_grad():
                for old, p in zip(kept, params, strict=True):
                    p.copy_(old)
            optimizer.state.clear()
            optimizer.state.update(state)
    return result, stands
