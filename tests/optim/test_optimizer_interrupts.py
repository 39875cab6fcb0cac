"""Ctrl-C leaves parameters and state at the last accepted step, and a usable optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_models import BLOCK_RECIPES, CE, X, Y, assert_whole_or_nothing, flat, iterate, net, same, snapshot
from torch import Tensor, nn

import natgrad as ng


def test_ctrl_c_inside_a_reevaluated_closure_puts_the_parameters_back() -> None:
    model, calls = net(), []
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), rule=ng.LineSearch(), lr=100.0)
    before = flat(model)

    def closure() -> Tensor:
        opt.zero_grad()
        value = CE(model(X), Y)
        value.backward()
        calls.append(flat(model))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert not torch.equal(calls[2], before)
    assert torch.equal(flat(model), before)
    iterate(opt, model, X, Y)
    assert opt.state_report().step == 1


WHOLE: dict[str, Callable[[nn.Module], ng.NaturalGradient]] = {
    "adapted, momentum, decay": lambda model: ng.NaturalGradient(
        model, ng.fisher(model, CE), damping=ng.LevenbergMarquardt(0.1), rule=ng.Momentum(), weight_decay=1e-2, lr=0.3
    ),
    "sampled labels, warm start": lambda model: ng.NaturalGradient(
        model, ng.sampled_fisher(model, CE), solver=ng.CG(max_steps=4), warm_start=0.9
    ),
    "remembered": lambda model: ng.NaturalGradient(model, ng.fisher(model, CE), structure=ng.Kronecker(0.9), lr=0.1),
    "searched, preconditioned": lambda model: ng.NaturalGradient(
        model,
        ng.sampled_fisher(model, CE),
        solver=ng.KrylovSubspace(4),
        rule=ng.SubspaceSearch(steps=3),
        damping=ng.LevenbergMarquardt(),
        preconditioner=ng.Kronecker(decay=0.5),
        warm_start=1.0,
        search_batch=4,
    ),
    "refused": lambda model: ng.NaturalGradient(
        model, ng.fisher(model, CE), damping=ng.LevenbergMarquardt(1e-9), lr=1e4
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_step_interrupted_at_any_line_happened_whole_or_not_at_all(name: str) -> None:
    first = WHOLE[name](net())
    iterate(first, first.model, X, Y)
    saved = snapshot(first)

    def prepare() -> Any:
        model = net()
        opt = WHOLE[name](model)
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        return opt

    _, lines = assert_whole_or_nothing(prepare, 1, 501, range(-50, 1, 3))
    assert lines > 100


BATCHES: dict[str, Callable[[nn.Module], Any]] = {
    **{recipe.__name__: lambda model, recipe=recipe: recipe(model, CE) for recipe in BLOCK_RECIPES},
    "hessian_free": lambda model: ng.hessian_free(model, CE),
    "natgrad_cg": lambda model: ng.natgrad_cg(model, CE),
    "sampled": WHOLE["sampled labels, warm start"],
    "remembered": WHOLE["remembered"],
}


@pytest.mark.parametrize("event", ["loss", "backward"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_is_cut_before_its_step_leaves_nothing(name: str, event: str) -> None:
    """As if it had never been: later steps too are those of a run without it."""
    opt, twin = (BATCHES[name](net()) for _ in range(2))
    for step in range(5):
        if step in (0, 1, 4):
            twin.zero_grad()
            value = twin.loss(twin.model(-X), 2 - Y)
            if event == "backward":
                value.backward()
            assert same(snapshot(twin), snapshot(opt))
        for one in (opt, twin):
            iterate(one, one.model, X, Y)
        assert same(snapshot(twin), snapshot(opt))
