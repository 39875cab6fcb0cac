"""A structured step happens whole or not at all, and never writes a number that is not finite."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import build_seeded
from optim_models import BLOCK_RECIPES as RECIPES
from optim_models import CE, Interrupt, X, Y, flat, iterate, net, same, snapshot
from torch import nn

import natgrad as ng
from natgrad.ground.pure import is_evaluating, mark_evaluation

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


def prepare(name: str, saved: Any) -> tuple[Any, nn.Module]:
    """The optimizer before its fifth step, which measures, inverts and judges."""
    model = net()
    opt = CASES[name](model)
    if saved is None:
        for _ in range(STEPS):
            iterate(opt, model)
    else:
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
    return opt, model


@pytest.mark.parametrize("name", CASES)
def test_a_step_interrupted_at_any_line_happened_whole_or_not_at_all(name: str):
    saved = snapshot(prepare(name, None)[0])

    def interrupt_step(n: int) -> tuple[Any, Any, Interrupt]:
        opt, model = prepare(name, saved)
        opt.zero_grad()
        opt.loss(model(X), Y).backward()
        before = snapshot(opt)
        with Interrupt(n) as interrupt:
            opt.step()
        return opt, before, interrupt

    opt, _, count = interrupt_step(0)
    whole, lines = snapshot(opt), count.seen
    assert opt.state_report().refused == ("refused" in name)
    start = list(CASES).index(name)
    outcomes = set()
    for n in [*range(1 + 17 * start, lines - 60, 83), *range(lines - 60 + start, lines + 1, 5)]:  # written at the end
        opt, before, _ = interrupt_step(n)
        now = snapshot(opt)
        outcomes.add("nothing" if same(now, before) else "all" if same(now, whole) else f"a part, line {n}")
        if n <= lines - 3:  # in the last ones the step has returned already
            opt.step()
            assert same(snapshot(opt), whole), "called again, it takes that step, once"
        assert torch.isfinite(iterate(opt, opt.model))
        assert bool(flat(opt.model).isfinite().all())
    assert outcomes == {"nothing", "all"}


# nothing that is not finite


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("bound", [{}, {"kl_share": math.inf}, {"max_kl": 1e-3}])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_that_is_fitted_exactly_moves_nothing_by_itself(recipe: Any, bound: Any, momentum: float):
    for first in (0, 2):  # from the first step on, and after others
        model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        opt = recipe(model, nn.MSELoss(), momentum=momentum, **bound)
        for step in range(first + 2):
            before = flat(model)
            iterate(opt, model, X, model(X).detach() if step >= first else X[:, :2])
            assert bool(flat(model).isfinite().all())
            if step >= first and (momentum == 0 or first == 0):
                assert torch.equal(flat(model), before)
        assert opt.state_report().failures == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_value_head_that_starts_at_zero_learns_once_there_are_rewards(recipe: Any):
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    opt, rewards = recipe(model, nn.MSELoss()), torch.zeros(len(X), 1).to(X)
    for _ in range(7):
        iterate(opt, model, X, rewards)
    start = flat(model)
    assert bool(start.isfinite().all())
    rewards[::4] = 1.0
    losses = [float(iterate(opt, model, X, rewards)) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(flat(model), start)


def spoil(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one part of a step give what is not finite, or too large for the dtype."""
    factor = {"inf": math.inf, "nan": math.nan, "overflow": 1e300}[what]
    direction = ng.optim.blocks.Averages.direction

    def spoil_direction(*arguments: Any) -> Any:
        steps, slopes = direction(*arguments)
        return {name: step * factor for name, step in steps.items()}, slopes

    monkeypatch.setattr("natgrad.optim.blocks.Averages.direction", spoil_direction)


@pytest.mark.parametrize("what", ["inf", "nan", "overflow"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_that_is_not_finite_leaves_the_last_good_state(recipe: Any, what: str, monkeypatch: Any):
    model = net().double() if what != "overflow" else net().float()
    x = X.to(next(model.parameters()).dtype)
    opt = recipe(model, CE, measure=False)
    for _ in range(3):
        iterate(opt, model, x)
    kept, means = flat(model), [stack.mean for stack in opt._live.state.stacks.parts]
    with monkeypatch.context() as patch:
        spoil(what, patch)
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
