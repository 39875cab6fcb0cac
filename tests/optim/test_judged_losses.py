"""The number that is judged is the number that went backward: penalties beside `opt.loss`, and what closures return."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import mlp
from torch import Tensor, nn

import natgrad as ng

X = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
T = (X[:, :1] > 0).double()
BITS = nn.BCEWithLogitsLoss()
OUTSIDE = "did not come from optimizer.loss"


def slopes(model: nn.Module) -> Tensor:
    """Ten times how far the outputs' slopes in the inputs are from 1, as in adversarial training."""
    inputs = (X + 0.1).requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return 10 * (slope.norm(dim=1) - 1).square().mean()


def sizes(model: nn.Module) -> Tensor:
    return 3 * sum(p.square().sum() for p in model.parameters())


def away(model: nn.Module) -> Tensor:
    """A pull of the first layer alone."""
    return 5 * (model[0].weight - 1).square().sum()


PENALTIES = {"slopes": slopes, "sizes": sizes, "one layer": away}
RECIPES: dict[str, Callable[[nn.Module], Any]] = {
    "hessian_free": lambda model: ng.hessian_free(model, BITS),
    "natgrad_cg": lambda model: ng.natgrad_cg(model, BITS),
    "krylov_subspace": lambda model: ng.krylov_subspace(model, BITS, dimension=8),
    "NaturalGradient": lambda model: ng.NaturalGradient(model, ng.fisher(model, BITS)),
    "kfac": lambda model: ng.kfac(model, BITS, damping=ng.LevenbergMarquardt(per="block", every=1)),
}


def train(
    recipe: str, penalty: Callable[[nn.Module], Tensor], closed: bool, steps: int = 20
) -> tuple[Any, list[float]]:
    model = mlp(4, 8, 1)
    opt, values = RECIPES[recipe](model), list[float]()

    def closure() -> Tensor:
        opt.zero_grad()
        value = opt.loss(model(X), T) + penalty(model)
        value.backward()
        return value

    for _ in range(steps):
        value = opt.step(closure) if closed else closure()
        values.append(float(value.detach()))
        if not closed:
            opt.step()
    return opt, values


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_closure_returns_is_what_falls(recipe: str, penalty: Any):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not come from")  # where the metric is told of it
        opt, values = train(recipe, penalty, closed=True)
    assert values[-1] < 0.7 * values[0]
    assert max(values) < 1.5 * values[0]
    if recipe == "hessian_free":
        assert opt.state_report().loss == pytest.approx(values[-1])


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_penalty_beside_the_loss_is_named_and_held(recipe: str, penalty: Any):
    with pytest.warns(UserWarning, match=OUTSIDE):
        _, values = train(recipe, penalty, closed=False)
    assert values[-1] < 0.8 * values[0]
    assert max(values) < 10 * values[0]  # the curvature is known from the second step on


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_closure_of_the_whole_loss_is_not_asked_again(recipe: str):
    model, calls = mlp(4, 8, 1), []
    opt = RECIPES[recipe](model)

    def closure() -> Tensor:
        calls.append(1)
        opt.zero_grad()
        value = opt.loss(model(X), T)
        value.backward()
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            opt.step(closure)
    assert len(calls) == 4


def test_a_closure_may_return_the_last_of_several_losses():
    """Their gradients are all of it: the sum is judged, and nothing is asked again."""
    model, calls = mlp(4, 8, 1), []
    opt = ng.hessian_free(model, BITS)

    def closure() -> Tensor:
        calls.append(1)
        opt.zero_grad()
        for part in (slice(0, 10), slice(10, 40)):
            value = opt.loss(model(X[part]), T[part]) * (len(X[part]) / 40)
            value.backward()
        return value

    for _ in range(4):
        opt.step(closure)
    assert len(calls) == 4
    assert opt.state_report().loss == pytest.approx(float(BITS(model(X), T).detach()), rel=0.5)
