"""Passes of a model inside of `torch.func`, and at parameters that were computed from its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_models import FREE_RECIPES, Closure, flat
from spectral_points import draw_layers
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.functional import mse_loss

import natgrad as ng

X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
Y = X.sin()
RECIPES = (ng.kfac, ng.ekfac, ng.diagonal, ng.hessian_free)


def build() -> nn.Module:
    return draw_layers(2, 8, 2, dtype=torch.float32)


def call_inside(model: nn.Module) -> None:
    """Quantities beside the loss, per example and as a function of the parameters."""
    params = dict(model.named_parameters())
    vmap(grad(lambda x: functional_call(model, params, (x,)).square().sum()))(X)
    grad(lambda p: functional_call(model, p, (X,)).square().sum())(params)
    jacrev(model)(X)


def train_beside(recipe: Callable[..., Any], before: bool, after: bool) -> Tensor:
    model = build()
    optimizer = recipe(model, nn.MSELoss())
    for _ in range(4):
        optimizer.zero_grad()
        if before:
            call_inside(model)
        outputs = model(X)
        if after:
            call_inside(model)
        optimizer.loss(outputs, Y).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_passes_inside_of_a_transform_do_not_change_a_run_and_a_loss_of_one_is_refused(recipe: Any) -> None:
    alone = train_beside(recipe, before=False, after=False)
    assert torch.equal(train_beside(recipe, before=True, after=False), alone)
    assert torch.equal(train_beside(recipe, before=False, after=True), alone)
    model = build()
    optimizer, params = recipe(model, nn.MSELoss()), dict(model.named_parameters())
    outputs = vmap(lambda x: functional_call(model, params, (x,)))(X)
    with pytest.raises(ValueError, match=r"outside of torch\.func\.vmap"):  # noqa: PT012
        optimizer.loss(outputs, Y).backward()
        optimizer.step()


def adapt(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The parameters after one step of plain gradient descent."""
    loss = mse_loss(functional_call(model, params, (x,)), y)
    slopes = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
    return {name: p - 0.1 * slope for (name, p), slope in zip(params.items(), slopes, strict=True)}


@pytest.mark.parametrize("recipe", FREE_RECIPES)
@pytest.mark.parametrize("closed", [True, False])
def test_a_loss_at_computed_parameters_is_refused_where_a_pass_is_done_again(recipe: Any, closed: bool) -> None:
    model = build()
    optimizer = recipe(model, nn.MSELoss())

    def evaluate() -> Tensor:
        fast = adapt(model, dict(model.named_parameters()), X, Y)
        return optimizer.loss(functional_call(model, fast, (X,)), Y)

    closure = Closure(optimizer, evaluate)
    with pytest.raises(ValueError, match="other parameters than its own"):  # noqa: PT012
        if closed:
            optimizer.step(closure)
        closure()
        optimizer.step()


def test_the_metric_of_an_inner_loop_is_that_of_a_function() -> None:
    model, x, y = build().double(), X.double(), Y.double()

    def f(params: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(model, adapt(model, params, x, y), (inputs,))

    optimizer = ng.NaturalGradient(model, ng.gauss_newton(f, nn.MSELoss()), solver=ng.Direct(), damping=1e-3)
    closure = Closure(optimizer, lambda: mse_loss(f(dict(model.named_parameters()), x), y))
    losses = list[float]()
    for _ in range(3):
        optimizer.observe(x, y)
        losses.append(float(optimizer.step(closure).detach()))
    assert losses[2] < losses[1] < losses[0]
