"""What a step asks of a device does not grow with the number of layers that are alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng
from natgrad.rules import SpectralProgress

FREE = (
    "view unbind select slice transpose as_strided squeeze expand detach diagonal split alias t.default promote_types"
)


class Launches(TorchDispatchMode):
    """Counts operations that compute, and reads of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = self.read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = "_local_scalar" in func.__name__
        self.read += reads
        self.computed += not reads and not any(view in func.__name__ for view in FREE.split())
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


def test_a_step_of_a_deep_model_launches_and_reads_as_often_as_of_a_shallow_one() -> None:
    (shallow, few), (deep, many) = count_launches(4), count_launches(8)
    assert deep.computed == shallow.computed
    assert deep.read == shallow.read <= 3
    assert many.computed > few.computed  # an update goes layer by layer, but for what the host reads
    assert many.read == few.read <= 12
