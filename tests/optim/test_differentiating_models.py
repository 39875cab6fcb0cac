"""Models that take derivatives in their forward pass: every optimiser, rule and damping evaluates their loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import F64, Assembled, assert_close, draw
from optim_models import LOOKING, Build, iterate
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import as_criterion
from natgrad.ground.densities import as_density
from natgrad.ground.spaces import Space, trainable
from natgrad.optim.objective import Replay
from natgrad.optim.passes import Data


def build_laplacian(bend: bool = True) -> nn.Module:
    """u and its Laplacian in the inputs, as most people write a network for a differential equation."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = m.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        parts = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True, materialize_grads=True) for i in (0, 1)]
        return torch.cat([u, sum(part[0][:, i : i + 1] for i, part in enumerate(parts))], dim=1)

    return Assembled(run, net=nn.Sequential(nn.Linear(2, 5), nn.Tanh() if bend else nn.Identity(), nn.Linear(5, 1)))


def build_force() -> nn.Module:
    """Minus the slope of an energy."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_() if x.is_leaf else x
            return -torch.autograd.grad(m.energy(x).sum(), x, create_graph=True)[0]

    return Assembled(run, energy=nn.Sequential(nn.Linear(2, 6), nn.Softplus(), nn.Linear(6, 1)))


def build_adapted() -> nn.Module:
    """Weights after a step of gradient descent of their own: derivatives in the parameters."""

    def run(m: Any, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((x @ m.weight).square().mean(), m.weight, create_graph=True)
        return x @ (m.weight - 0.1 * slope)

    return Assembled(run, weight=nn.Parameter(0.3 * torch.ones(2, 2)))


# the last one's slope has a graph to the parameters alone
MODELS = [build_laplacian, build_force, build_adapted, lambda: build_laplacian(bend=False)]
X, Y = draw(6, 2), draw(6, 2, seed=1)


def build_model(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


OPTIMISERS: dict[str, Build] = LOOKING | {
    "backtracks": lambda m, loss: ng.NaturalGradient(
        m, ng.fisher(m, loss), rule=ng.TrustRegion(0.1, backtracks=5), damping=0.1
    ),
    "ekfac, judged": lambda m, loss: ng.ekfac(
        m, loss, damping=ng.LevenbergMarquardt(start=0.1, per="block"), update_every=1
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_trial_loss_is_the_loss_there(kind):
    model = build_model(kind)
    params = dict(trainable(model))
    space = Space(params)
    replay = Replay(model, as_criterion(nn.MSELoss()), Data(X, Y, None), None, params, space)
    step = 0.1 * draw(space.size, seed=2)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, part in space.unflatten(step).items():
            dict(moved.named_parameters())[name].add_(part)
    value = nn.functional.mse_loss(moved(X.clone()), Y)
    gradients = torch.autograd.grad(value, list(moved.parameters()), materialize_grads=True)
    with torch.no_grad():  # as inside of `step`
        assert replay(step) == pytest.approx(float(value.detach()), rel=1e-12)
        assert replay.gradient(step)[0] == pytest.approx(float(value.detach()), rel=1e-12)
        assert_close(replay.gradient(step)[1], space.flatten(dict(zip(space, gradients, strict=True))))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_that_evaluates_the_loss_again_lowers_it(name):
    for kind in MODELS if name == "hessian_free" else MODELS[list(OPTIMISERS).index(name) % 2 :: 2]:
        model = build_model(kind)
        opt = OPTIMISERS[name](model, nn.MSELoss())
        losses = [float(iterate(opt, model, X.clone(), Y)) for _ in range(4)]
        assert losses[-1] < losses[0], kind
        assert opt.state_report().failures == 0


# the same in other places that call a user's code for its value


def build_guarded() -> nn.Module:
    """Says so where derivatives are off; an energy in x, or a regression."""

    def run(m: Any, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise RuntimeError("derivatives are off")
        return (m.weight * x).square().sum(1)

    return Assembled(run, weight=nn.Parameter(torch.ones(2, dtype=F64)))


def test_densities_and_predictions_are_evaluated_with_derivatives_on():
    """By Langevin draws, and of a network under draws of its weights."""
    energy = build_guarded()
    draws = ng.metrics.Langevin(steps=2, step=0.01)
    point = draws.draw(as_density(energy), trainable(energy), X, torch.Generator().manual_seed(0))
    assert point.shape == X.shape
    assert bool(point.isfinite().all())
    q = ng.variational(build_guarded(), criterion=ng.Gaussian(0.1), data_size=len(X))
    found = q.predict(X, 3, generator=torch.Generator().manual_seed(0))
    assert found.shape == (3, len(X))
    assert not found.requires_grad | point.requires_grad
