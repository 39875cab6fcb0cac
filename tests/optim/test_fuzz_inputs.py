"""Steps from second moments of inputs alone are those of the statistics with derivatives, on random networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fuzz_nets import Net, nets
from hypothesis import given, settings
from optim_models import flat
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import SpectralProgress
from natgrad.structures import Layerwise

STEPS = 4


def call(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    assert isinstance(outputs, Tensor)
    return outputs


def train(net: Net, recipe: Any, separates: bool) -> tuple[nn.Module, Any]:
    """Some steps with the same inputs, where the structure says that it can do without derivatives, or does not."""
    model = copy.deepcopy(net.model)
    opt = recipe(model, nn.MSELoss(), rule=SpectralProgress(), update_every=1, decay=0.5)
    y = torch.ones_like(call(copy.deepcopy(model), net.inputs).detach())
    with pytest.MonkeyPatch.context() as patch:
        if not separates:
            patch.setattr(Layerwise, "separates", False)
        for _ in range(STEPS):
            opt.zero_grad()
            opt.loss(call(model, net.inputs), y).backward()
            opt.step()
    return model, opt


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac])
@given(net=nets())
@settings(deadline=None)
def test_inputs_alone_give_the_steps_of_all_statistics(recipe: Any, net: Net) -> None:
    model, opt = train(net, recipe, separates=True)
    other, _ = train(net, recipe, separates=False)
    assert torch.isfinite(flat(model)).all()
    layered = [
        block for block in opt._live.state.blocks.values() if block.layer is not None and block.totals is not None
    ]
    known = [set(block.totals) & {"left", "right"} for block in layered]
    if any(len(sides) > 1 for sides in known):  # a matrix in several roles keeps what it has
        return
    torch.testing.assert_close(flat(model), flat(other), rtol=1e-7, atol=1e-9)
