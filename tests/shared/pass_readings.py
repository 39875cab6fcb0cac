"""What a structured optimizer read in one pass, and one iteration of its loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optim_models import X, Y
from torch import Tensor, nn

from natgrad.optim.pass_statistics import Reading


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
    take = opt._blocks.take

    # a copy: taking empties the reading
    def copy(reading: Reading) -> Reading:
        return Reading(replace(reading.heard, layers=list(reading.layers)), reading.rows)

    opt._blocks.take = lambda r, decay: found.append(copy(r)) or take(r, decay)
    opt.loss(model(inputs), targets)
    opt._blocks.take = take
    return found[0]
