"""Reference values from an independent prototype (tests/vectors/mlp.json), in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import F64, assert_close
from torch import Tensor, nn

from natgrad.families import Bernoulli, Categorical, Gaussian, Likelihood
from natgrad.ground.spaces import Space, trainable
from natgrad.metrics import covariance, empirical_fisher, fisher, gauss_newton, kl
from natgrad.operators import DenseOperator
from natgrad.solvers import CG, Auto, Direct, SampleSpace

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "mlp.json").read_text(encoding="utf-8"))
NET = VECTORS["net"]
FAMILIES: dict[str, Likelihood] = {
    "gaussian": Gaussian(NET["beta"]),
    "bernoulli": Bernoulli(),
    "categorical": Categorical(),
}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


def symmetric(rows: list[list[float]]) -> Tensor:
    """From the rows of the lower triangle."""
    lower = torch.zeros(len(rows), len(rows), dtype=F64)
    for i, row in enumerate(rows):
        lower[i, : len(row)] = tensor(row)
    return lower + lower.tril(-1).mT


def net() -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    params = dict(trainable(model))
    with torch.no_grad():
        for name, key in (("0.weight", "W1"), ("0.bias", "b1"), ("2.weight", "W2"), ("2.bias", "b2")):
            params[name].copy_(tensor(NET[key]))
    return model, params, tensor(NET["X"])


def targets_of(name: str) -> Tensor:
    """One-hot classes become class numbers."""
    targets = tensor(VECTORS[name]["targets"])
    return targets.argmax(1) if name == "categorical" else targets


def gradient(name: str) -> Tensor:
    model, params, x = net()
    loss = FAMILIES[name].nll(model(x), targets_of(name)).mean()
    return Space(params).flatten(dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)))


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradient(name):
    model, _, x = net()
    loss = FAMILIES[name].nll(model(x), targets_of(name)).mean()
    assert_close(loss, tensor(VECTORS[name]["loss"]), 1e-14)
    assert_close(gradient(name), tensor(VECTORS[name]["gradient"]), 1e-14)


@pytest.mark.parametrize("name", FAMILIES)
def test_fisher_and_its_products(name):
    model, params, x = net()
    operator = fisher(model, FAMILIES[name]).at(params, x)
    expected = symmetric(VECTORS[name]["fisher_lower"])
    assert_close(operator.dense(), expected, 1e-14)
    assert_close(operator @ tensor(NET["v"]), tensor(VECTORS[name]["fvp"]), 1e-14)
    assert_close(operator.diagonal(), expected.diagonal(), 1e-14)
    assert torch.linalg.matrix_rank(operator.dense(), hermitian=True, rtol=1e-11) == VECTORS[name]["rank_fisher"]
    assert_close(gauss_newton(model, FAMILIES[name]).at(params, (x, targets_of(name))).dense(), expected, 1e-14)


@pytest.mark.parametrize("name", FAMILIES)
def test_empirical_fisher_and_its_products(name):
    model, params, x = net()
    operator = empirical_fisher(model, FAMILIES[name]).at(params, (x, targets_of(name)))
    assert_close(operator.dense(), symmetric(VECTORS[name]["empirical_fisher_lower"]), 1e-14)
    assert_close(operator @ tensor(NET["v"]), tensor(VECTORS[name]["empirical_fvp"]), 1e-14)


@pytest.mark.parametrize("solver", [Direct(), SampleSpace(), Auto(), CG(rtol=1e-13, max_steps=200)])
@pytest.mark.parametrize("name", FAMILIES)
def test_natural_gradient(name, solver):
    model, params, x = net()
    operator = fisher(model, FAMILIES[name]).at(params, x)
    found = solver.solve(operator, gradient(name), damping=NET["damping"]).value
    assert_close(found, tensor(VECTORS[name]["natural_gradient"]), 1e-11)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_and_covariance_of_one_batch_are_parallel(name):
    """(U + l)^-1 g and (C + l)^-1 g, C = U - g g^T: with ratio 1 / (1 - g^T (U + l)^-1 g)."""
    model, params, x = net()
    g = gradient(name)
    uncentred = empirical_fisher(model, FAMILIES[name]).at(params, (x, targets_of(name)))
    step = Direct().solve(uncentred, g, damping=NET["damping"]).value
    assert_close(step, tensor(VECTORS[name]["tonga_uncentred"]), 1e-11)
    centred = symmetric(VECTORS[name]["centred_covariance_lower"])
    operator = covariance(model, FAMILIES[name], centred=True).at(params, (x, targets_of(name)))
    assert_close(uncentred.dense() - torch.outer(g, g), centred, 1e-13)
    assert_close(operator.dense(), centred, 1e-13)
    whole = covariance(model, FAMILIES[name], centred=False).at(params, (x, targets_of(name)))
    assert_close(whole.dense(), uncentred.dense(), 1e-13)
    found = SampleSpace().solve(operator, g, damping=NET["damping"]).value
    assert_close(found, tensor(VECTORS[name]["tonga_centred"]), 1e-10)
    assert_close(found, step / (1 - g @ step), 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_step_in_nats(name):
    """Exactly; the optimisers' tests have the quadratic form, and both reduction ratios."""
    model, params, x = net()
    space, operator = Space(params), fisher(model, FAMILIES[name]).at(params, x)
    d = -NET["rate"] * Direct().solve(operator, gradient(name), damping=NET["damping"]).value
    moved = space.unflatten(space.flatten(params).detach() + d)
    assert_close(kl(model, FAMILIES[name])(params, moved, x).detach(), tensor(VECTORS[name]["kl_exact"]), 1e-11)


@pytest.mark.parametrize("name", VECTORS["singular"])
def test_singular_systems_get_their_minimum_norm_solution(name):
    case = VECTORS["singular"][name]
    solution = Direct().solve(DenseOperator(tensor(case["A"])), tensor(case["b"]))
    assert_close(solution.value, tensor(case["x"]), 1e-10)
    assert_close(solution.residual, tensor(case["residual_norm"]), 1e-10, tensor(case["b"]).norm())
