"""What a structured optimizer read in one pass, and one iteration of its loop."""

from __future__ import annotations

from typing import Any

from engine_state import record_readings
from optim_models import X, Y
from torch import Tensor, nn

from natgrad.optim.reading import Reading


def iterate(opt: Any, model: nn.Module, x: Any = X, y: Any = Y) -> Tensor:
    """The ordinary loop's body."""
    opt.zero_grad()
    loss = opt.loss(model(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def readings(opt: Any, model: nn.Module, inputs: Any, targets: Any) -> Reading:
    """What the optimizer read in one pass."""
    found: list[Reading] = []
    record_readings(opt, found)
    opt.loss(model(inputs), targets)
    return found[0]
