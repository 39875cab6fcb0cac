"""A model whose dtype changes within a run, or between a run and the one that goes on from its checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.structures import OnlineLowRank

CE = nn.CrossEntropyLoss()
EXACT = ng.ExactLabels()


def join(**choices: Any) -> Callable[[nn.Module], Any]:
    return lambda model: ng.NaturalGradient(
        model, ng.gauss_newton(model, CE), **{"damping": ng.Relative(0.1), "rule": ng.Rate(), "lr": 0.1} | choices
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "kfac": lambda model: ng.kfac(model, CE, estimate=EXACT),
    "ekfac": lambda model: ng.ekfac(model, CE, estimate=EXACT),
    "diagonal": lambda model: ng.diagonal(model, CE, estimate=EXACT),
    "unitwise": lambda model: ng.unitwise(model, CE, estimate=EXACT),
    "online_ng": lambda model: ng.online_ng(model, CE, estimate=EXACT),
    "hessian_free": lambda model: ng.hessian_free(model, CE),
    "Dense": join(structure=ng.Dense(0.9)),
    "AdaptiveInverse": join(structure=ng.AdaptiveInverse(), damping=0.0),
    "Woodbury": join(structure=ng.AdaptiveInverse(ng.Woodbury()), damping=0.0),
    "Kronecker": join(structure=ng.Kronecker(0.9, estimate=EXACT)),
    "EigenKronecker": join(structure=ng.EigenKronecker(0.9, estimate=EXACT)),
    "OnlineLowRank": join(structure=OnlineLowRank(0.9, estimate=EXACT)),
    "Blocks": join(structure=ng.Blocks(0.9)),
    "preconditioner": join(solver=ng.CG(max_steps=50), preconditioner=ng.Kronecker(0.9, estimate=EXACT)),
    "momentum": join(rule=ng.Momentum(0.9)),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    y = (x @ torch.tensor([[1.0, 0, -1], [0, 1, 0], [1, 0, 1], [0, -1, 1]])).argmax(1)
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.loss(model(x.to(next(model.parameters()).dtype)), y).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_dtype_goes_on_with_what_is_remembered(name: str, before: torch.dtype, after: torch.dtype) -> None:
    model = build().to(before)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    loaded = build().to(after)
    other = OPTIMIZERS[name](loaded)
    loaded.load_state_dict(weights)
    other.load_state_dict(state)
    late = build().to(before)
    mover = OPTIMIZERS[name](late)
    late.load_state_dict(weights)
    mover.load_state_dict(state)
    late.to(after)
    unmoved = build().to(before)
    keeper = OPTIMIZERS[name](unmoved)
    unmoved.load_state_dict(weights)
    keeper.load_state_dict(state)
    model.to(after)
    pairs = ((model, optimizer), (loaded, other), (late, mover), (unmoved, keeper))
    for each, own in pairs:
        train(each, own, 2)
        assert {p.dtype for p in each.parameters()} == {before if each is unmoved else after}
    start = torch.cat([weight.double().flatten() for weight in weights.values()])
    for each in (model, loaded, late):
        distance = (flat(each) - flat(unmoved)).norm() / (flat(unmoved) - start).norm()
        assert distance < 1e-2, f"{name}: {float(distance):.1e} of the way beside the run in {before}"  # float32


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_in_half_precision_learns_or_is_refused_by_its_dtype(name: str) -> None:
    model = build().to(torch.bfloat16)
    try:
        optimizer = OPTIMIZERS[name](model)
        train(model, optimizer, 3)
    except ValueError as error:
        assert "torch.bfloat16" in str(error)  # noqa: PT017
    else:
        assert not torch.equal(flat(model), flat(build().to(torch.bfloat16)))
        assert bool(flat(model).isfinite().all())
