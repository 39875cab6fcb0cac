"""Means over the rows of each process, weighted so that their mean over processes is that over all rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from natgrad.families import Criterion
from natgrad.optim.distributed import Ranks
from natgrad.pure import map_tensors
from natgrad.typed_torch import hook_gradient

ALIKE = 1e-10
"""Of the square of the losses' weights: the variance below which all processes weigh the same."""


class RowWeight:
    """Tensor hook on a loss: the mean over processes of the gradients becomes the mean over all rows.

    It is a sum over processes, and they all go backward at the same time: they average gradients there anyway. Where
    the losses already weigh unlike, the user has weighted them, and that stands.

    Args:
        ranks: The processes.
        rows: What this process's loss is a mean over.
    """

    def __init__(self, ranks: Ranks, rows: float) -> None:
        self.ranks, self.rows = ranks, rows

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.ranks.looking:
            return gradient
        weight = gradient.detach().double().reshape(())
        own = torch.stack([torch.full_like(weight, self.rows), weight, weight.square()])
        total, weights, squares = self.ranks.sum(own).unbind()
        unlike = self.ranks.size * squares - weights.square() > ALIKE * weights.square()
        share = torch.where(unlike, 1.0, self.rows * self.ranks.size / total)
        return gradient * share.to(gradient.dtype) if self.rows else torch.zeros_like(gradient)


def weigh_loss(
    ranks: Ranks, criterion: Criterion, outputs: Any, targets: Any, value: Tensor, averaged: bool = True
) -> float | None:
    """What a loss is a mean over; its gradient weighs that much in the mean over processes from now on.

    Args:
        ranks: The processes.
        criterion: What the loss is a value of.
        outputs: What it was computed on.
        targets: Its targets.
        value: The loss.
        averaged: False if nobody is known to average the gradients, so that they stay as they are.

    Returns:
        None for one process.
    """
    if ranks.size == 1:
        return None
    count = criterion.count(map_tensors(outputs, torch.detach), targets)
    if averaged and not criterion.summed:
        hook_gradient(value, RowWeight(ranks, count))
    return count
