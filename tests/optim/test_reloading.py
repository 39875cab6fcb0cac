"""A state is loaded as often as one likes: again, after others, into an optimizer in use, with keys that tools add."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from models import draw
from optim_models import BLOCK_RECIPES, CE, X, Y, flat, net, pass_through_file, same, train_numbered
from saved_runs import BUILDS, load, save
from torch import nn

import natgrad as ng


@pytest.fixture(scope="module", params=[name for name in BUILDS if name != "preconditioned"])
def build(request: pytest.FixtureRequest) -> Callable[[nn.Module], Any]:
    return BUILDS[request.param]


Runs = tuple[list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(build: Callable[[nn.Module], Any]) -> Runs:
    return record_runs(build)


@cache
def record_runs(build: Callable[[nn.Module], Any]) -> Runs:
    """States before the first step, after two and after five; and those two steps after each of them."""
    model = net()
    opt = build(model)
    states = [save(model, opt)]
    for first, last in ((0, 2), (2, 4), (4, 5), (5, 7)):
        train_numbered(model, opt, range(first, last))
        states.append(save(model, opt))
    return [states[0], states[1], states[3]], [states[1], states[2], states[4]]


STARTS = (0, 2, 5)
STRUCTURES = [recipe.__name__ for recipe in BLOCK_RECIPES]


def test_states_are_loaded_in_any_order_into_one_optimizer(build, runs):
    """As one goes back to the best checkpoint, and on to the last; a tool may load a state back at once, and twice."""
    model = net()
    opt = build(model)
    for choice in (1, 0, 2):
        load(model, opt, runs[0][choice])
        assert same(save(model, opt), runs[0][choice])
        for _ in range(choice):  # as accelerate does in `prepare`
            opt.load_state_dict(pass_through_file(opt.state_dict()))
        train_numbered(model, opt, range(STARTS[choice], STARTS[choice] + 2))
        assert same(save(model, opt), runs[1][choice])


@pytest.mark.parametrize("build", ["kfac", "online_ng", "kfac, judged", "hessian_free", "averaged"], indirect=True)
def test_a_state_is_loaded_in_the_middle_of_a_batch(build, runs):
    """Where a run went wrong before its step: nothing of that batch is in the steps that follow."""
    model = net()
    opt = build(model)
    for reached in ("outputs", "loss", "backward"):
        opt.zero_grad()
        outputs = model(3 * X)
        if reached != "outputs":
            loss = opt.loss(outputs, Y)
        if reached == "backward":
            loss.backward()
        load(model, opt, runs[0][1])
        train_numbered(model, opt, range(2, 4))
        assert same(save(model, opt), runs[1][1]), reached


@pytest.mark.parametrize("build", [*STRUCTURES, "two groups", "hessian_free", "averaged", "momentum"], indirect=True)
def test_a_layer_that_is_frozen_meanwhile_keeps_its_state(build):
    """As where a part of a network rests for some epochs, and the run is resumed in them."""
    model, resumed = net(), net()
    opt, other = build(model), build(resumed)
    train_numbered(model, opt, range(2))
    for m in (model, resumed):
        m.get_submodule("0").requires_grad_(False)
    train_numbered(model, opt, range(2, 3))
    load(resumed, other, save(model, opt))
    for first, last in ((3, 4), (4, 6)):
        for m, o in ((model, opt), (resumed, other)):
            train_numbered(m, o, range(first, last))
            m.get_submodule("0").requires_grad_(True)
        assert same(save(resumed, other), save(model, opt))


ADDED = {"differentiable": False, "foreach": None, "fused": None, "initial_lr": 1.0, "swa_lr": 0.1, "name": "body"}


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("name", ["kfac", "hessian_free", "two groups"])
def test_keys_that_torch_and_trainers_add_come_and_go(name, saved_with, loaded_with):
    build, (before, after) = BUILDS[name], record_runs(BUILDS[name])
    model = net()
    opt = build(model)
    state = copy.deepcopy(before[1])
    if saved_with:
        state["opt"]["param_groups"][0].update(ADDED)
    if loaded_with:
        opt.param_groups[0].update(ADDED | {"initial_lr": 2.0})
        opt.defaults.update(ADDED)
    load(model, opt, state)
    assert opt.param_groups[0]["initial_lr"] == (1.0 if saved_with else 2.0)
    train_numbered(model, opt, range(2, 4))
    ended = save(model, opt)
    assert same(ended["model"], after[1]["model"])
    load(model, opt, copy.deepcopy(before[1]))
    load(model, opt, ended)
    assert same(save(model, opt)["opt"]["state"], ended["opt"]["state"])


@pytest.mark.parametrize("recipe", [ng.kfac, ng.hessian_free])
def test_a_setting_of_the_optimizer_s_own_that_was_lost_is_named(recipe):
    opt = recipe(net(), CE)
    opt.load_state_dict(opt.state_dict())
    state = copy.deepcopy(opt.state_dict())
    del state["param_groups"][0]["lr"]
    with pytest.raises(ValueError, match=r"param_groups'\]\[0\] lacks \['lr'\]"):
        opt.load_state_dict(state)


@pytest.mark.parametrize("recipe", [*BLOCK_RECIPES, ng.natgrad_cg])
@pytest.mark.filterwarnings("ignore:a large part of the gradient", "ignore:.*did not come from")
def test_what_is_known_of_another_loss_is_saved(recipe):
    """A penalty that is added outside of `opt.loss`."""

    def train_penalised(model: nn.Module, opt: Any, steps: range) -> None:
        for k in steps:
            opt.zero_grad()
            (opt.loss(model(X + 0.1 * draw(8, 3, seed=k)), Y) + 3 * model[0].weight.pow(4).sum()).backward()
            opt.step()

    model, twin = net(), net()
    opt, other = recipe(model, CE), recipe(twin, CE)
    train_penalised(model, opt, range(5))
    load(twin, other, save(model, opt))
    train_penalised(model, opt, range(5, 8))
    train_penalised(twin, other, range(5, 8))
    assert torch.equal(flat(model), flat(twin))


def test_groups_that_are_added_after_a_load_are_saved_and_loaded():
    ends = []
    for reload in (False, True):
        model = net()
        opt = ng.kfac(model, CE, params=model[0].parameters(), estimate=ng.ExactLabels())
        opt.load_state_dict(opt.state_dict())
        opt.add_param_group({"params": model[2].parameters(), "lr": 0.5})
        train_numbered(model, opt, range(3))
        if reload:
            opt.load_state_dict(pass_through_file(opt.state_dict()))
        train_numbered(model, opt, range(3, 5))
        ends.append(flat(model))
    assert torch.equal(*ends)
