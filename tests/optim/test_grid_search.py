"""The best length of a step on a logarithmic grid."""

from __future__ import annotations

import math

import pytest
import torch
from models import assert_close, draw, mlp
from optim_models import flat
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import GridSearch

X, Y = draw(8, 2), draw(8, 1, seed=1)


def step_at(lr: float, rule: ng.Rule) -> tuple[Tensor, Tensor, nn.Module]:
    """Parameters before, the direction at full length, and the model after one step."""
    model = mlp(2, 4, 1)
    before = flat(model)
    opt = ng.NaturalGradient(model, ng.gauss_newton(model, nn.MSELoss()), lr=lr, damping=1e-3, rule=rule)
    opt.loss(model(X), Y).backward()
    opt.step()
    return before, flat(model) - before, model


def loss_along(before: Tensor, direction: Tensor, length: float) -> float:
    model = mlp(2, 4, 1)
    nn.utils.vector_to_parameters(before + length * direction, model.parameters())
    return float((model(X) - Y).square().mean().detach())


@pytest.mark.parametrize("lr", [1.0, 30.0])
def test_the_step_has_the_lowest_loss_on_the_grid(lr: float):
    before, full, _ = step_at(lr, ng.Rate())
    losses = {k: loss_along(before, full, 0.5**k) for k in range(8)}
    best = min(losses, key=losses.__getitem__)
    _, found, _ = step_at(lr, GridSearch(trials=8))
    assert_close(found, 0.5**best * full, 1e-12)
    assert best > 0 or lr == 1.0


def test_no_step_where_no_length_lowers_the_loss():
    _, found, _ = step_at(1e8, GridSearch(trials=2))
    assert not found.any()


def test_energy_natural_gradients_without_damping_solve_poisson():
    """The pseudo-inverse with a cut and a search on a grid, as ENGD and ANaGRAM have it."""
    net = mlp(1, 8, 1)
    terms = {
        "inside": lambda u, x: ng.laplacian(u, x) + math.pi**2 * torch.sin(math.pi * x[0]),
        "ends": lambda u, x: u(x),
    }
    choices = {"acceleration": False, "scaling": False, "damping": 0.0}
    opt = ng.residuals(net, terms, solver=ng.solvers.PseudoInverse(1e-6), rule=GridSearch(12, 0.25), **choices)
    points = torch.linspace(0, 1, 40).double().unsqueeze(1)
    losses = [float(opt.step(inside=points, ends=points[[0, -1]])) for _ in range(25)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-6 * losses[0]


@pytest.mark.parametrize(("choices", "said"), [({"trials": 0}, "trials is 0"), ({"shrink": 1.0}, "shrink is 1.0")])
def test_bad_choices_are_named(choices: dict, said: str):
    with pytest.raises(ValueError, match=said):
        GridSearch(**choices)
