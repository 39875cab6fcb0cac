"""What is checked before training, and how networks are called."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn


@contextmanager
def evaluation(*modules: nn.Module | None) -> Iterator[None]:
    """Inside, modules are in eval mode: dropout off, batch norms with the statistics that they hold."""
    with ExitStack() as stack:
        for module in modules:
            for part in [] if module is None else module.modules():
                stack.callback(setattr, part, "training", part.training)
                part.training = False
        yield


def like_first(module: nn.Module) -> Tensor:
    """A tensor of the module's dtype and on its device. ValueError for one without parameters."""
    first = next(module.parameters(), None)
    if first is None:
        raise ValueError("policy has no parameter to train")
    return first.detach()


def check_numbers(
    batch: int,
    gamma: float,
    gae_lambda: float,
    metric_batch: int | None,
    critic_lr: float,
    critic_epochs: int,
    critic_batch: int,
    seed: int,
) -> None:
    """ValueError for numbers out of range."""
    integers = {"batch": (batch, 2), "critic_epochs": (critic_epochs, 0), "critic_batch": (critic_batch, 1)}
    if metric_batch is not None:
        integers["metric_batch"] = (metric_batch, 1)
    for name, (value, least) in integers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}, expected an integer >= {least}")
    for name, share in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is {share}, expected a number in [0, 1]")
    if not 0 < critic_lr < math.inf:
        raise ValueError(f"critic_lr is {critic_lr}, expected a number > 0")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed is {seed!r}, expected an integer >= 0")
