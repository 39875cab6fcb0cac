"""What a structured optimizer read in one pass."""

from __future__ import annotations

from typing import Any

from engine_state import record_readings
from optim_models import iterate as iterate  # beside it in tests
from torch import nn

from natgrad.optim.reading import Reading


def readings(opt: Any, model: nn.Module, inputs: Any, targets: Any) -> Reading:
    """What the optimizer read in one pass."""
    found: list[Reading] = []
    record_readings(opt, found)
    opt.loss(model(inputs), targets)
    return found[0]
