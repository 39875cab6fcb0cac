"""Blocks of equal shape in one stack step as each of them alone, whichever have gradients, momenta and layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_state import state_of
from models import F64, Assembled, assert_close
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng
from natgrad.rules import SpectralProgress


def build_branches() -> Any:
    """Three layers of one shape, of which a pass uses some, and a transposed convolution in groups."""

    def run(m: Any, x: Tensor) -> Tensor:
        for i in m.used:
            x = x + m.layers[i](x).tanh()
        return m.head(m.turned(x.unsqueeze(-1)).squeeze(-1))

    torch.manual_seed(0)
    layers, turned = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.ConvTranspose1d(4, 4, 1, groups=2)
    return Assembled(run, layers=layers, turned=turned, head=nn.Linear(4, 3), used=(0, 1, 2)).to(F64)


def train(together: bool, momenta: tuple[float, ...], rule: Any) -> list[Tensor]:
    """The parameters after steps of which some use a part of the layers; together: in stacks, else one by one."""
    model = build_branches()
    groups = [
        {"params": list(layer.parameters()), "momentum": m} for layer, m in zip(model.layers, momenta, strict=True)
    ]
    groups.append({"params": [*model.turned.parameters(), *model.head.parameters()]})
    opt = ng.kfac(model, nn.CrossEntropyLoss(), lr=0.3, params=groups, rule=rule)
    for i in range(14):
        model.used = ((0, 1, 2), (0, 1), (2,))[i % 3] if i > 5 else (0, 1, 2)
        x, y = torch.randn(20, 4, dtype=F64), torch.randint(3, (20,))
        opt.zero_grad()
        opt.loss(model(x), y).backward()
        if not together:  # arranged anew from rows, as a checkpoint brings them back
            opt._live.state = replace(opt._live.state, stacks=opt._live.state.stacks.select(lambda _: True))
        opt.step()
    stacks = state_of(opt).stacks
    held = {block.key for stack in (*stacks.parts, *stacks.rest) for block in stack.blocks}
    assert held == set(state_of(opt).blocks)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("momenta", [(0.9, 0.9, 0.9), (0.9, 0.0, 0.5)])
@pytest.mark.parametrize("rule", [ng.MeasuredLength(), SpectralProgress()], ids=repr)
def test_a_stack_goes_on_as_its_blocks_do_that_are_arranged_anew(momenta: tuple[float, ...], rule: Any) -> None:
    for one, other in zip(train(True, momenta, rule), train(False, momenta, rule), strict=True):
        assert_close(one, other, 1e-12)


def test_the_running_mean_is_that_of_each_parameter_alone() -> None:
    """m <- b m + (1 - b) g over the steps at which a parameter has a gradient."""
    model = build_branches()
    opt = ng.kfac(model, nn.CrossEntropyLoss(), momentum=0.8)
    means, counts = dict[str, Tensor](), dict[str, int]()
    for i in range(9):
        model.used = ((0, 1, 2), (1,), (0, 2))[i % 3]
        x, y = torch.randn(20, 4, dtype=F64), torch.randint(3, (20,))
        opt.zero_grad()
        opt.loss(model(x), y).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                means[name] = 0.8 * means.get(name, torch.zeros_like(p)) + 0.2 * p.grad
                counts[name] = counts.get(name, 0) + 1
        opt.step()
    saved = state_of(opt).by_parameter()
    assert {name: numbers["count"] for name, numbers in saved.items()} == counts
    for name, mean in means.items():
        assert_close(saved[name]["mean"], mean.detach(), 1e-12)


# what a step asks of a device does not grow with the number of layers that are alike

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


def test_blocks_are_arranged_anew_where_they_are_new_alone() -> None:
    model, arranged = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), list[bool]()
    opt = ng.kfac(model, nn.CrossEntropyLoss(), update_every=5)
    for _ in range(30):
        before = state_of(opt).blocks
        opt.zero_grad()
        opt.loss(model(torch.randn(20, 4)), torch.randint(3, (20,))).backward()
        opt.step()
        arranged.append(state_of(opt).blocks is not before)
    assert 0 < sum(arranged[15:]) < 6
