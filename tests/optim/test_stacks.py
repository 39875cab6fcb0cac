"""Blocks of equal shape in one stack step as each of them alone, whichever have gradients, momenta and layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_state import state_of
from models import F64, assert_close
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import SpectralProgress


class Branches(nn.Module):
    """Three layers of one shape, of which a pass uses some, and a transposed convolution in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.turned = nn.ConvTranspose1d(4, 4, 1, groups=2)
        self.head = nn.Linear(4, 3)
        self.used = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.used:
            x = x + self.layers[i](x).tanh()
        return self.head(self.turned(x.unsqueeze(-1)).squeeze(-1))


def train(together: bool, momenta: tuple[float, ...], rule: Any) -> list[Tensor]:
    """The parameters after steps of which some use a part of the layers; together: in stacks, else one by one."""
    torch.manual_seed(0)
    model = Branches().to(F64)
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
    torch.manual_seed(0)
    model = Branches().to(F64)
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
