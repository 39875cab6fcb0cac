"""A run that goes on without learning: a warning first, then an error."""

from __future__ import annotations

import warnings

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
