"""Pruning and parametrisations put on in the middle of a run give parameters new names: training goes on."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close
from optim_models import CE, X, Y, flat, iterate, net
from torch import nn
from torch.nn.utils import parametrizations, prune

import natgrad as ng

Recipe = Callable[..., Any]
RECIPES: list[Recipe] = [ng.kfac, ng.ekfac, ng.diagonal, ng.online_ng, ng.hessian_free, ng.natgrad_cg]
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
UNDONE: dict[str, Callable[[nn.Module], Any]] = {
    "prune": lambda layer: prune.remove(layer, "weight"),
    "orthogonal": lambda layer: nn.utils.parametrize.remove_parametrizations(layer, "weight"),
}


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.__name__)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return request.param


def step_by_hand(opt: Any, model: nn.Module) -> None:
    """As loops do that clear the model's gradients, and not the optimizer's."""
    model.zero_grad()
    opt.loss(model(X), Y).backward()
    opt.step()


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    return float(CE(model(X), Y))


def list_rows(opt: Any) -> list[tuple[str, str]]:
    return sorted((row.parameter, row.structure) for row in opt.report())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", [step_by_hand, lambda opt, model: iterate(opt, model, X, Y)], ids=["model", "opt"])
def test_training_goes_on_with_what_an_optimizer_built_now_would_give(recipe, change, step):
    model = net()
    opt = recipe(model, CE)
    step(opt, model)
    weight = model[0].weight
    CHANGES[change](model[0])
    assert any(p is weight for p in model.parameters())
    before, first = weight.detach().clone(), loss_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(opt, model)
    assert not torch.equal(weight, before)
    assert loss_of(model) < first
    CHANGES[change]((twin := net())[0])
    fresh = recipe(twin, CE)
    step(fresh, twin)
    assert list_rows(opt) == list_rows(fresh)


@pytest.mark.parametrize("change", UNDONE)
def test_the_old_names_come_back(recipe, change):
    model = net()
    opt = recipe(model, CE)
    iterate(opt, model, X, Y)
    rows = list_rows(opt)
    CHANGES[change](model[0])
    iterate(opt, model, X, Y)
    assert list_rows(opt) != rows
    UNDONE[change](model[0])
    for _ in range(2):
        iterate(opt, model, X, Y)
    assert list_rows(opt) == rows


def test_the_state_of_a_renamed_run_is_loaded_by_one_built_so(recipe):
    model, twin = net(), net()
    opt = recipe(model, CE)
    iterate(opt, model, X, Y)
    CHANGES["prune"](model[0])
    early = copy.deepcopy(opt.state_dict())  # before a pass has heard of it
    iterate(opt, model, X, Y)
    CHANGES["prune"](twin[0])
    other = recipe(twin, CE)
    other.load_state_dict(early)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(opt.state_dict())
    for _ in range(3):
        iterate(opt, model, X, Y)
        iterate(other, twin, X, Y)
    assert_close(flat(twin), flat(model), rtol=1e-6)  # sums over the entries have another order, and so has CG's end


STRUCTURES: dict[str, Callable[[nn.Module], Any]] = {
    "averaged": lambda m: ng.NaturalGradient(m, ng.fisher(m, CE), damping=0.1, lr=0.3, structure=ng.Dense(0.9)),
    "by layer": lambda m: ng.NaturalGradient(m, ng.fisher(m, CE), damping=0.1, lr=0.3, structure=ng.Kronecker(0.9)),
    "momentum": lambda m: ng.NaturalGradient(m, ng.fisher(m, CE), damping=0.1, lr=0.1, rule=ng.Momentum()),
    "judged blocks": lambda m: ng.kfac(m, CE, damping=ng.LevenbergMarquardt(0.1)),
    "subspace": lambda m: ng.krylov_subspace(m, CE, dimension=3),
    "line search": lambda m: ng.NaturalGradient(m, ng.fisher(m, CE), damping=0.1, rule=ng.LineSearch()),
}


@pytest.mark.parametrize("build", STRUCTURES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_remembered_of_a_metric_does_not_stop_a_run(build, change):
    model = net()
    opt = STRUCTURES[build](model)
    for _ in range(2):
        iterate(opt, model, X, Y)
    CHANGES[change](model[0])
    before = flat(model)
    for _ in range(4):
        iterate(opt, model, X, Y)
    assert math.isfinite(loss_of(model))
    assert not torch.equal(flat(model), before)


@pytest.mark.parametrize("change", ["replaced", "weight_norm"])
def test_parameters_that_the_model_holds_no_more_are_named_and_stand_still(recipe, change):
    """`model.zero_grad()` does not reach their gradients: no step is made of what is left in them."""
    model = net()
    opt = recipe(model, CE)
    step_by_hand(opt, model)
    weight = model[0].weight
    before = weight.detach().clone()
    if change == "replaced":
        model[0] = nn.Linear(3, 4).double()  # the new weight has the old one's name
    else:
        parametrizations.weight_norm(model[0])
    new = [p.detach().clone() for p in model[0].parameters()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            step_by_hand(opt, model)
    assert len([w for w in told if "0.weight" in str(w.message) and "no longer the model's" in str(w.message)]) == 1
    assert torch.equal(weight, before)
    if change == "replaced":
        assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), new, strict=True))
