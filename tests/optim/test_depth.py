"""What a step asks of a device does not grow with the number of layers that are alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng
from natgrad.rules import SpectralProgress

VIEWS = (
    "view",
    "unbind",
    "select",
    "slice",
    "transpose",
    "as_strided",
    "squeeze",
    "expand",
    "detach",
    "diagonal",
    "split",
)


class Launches(TorchDispatchMode):
    """Counts operations that compute, and reads of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = self.read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        self.read += "_local_scalar" in name
        self.computed += not any(
            view in name for view in (*VIEWS, "alias", "t.default", "promote_types", "_local_scalar")
        )
        return func(*args, **(kwargs or {}))


def count_launches(layers: int) -> tuple[Launches, Launches]:
    """A step between updates and one that updates, of a network with so many hidden layers."""
    torch.manual_seed(0)
    hidden = [module for _ in range(layers) for module in (nn.Linear(12, 12), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(12, 3))
    opt = ng.kfac(model, nn.CrossEntropyLoss(), rule=SpectralProgress(), update_every=5)
    counts = list[Launches]()
    for _ in range(30):
        x, y = torch.randn(40, 12), torch.randint(3, (40,))
        opt.zero_grad()
        outputs, count = model(x), Launches()
        with count:
            loss = opt.loss(outputs, y)
        loss.backward()
        with count:
            opt.step()
        counts.append(count)
    late = sorted(counts[15:], key=lambda one: one.computed)
    return late[0], late[-1]


@pytest.mark.parametrize("layers", [8, 16])
def test_a_step_of_a_deep_model_launches_and_reads_as_often_as_of_a_shallow_one(layers: int) -> None:
    (shallow, few), (deep, many) = count_launches(4), count_launches(layers)
    assert deep.computed == shallow.computed
    assert deep.read == shallow.read <= 3
    assert many.computed > few.computed  # an update goes layer by layer, but for what the host reads
    assert many.read == few.read <= 12
