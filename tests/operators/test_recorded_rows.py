"""Rows from the pass that the linearisation has recorded: those of a pass of their own, and of autograd."""

from __future__ import annotations

import pytest
import torch
from models import F64, Assembled, assert_close
from torch import nn

import natgrad as ng
from natgrad.ground.pure import Call, PureModel
from natgrad.operators import Linearization, OutputMap, Rows


def build_tied() -> nn.Module:
    """A weight is used outside of its layer too, which taps do not tell."""
    return Assembled(
        lambda m, x: m.outer((m.inner(x).tanh() @ m.inner.weight).tanh()),
        inner=nn.Linear(3, 3, dtype=F64),
        outer=nn.Linear(3, 1, dtype=F64),
    )


MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
    "in place": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)).double(),
    "a weight used outside of its layer": build_tied,
    "dropout": lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double(),
    "mixed examples": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double(),
}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_the_derivatives_of_the_recorded_outputs(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(6, 3, dtype=F64)
    function = OutputMap(PureModel(model, Call((x,))), lambda outputs: outputs)
    linearization = Linearization(function, ng.trainable(model), recorded=True)
    factor = torch.rand(6, 1, 1, dtype=F64) + 0.5
    expected = [
        linearization.vjp(factor[i, 0, 0] * unit.unsqueeze(1)) for i, unit in enumerate(torch.eye(6, dtype=F64))
    ]
    rows = Rows(linearization, factor)
    assert_close(rows.dense(), torch.stack(expected, dim=1), rtol=1e-9)
    probe = torch.randn(linearization.space.size, dtype=F64)
    assert_close(rows.rmv(probe), factor.view(-1) * linearization.jvp(probe).view(-1), rtol=1e-9)
