"""What is checked before training, and how networks are called."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import Any

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


def as_integer(name: str, value: Any, least: int) -> int:
    """A whole number of at least `least`, NumPy's too. ValueError for anything else."""
    try:
        found = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = least - 1
    if found < least:
        raise ValueError(f"{name} is {value!r}, expected an integer >= {least}")
    return found


def is_real(value: Any) -> bool:
    """A real number, NumPy's too."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_positive(name: str, value: Any) -> None:
    """ValueError unless value is a finite number > 0."""
    if not is_real(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a finite number > 0")
