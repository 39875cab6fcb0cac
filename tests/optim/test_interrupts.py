"""A structured step happens whole or not at all, and never writes a number that is not finite."""

from __future__ import annotations

import contextvars
import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from models import build_seeded, cross
from optim_models import (
    BLOCK_RECIPES,
    CE,
    Interrupt,
    X,
    Y,
    assert_whole_or_nothing,
    flat,
    is_finite,
    iterate,
    net,
    same,
    snapshot,
    train,
)
from optim_models import BLOCK_RECIPES as RECIPES
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.pure import is_evaluating, mark_evaluation
from natgrad.optim import guard_steps
from natgrad.optim.blocks import Averages

# states are compared in the middle of a batch, which `state_dict` tells of
pytestmark = pytest.mark.filterwarnings("ignore:state_dict.. holds the run as the last step left it")

LM = ng.LevenbergMarquardt(start=0.03, per="block")
CASES: dict[str, Callable[[nn.Module], Any]] = {
    "kfac, adapted": lambda model: ng.kfac(model, CE, damping=LM, l2=1e-3, weight_decay=1e-2),
    "kfac, step refused": lambda model: ng.kfac(
        model, CE, 1e3, damping=LM, rule=ng.MeasuredLength(math.inf, math.inf), measure=False
    ),
    "ekfac": lambda model: ng.ekfac(model, CE),
    "diagonal": lambda model: ng.diagonal(model, CE, momentum=0.0),
    "online": lambda model: ng.online_ng(model, CE),
}
STEPS = 4  # the fifth is judged


def prepare(name: str, saved: Any) -> Any:
    """The optimizer before its fifth step, which measures, inverts and judges."""
    model = net()
    opt = CASES[name](model)
    if saved is None:
        train(opt, model, STEPS)
    else:
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
    return opt


@pytest.mark.parametrize("name", CASES)
def test_a_step_interrupted_at_any_line_happened_whole_or_not_at_all(name: str):
    saved, place = snapshot(prepare(name, None)), list(CASES).index(name)
    opt, _ = assert_whole_or_nothing(lambda: prepare(name, saved), 1 + 17 * place, 397, range(-60 + 2 * place, 1, 11))
    assert opt.state_report().refused == ("refused" in name)


@pytest.mark.parametrize("recipe", [*RECIPES, ng.hessian_free])
def test_a_batch_whose_step_was_interrupted_is_taken_anew(recipe: Any, monkeypatch: pytest.MonkeyPatch):
    """As by who runs a cell once more: gradients are cleared, and the loss is computed again."""

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    ends = []
    for interrupted in ((), (0, 2)):  # the first step, and one whose statistics are due
        model = net()
        opt = recipe(model, CE)
        for step in range(4):
            if step in interrupted:
                with monkeypatch.context() as patch:
                    patch.setattr("natgrad.optim.base.natural_step", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        iterate(opt, model)
            iterate(opt, model)
        ends.append(flat(model))
    assert torch.equal(*ends)


# nothing that is not finite


CHOICES = [
    {"momentum": momentum, **bound}
    for momentum in (0.9, 0.0)
    for bound in ({}, {"kl_share": math.inf}, {"max_kl": 1e-3})
]


@pytest.mark.parametrize(("recipe", "choices"), cross([ng.kfac], RECIPES[1:], CHOICES))
def test_a_batch_that_is_fitted_exactly_moves_nothing_by_itself(recipe: Any, choices: dict[str, float]):
    for first in (0, 2):  # from the first step on, and after others
        model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        opt = recipe(model, nn.MSELoss(), **choices)
        train(opt, model, first, X, X[:, :2])
        for _ in range(2):
            before = flat(model)
            iterate(opt, model, X, model(X).detach())
            assert is_finite(model)
            assert torch.equal(flat(model), before) or (choices["momentum"] > 0 and first > 0)
        assert opt.state_report().failures == 0


@pytest.mark.parametrize("recipe", [ng.kfac, ng.diagonal, ng.online_ng])
def test_a_value_head_that_starts_at_zero_learns_once_there_are_rewards(recipe: Any):
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    opt, rewards = recipe(model, nn.MSELoss()), torch.zeros(len(X), 1).to(X)
    train(opt, model, 7, X, rewards)
    assert is_finite(model)
    rewards[::4] = 1.0
    losses = train(opt, model, 60, X, rewards)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e300])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_that_is_not_finite_leaves_the_last_good_state(recipe: Any, factor: float, monkeypatch: Any):
    """Or that is too large for the dtype."""
    model = net() if factor != 1e300 else net().float()
    x, solve = X.to(next(model.parameters()).dtype), Averages.solve
    opt = recipe(model, CE, measure=False)
    train(opt, model, 3, x)
    kept, means = flat(model), [stack.mean for stack in opt._live.state.stacks.parts]

    with monkeypatch.context() as patch:
        patch.setattr(Averages, "solve", lambda *arguments: solve(*arguments) * factor)
        iterate(opt, model, x)
    assert torch.equal(flat(model), kept)
    assert all(s.mean is m for s, m in zip(opt._live.state.stacks.parts, means, strict=True))
    report = opt.state_report()
    assert (report.status, report.failures, report.step) == ("skipped", 1, 4)
    iterate(opt, model, x)
    assert opt.state_report().failures == 1
    assert not torch.equal(flat(model), kept)


def test_entries_that_are_infinite_on_purpose_do_not_stop_the_others():
    model = net()
    opt = ng.kfac(model, CE, weight_decay=0.01)
    with torch.no_grad():
        model[2].bias[2] = -math.inf  # a class that is switched off
    before = flat(model)
    iterate(opt, model, X, Y.clamp(max=1))
    assert opt.state_report().failures == 0
    assert torch.equal(before.isfinite(), flat(model).isfinite())
    assert not torch.equal(before, flat(model))


def test_ctrl_c_at_any_line_of_a_mark_leaves_none_for_later_passes():
    def run() -> bool:
        with mark_evaluation():
            return is_evaluating()

    with Interrupt(0) as whole:
        assert run()
    assert whole.seen > 8  # lines of the way in, the question and the way out
    for n in range(1, whole.seen + 1):
        with Interrupt(n) as cut:
            run()
        assert cut.seen == n, f"line {n} was not reached"
        assert not is_evaluating(), f"line {n}"
        assert run(), f"line {n}"


def test_ctrl_c_in_an_inner_mark_keeps_the_outer_one():
    def inner() -> None:
        with mark_evaluation():
            assert is_evaluating()

    with mark_evaluation():
        with Interrupt(0) as whole:
            inner()
        for n in range(1, whole.seen + 1):
            with Interrupt(n):
                inner()
            assert is_evaluating(), f"line {n}"
    assert not is_evaluating()


def test_a_thread_that_runs_in_a_lent_context_sees_the_mark():
    with mark_evaluation(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(contextvars.copy_context().run, is_evaluating).result()
        assert not pool.submit(is_evaluating).result()


# steps of the whole


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
def test_a_flat_step_interrupted_at_any_line_happened_whole_or_not_at_all(name: str) -> None:
    first = WHOLE[name](net())
    iterate(first, first.model, X, Y)
    saved = snapshot(first)

    def prepare() -> Any:
        model = net()
        opt = WHOLE[name](model)
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        return opt

    place = list(WHOLE).index(name)
    _, lines = assert_whole_or_nothing(prepare, 1 + 101 * place, 2003, range(-50 + 2 * place, 1, 10))
    assert lines > 100


BATCHES: dict[str, Callable[[nn.Module], Any]] = {
    **{recipe.__name__: lambda model, recipe=recipe: recipe(model, CE) for recipe in BLOCK_RECIPES},
    "hessian_free": lambda model: ng.hessian_free(model, CE),
    "natgrad_cg": lambda model: ng.natgrad_cg(model, CE),
    "sampled": WHOLE["sampled labels, warm start"],
    "remembered": WHOLE["remembered"],
}


@pytest.mark.parametrize(
    ("name", "event"), [*((n, "backward") for n in BATCHES), ("kfac", "loss"), ("sampled", "loss")]
)
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


@pytest.mark.parametrize(("trouble", "steps"), cross(["parameters", "state"], ["interrupt"], [0, 1]))
def test_guarded_steps_of_any_optimizer_are_taken_or_leave_nothing(trouble: str, steps: int) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p], 0.1)

    def step(slope: float = 1.0) -> None:
        p.grad = torch.full_like(p, slope)
        optimizer.step()

    def run() -> None:
        step(1e30 if trouble == "state" else 1.0)  # whose square overflows: the step is finite, 0
        p.data[0] = math.inf if trouble == "parameters" else p.data[0]
        if trouble == "interrupt":
            raise KeyboardInterrupt

    for _ in range(steps):
        assert guard_steps(optimizer, step) == (None, True)
    assert bool((p < 1).all()) == (steps > 0)
    before = copy.deepcopy((p.data, optimizer.state_dict()))
    with suppress(KeyboardInterrupt):
        assert guard_steps(optimizer, run) == (None, False)
    assert same((p.data, optimizer.state_dict()), before)
