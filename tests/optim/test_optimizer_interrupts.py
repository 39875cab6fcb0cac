"""Ctrl-C leaves parameters and state at the last accepted step, and a usable optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optim_models import CE, Interrupt, X, Y, flat, iterate, net, same, snapshot
from torch import Tensor, nn

import natgrad as ng
from natgrad.optim.objective import Replay


def fisher(model: nn.Module) -> ng.Metric:
    return ng.fisher(model, CE)


def interrupt_run(*_: Any) -> Any:
    raise KeyboardInterrupt


class Interrupted(ng.Rule):
    """A rule interrupted at its second look at the loss."""

    needs_loss = True

    def step(self, model, loss_at, memory):
        loss_at(model.proposal.vector)
        loss_at(model.proposal.scale_by(0.5).vector)
        return interrupt_run()


def by_solver(model: nn.Module) -> ng.NaturalGradient:
    return ng.NaturalGradient(model, fisher(model), solver=ng.CG(callback=interrupt_run), rule=ng.Momentum())


def by_sampling(model: nn.Module) -> ng.NaturalGradient:
    return ng.NaturalGradient(model, ng.sampled_fisher(model, CE), solver=ng.CG(callback=interrupt_run))


def by_rule(model: nn.Module) -> ng.NaturalGradient:
    return ng.NaturalGradient(model, fisher(model), rule=Interrupted(), damping=ng.LevenbergMarquardt())


@pytest.mark.parametrize("way", ["loop", "closure", "closure with opt.loss"])
@pytest.mark.parametrize("build", [by_solver, by_sampling, by_rule])
def test_ctrl_c_leaves_the_last_accepted_step_and_a_usable_optimizer(build: Callable, way: str) -> None:
    model = net()
    opt = build(model)
    solver, rule = opt.solver, opt.rule
    opt.solver, opt.rule = ng.Auto(), ng.Momentum()
    iterate(opt, model, X, Y)
    accepted, report = snapshot(opt), opt.state_report()
    opt.solver, opt.rule = solver, rule
    loss = CE if way == "closure" else opt.loss

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(model(X), Y)
        value.backward()
        return value

    random = torch.get_rng_state()
    act = partial(iterate, opt, model, X, Y) if way == "loop" else partial(opt.step, closure)
    with pytest.raises(KeyboardInterrupt):
        act()
    assert same(snapshot(opt), accepted)
    assert opt.state_report() == report
    assert torch.equal(torch.get_rng_state(), random)
    opt.solver, opt.rule = ng.Auto(), ng.Momentum()
    iterate(opt, model, X, Y)
    assert opt.state_report().step == 2


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


class Stubborn(ng.Damping):
    """A damping interrupted when it adapts."""

    needs_ratio = True

    def initial(self) -> float:
        return 0.1

    def update(self, damping: float, ratio: float) -> float:
        return interrupt_run()


def test_ctrl_c_while_the_damping_adapts_leaves_the_last_accepted_step() -> None:
    model = net()
    opt = ng.NaturalGradient(model, fisher(model), damping=Stubborn(), structure=ng.Dense(decay=0.5))
    accepted, report = snapshot(opt), opt.state_report()
    with pytest.raises(KeyboardInterrupt):
        iterate(opt, model, X, Y)
    assert same(snapshot(opt), accepted)
    assert opt.state_report() == report


@pytest.mark.parametrize("preconditioner", [ng.DiagonalPreconditioner(decay=0.5), ng.Kronecker(decay=0.5)])
@pytest.mark.parametrize("place", ["preconditioner", "gradient"])
def test_ctrl_c_in_a_preconditioner_or_a_search_leaves_the_last_accepted_step(place, preconditioner, monkeypatch):
    model = net()
    opt = ng.NaturalGradient(
        model,
        ng.sampled_fisher(model, CE),
        solver=ng.KrylovSubspace(4),
        rule=ng.SubspaceSearch(steps=3),
        damping=ng.LevenbergMarquardt(),
        preconditioner=preconditioner,
        warm_start=1.0,
        search_batch=4,
    )
    iterate(opt, model, X, Y)
    accepted, report = snapshot(opt), opt.state_report()
    owner, name = (type(opt.preconditioner), "update") if place == "preconditioner" else (Replay, "_differentiate")
    asked = getattr(owner, name)

    def last(*args: Any, **kwargs: Any) -> Any:
        asked(*args, **kwargs)
        return interrupt_run()

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, last)
        with pytest.raises(KeyboardInterrupt):
            iterate(opt, model, X, Y)
    assert same(snapshot(opt), accepted)
    assert opt.state_report() == report
    iterate(opt, model, X, Y)
    assert opt.state_report().step == 2


WHOLE: dict[str, Callable[[nn.Module], ng.NaturalGradient]] = {
    "adapted, momentum, decay": lambda model: ng.NaturalGradient(
        model, fisher(model), damping=ng.LevenbergMarquardt(0.1), rule=ng.Momentum(), weight_decay=1e-2, lr=0.3
    ),
    "sampled labels, warm start": lambda model: ng.NaturalGradient(
        model, ng.sampled_fisher(model, CE), solver=ng.CG(max_steps=4), warm_start=0.9
    ),
    "remembered": lambda model: ng.NaturalGradient(model, fisher(model), structure=ng.Kronecker(0.9), lr=0.1),
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
    assert outcomes == {"nothing", "all"}
