"""Backward passes besides the user's, through a model that `fully_shard` holds in parts: in step on all processes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from natgrad.optim.distributed import Ranks
from natgrad.typed_torch import list_numbers
from natgrad.whole_tensors import is_fully_sharded


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
