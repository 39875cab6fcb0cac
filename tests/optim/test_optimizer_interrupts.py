"""Ctrl-C leaves parameters and state at the last accepted step, and a usable optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_models import BLOCK_RECIPES, CE, Interrupt, X, Y, flat, iterate, net, same, snapshot
from torch import Tensor, nn

import natgrad as ng


def fisher(model: nn.Module) -> ng.Metric:
    return ng.fisher(model, CE)


def interrupt_run(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_inside_a_reevaluated_closure_puts_the_parameters_back() -> None:
    model, calls = net(), []
    opt = ng.NaturalGradient(model, fisher(model), rule=ng.LineSearch(), lr=100.0)
    before = flat(model)

    def closure() -> Tensor:
        opt.zero_grad()
        value = CE(model(X), Y)
        value.backward()
        calls.append(flat(model))
        return interrupt_run() if len(calls) == 3 else value

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert not torch.equal(calls[2], before)
    assert torch.equal(flat(model), before)
    iterate(opt, model, X, Y)
    assert opt.state_report().step == 1


WHOLE: dict[str, Callable[[nn.Module], ng.NaturalGradient]] = {
    "adapted, momentum, decay": lambda model: ng.NaturalGradient(
        model, fisher(model), damping=ng.LevenbergMarquardt(0.1), rule=ng.Momentum(), weight_decay=1e-2, lr=0.3
    ),
    "sampled labels, warm start": lambda model: ng.NaturalGradient(
        model, ng.sampled_fisher(model, CE), solver=ng.CG(max_steps=4), warm_start=0.9
    ),
    "remembered": lambda model: ng.NaturalGradient(model, fisher(model), structure=ng.Kronecker(0.9), lr=0.1),
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
    "refused": lambda model: ng.NaturalGradient(model, fisher(model), damping=ng.LevenbergMarquardt(1e-9), lr=1e4),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_step_interrupted_at_any_line_happened_whole_or_not_at_all(name: str) -> None:
    first = WHOLE[name](net())
    iterate(first, first.model, X, Y)
    saved = snapshot(first)

    def interrupt_run(n: int) -> tuple[Any, Any, Interrupt]:
        model = net()
        opt = WHOLE[name](model)
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        opt.zero_grad()
        opt.loss(model(X), Y).backward()
        before = snapshot(opt)
        with Interrupt(n) as interrupt:
            opt.step()
        return opt, before, interrupt

    opt, _, count = interrupt_run(0)
    whole, lines, outcomes = snapshot(opt), count.seen, set()
    for n in [*range(1, lines - 50, lines // 8), *range(lines - 50, lines + 1, 2)]:  # written at the end
        opt, before, _ = interrupt_run(n)
        now = snapshot(opt)
        outcomes.add("nothing" if same(now, before) else "all" if same(now, whole) else f"a part, line {n} of {lines}")
        if n <= lines - 3:  # in the last ones the step has returned already
            opt.step()
            assert same(snapshot(opt), whole), "called again, it takes that step, once"
    assert outcomes == {"nothing", "all"}


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
