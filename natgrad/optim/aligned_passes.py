"""Backward passes in step on all processes: the user's, weighed by rows, and others through a model in parts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Criterion
from natgrad.optim.distributed import Ranks
from natgrad.pure import map_tensors
from natgrad.typed_torch import hook_gradient, list_numbers
from natgrad.whole_tensors import is_fully_sharded

ALIKE = 1e-10
"""Of the square of the losses' weights: the variance below which all processes weigh the same."""


class AlignedPasses:
    """Statistics' own backward passes. Nobody's gradients are averaged in them.

    Each of them gathers the parameters from all processes, so that one that takes more of them than another would wait
    for ever. Where their numbers differ, every process keeps the whole model until the last of them.

    Args:
        model: Of the optimizer.
        ranks: The processes.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self._kept: list[tuple[Any, bool]] = []

    @contextmanager
    def run(self, *numbers: float) -> Generator[None]:
        """The passes of one loss are taken within.

        Args:
            *numbers: Of this process; where another has others, the numbers of passes may differ.
        """
        if not self.ranks.averaged:
            yield
            return
        modules = list_sharded_modules(self.model)
        syncs = [(module, *read_settings(module, "reduce_grads", "all_reduce_grads")) for module in modules]
        for module in modules:  # what earlier backward passes left to be averaged is not theirs to average
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            self.align(*numbers)
            yield
        finally:
            for module, reduces, copies in syncs:
                module.set_requires_gradient_sync(reduces, recurse=False)
                module.set_requires_all_reduce(copies, recurse=False)
            while self._kept:
                module, reshards = self._kept.pop()
                module.set_reshard_after_backward(reshards, recurse=False)
                module.reshard()

    def align(self, *numbers: float) -> None:
        """Keep the model whole from here on, if these numbers are not the same on all processes.

        Args:
            *numbers: Whole numbers of this process, that the number of its passes follows from. All call this.
        """
        if not self.ranks.averaged or self._kept:
            return
        own = torch.tensor(numbers, dtype=torch.float64, device=self.ranks.device)
        sums, squares = self.ranks.sum(torch.stack([own, own.square()]))
        if list_numbers(sums.square()) == list_numbers(self.ranks.size * squares):
            return
        for module in list_sharded_modules(self.model):
            self._kept.append((module, read_settings(module, "reshard_after_backward")[0]))
            module.unshard()
            module.set_reshard_after_backward(False, recurse=False)


def list_sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    return [module for module in model.modules() if is_fully_sharded(module)]


def read_settings(module: Any, *names: str) -> list[bool]:
    """What was set of a module by `set_requires_gradient_sync` and the like, for which torch has no public name."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [bool(getattr(groups[0], name, True)) for name in names]


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
