"""Where a contestant takes its metric: on other examples than the gradient's, drawn from the seed and the step alone.

Each function here makes a `Contestant.observes`. A run that is put down and taken up again sees the same draws.
Pascanu & Bengio 2013, section 5: another batch of the training set, unlabelled data, or the gradient's batch and
unlabelled data together (section 8.7).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from natgrad_lab.data import Split
from natgrad_lab.experiments.base import LabError, Rows

Observes = Callable[[Split, Rows, int, int], Tensor]


def draw_another_batch(size: int) -> Observes:
    """So many training inputs that are not in the gradient's batch. LabError where fewer are left.

    Args:
        size: How many.
    """

    def observes(examples: Split, rows: Rows, seed: int, step: int) -> Tensor:
        others = torch.ones(len(examples.train_x), dtype=torch.bool, device=examples.train_x.device)
        others[rows] = False
        return draw_rows(examples.train_x, others.nonzero()[:, 0], size, seed, step)

    return observes


def draw_unlabelled(size: int) -> Observes:
    """So many inputs without labels.

    Args:
        size: How many.
    """

    def observes(examples: Split, rows: Rows, seed: int, step: int) -> Tensor:
        inputs = examples.unlabelled_x
        if inputs is None:
            raise LabError("the metric asks for unlabelled data, and the task has none: expected Split.unlabelled_x")
        return draw_rows(inputs, torch.arange(len(inputs), device=inputs.device), size, seed, step)

    return observes


def join_unlabelled(size: int) -> Observes:
    """The gradient's own inputs, and so many without labels behind them.

    Args:
        size: How many without labels.
    """
    others = draw_unlabelled(size)
    return lambda examples, rows, seed, step: torch.cat([examples.train_x[rows], others(examples, rows, seed, step)])


def draw_rows(inputs: Tensor, among: Tensor, size: int, seed: int, step: int) -> Tensor:
    """size different rows of the inputs, among the given indices."""
    if size > len(among):
        raise LabError(
            f"the metric asks for {size} examples besides the gradient's, and there are {len(among)}: lower the batch, "
            "or train on more examples"
        )
    generator = torch.Generator().manual_seed(((seed + 1) * 1_000_003 + step) * 2 + 1)  # never the seed of an `Order`
    return inputs[among[torch.randperm(len(among), generator=generator)[:size].to(among.device)]]
