"""A length for steps in a score metric: how long the score of data like these must be, so that no unit matters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def join_spread(known: dict[str, Any] | None, examples: Tensor) -> dict[str, Any]:
    """Mean and spread of the examples seen so far and of these, without cancellation (Chan's update).

    Args:
        known: What this returned before, None at first.
        examples: X, shape (..., b, N), finite.

    Returns:
        A dict: "examples", how many; "mean", shape (..., N); "squares", sum |x - mean|^2, shape (...,).
    """
    count, mean = examples.shape[-2], examples.mean(-2)
    squares = (examples - mean.unsqueeze(-2)).square().sum((-2, -1))
    if known is None:
        return {"examples": count, "mean": mean, "squares": squares}
    before, total = known["examples"], known["examples"] + count
    gap = mean - known["mean"]
    between = gap.square().sum(-1) * (before * count / total)
    return {
        "examples": total,
        "mean": known["mean"] + gap * (count / total),
        "squares": known["squares"] + squares + between,
    }


def measure_data_unit(known: dict[str, Any]) -> Tensor:
    """N / sqrt(tr Cov x), in 1 / (units of x): sqrt(E |d log p / dx|^2) is at least this, for any density of the data.

    By Cramer and Rao the second moment of the score is at least C^-1, whose trace is at least N^2 / tr C. Where a
    single example was seen, or all are equal, |x|^2 stands for the trace.

    Args:
        known: From `join_spread`.

    Returns:
        (...,), infinite where every x was 0.
    """
    mean = known["mean"]
    trace = known["squares"] / max(known["examples"] - 1, 1)
    trace = torch.where(trace > 0, trace, mean.square().sum(-1))
    return mean.shape[-1] / trace.sqrt()
