"""What is checked before training, and how networks are called."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn


@contextmanager
def use_eval_mode(*modules: nn.Module | None) -> Generator[None]:
    """Inside, modules are in eval mode: dropout off, batch norms with the statistics that they hold."""
    with ExitStack() as stack:
        for module in modules:
            for part in [] if module is None else module.modules():
                stack.callback(setattr, part, "training", part.training)
                part.training = False
        yield


def take_first_parameter(module: nn.Module) -> Tensor:
    """A tensor of the module's dtype and on its device. ValueError for one without parameters."""
    first = next(module.parameters(), None)
    if first is None:
        raise ValueError("policy has no parameter to train")
    return first.detach()
