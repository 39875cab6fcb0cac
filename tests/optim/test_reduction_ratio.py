"""Levenberg-Marquardt in the structured optimizers: the loss after a step beside what the quadratic model promised."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_state import blocks_of, change_state
from models import F64, Assembled, assert_close, build_seeded, draw
from optim_models import BLOCK_RECIPES as RECIPES
from optim_models import CE, X, Y, deep, flat, flat_gradient, global_random_state_is_untouched, iterate, net, same
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.constants import JUDGED_EVERY
from natgrad.optim.objective import Replay

LM = partial(ng.LevenbergMarquardt, per="block")
EXACT = ng.ExactLabels()
WILD: dict[str, Any] = {"lr": 300.0, "measure": False, "momentum": 0.0, "rule": ng.MeasuredLength(math.inf, math.inf)}


def value(model: nn.Module, x: Any = X) -> float:
    """The loss as it is."""
    return float(CE(model(x), Y).detach())


def damping_term(opt: Any, model: nn.Module, step: Tensor) -> float:
    """damping |step|^2 / 2, every block with its own."""
    parts = ng.Space(ng.trainable(model)).unflatten(step)
    levels = {name: block.level for block in blocks_of(opt) for name in block.layout.names}
    return 0.5 * sum(float(levels[name] * part.square().sum()) for name, part in parts.items())


def judged_next(opt: Any) -> Any:
    """The same optimizer, whose next step is judged."""
    change_state(opt, "pace", judged=-JUDGED_EVERY)
    return opt


@pytest.mark.parametrize("rule", [None, ng.MeasuredLength()])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_ratio_is_the_true_change_over_the_promised_one(recipe: Callable[..., Any], rule: Any):
    """The form is that of the pass where the step has the measured direction, which no layer's bound has bent."""
    model = net()
    opt = judged_next(recipe(model, CE, damping=LM(start=0.05), estimate=EXACT, momentum=0.5, rule=rule))
    metric = ng.fisher(model, CE).at(ng.trainable(model), X)
    before, loss = flat(model), value(model)
    iterate(opt, model)
    step, report = flat(model) - before, opt.state_report()
    promised = float(step @ flat_gradient(model)) + report.kl + damping_term(opt, model, step)
    assert report.ratio == pytest.approx((value(model) - loss) / promised, rel=1e-9)
    assert opt.param_groups[0]["damping"] == LM().update(0.05, report.ratio)
    exact = 0.5 * step @ metric.mv(step)
    assert 0.5 * exact < report.kl < 2 * exact or opt._live.state.length.excess <= 1
    if rule is not None and opt._live.state.length.excess > 1:
        assert_close(torch.tensor(report.kl, dtype=F64), exact, 1e-8)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_the_ratio_of_a_quadratic_loss_is_one(l2: float, reduction: str):
    model, targets, criterion = linear(), draw(len(X), 3, seed=1), nn.MSELoss(reduction=reduction)
    free = {"kl_share": math.inf, "max_kl": math.inf}
    opt = ng.diagonal(model, criterion, damping=LM(0.01), estimate=EXACT, l2=l2, **free)
    iterate(judged_next(opt), model, X, targets)
    assert opt._live.state.length.excess > 1  # the measured form is the step's, not the blocks'
    # the model of the loss has the damping, the loss has not
    assert 1 < opt.state_report().ratio < 1.1
    assert opt.param_groups[0]["damping"] == pytest.approx(0.01 * 2 / 3)


def test_every_fifth_step_is_judged_by_one_evaluation(monkeypatch: pytest.MonkeyPatch):
    model, evaluations = net(), []
    evaluate = Replay._evaluate
    monkeypatch.setattr(Replay, "_evaluate", lambda self, step: evaluations.append(1) or evaluate(self, step))
    opt = ng.kfac(model, CE, damping=LM(0.1))
    counts = []
    for _ in range(3 * JUDGED_EVERY):
        iterate(opt, model)
        counts.append(len(evaluations))
    assert counts == [n // JUDGED_EVERY for n in range(1, 3 * JUDGED_EVERY + 1)]
    assert opt.param_groups[0]["damping"] != 0.1


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal])
def test_a_step_that_raises_the_loss_is_not_taken(recipe: Callable[..., Any]):
    model = net()
    opt = judged_next(recipe(model, CE, damping=LM(0.1, floor=1e-3), weight_decay=0.1, **WILD))
    before = flat(model)
    iterate(opt, model)
    report = opt.state_report()
    assert torch.equal(flat(model), before)
    assert (report.status, report.refused, report.failures, report.rate) == ("refused", 1, 0, 0.0)
    raised = opt.param_groups[0]["damping"]
    assert raised == pytest.approx(0.15)
    inverses = [block.inverse.dense() for block in blocks_of(opt)]
    change_state(opt, "pace", updated=opt._live.state.step)  # nothing new is read
    opt._flow.reader.arm(False)
    iterate(opt, model)  # judged again, with new inverses
    assert not any(torch.equal(block.inverse.dense(), old) for block, old in zip(blocks_of(opt), inverses, strict=True))
    assert opt.param_groups[0]["damping"] != raised


def linear() -> nn.Module:
    return build_seeded(lambda: nn.Linear(X.shape[1], 3))


def test_a_step_whose_loss_is_not_finite_is_not_taken():
    """Logits that overflow a little away from the start."""
    start = linear().weight.detach()
    model = Assembled(
        lambda m, x: m.linear(x) * torch.exp(1e6 * (m.linear.weight - start).square().sum()), linear=linear()
    )
    opt = judged_next(ng.kfac(model, CE, damping=LM(0.1)))
    before = flat(model)
    iterate(opt, model)
    assert torch.equal(flat(model), before)
    assert math.isnan(opt.state_report().ratio)
    assert opt.param_groups[0]["damping"] == pytest.approx(0.15)


def test_micro_batches_are_judged_together_by_the_closure():
    whole, parts = net(), net()
    rule = ng.MeasuredLength()  # takes both along the same path, refusals included
    one, many = (ng.kfac(m, CE, damping=LM(0.05), estimate=EXACT, measure=False, rule=rule) for m in (whole, parts))
    readings, read = [], many._read
    many._read = lambda *a: readings.append(1) or read(*a)

    def closure() -> Tensor:
        many.zero_grad()
        total = torch.zeros((), dtype=F64)
        for rows in (slice(0, 6), slice(6, 8)):
            loss = many.loss(parts(X[rows]), Y[rows]) * len(X[rows]) / len(X)
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(JUDGED_EVERY):
        iterate(one, whole)
        many.step(closure)
    assert len(readings) == 2 * JUDGED_EVERY  # none by the second call
    assert many.state_report().ratio == pytest.approx(one.state_report().ratio, rel=1e-9)
    assert_close(flat(parts), flat(whole), 1e-10)


def test_several_losses_without_a_closure_are_refused():
    model = net()
    opt = judged_next(ng.kfac(model, CE, damping=LM(0.05)))
    for rows in (slice(0, 6), slice(6, 8)):
        opt.loss(model(X[rows]), Y[rows]).backward()
    with pytest.raises(ValueError, match=r"2 losses .*optimizer\.step\(closure\)"):
        opt.step()


def test_judging_leaves_the_users_model_alone():
    model = build_seeded(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    ).to(F64)
    opt = judged_next(ng.kfac(model, CE, damping=LM(0.05)))
    opt.loss(model(X), Y).backward()
    gradient, buffers = flat_gradient(model), deep(dict(model.named_buffers()))
    assert global_random_state_is_untouched(opt.step)
    assert opt.state_report().ratio is not None
    assert torch.equal(flat_gradient(model), gradient)
    assert same(buffers, dict(model.named_buffers()))


def test_the_groups_numbers_are_what_is_adapted():
    model = net()
    first, *rest = model.parameters()
    opt = judged_next(
        ng.kfac(model, CE, damping=LM(0.05), params=[{"params": [first], "damping": 0.4}, {"params": rest}])
    )
    opt.param_groups[1]["damping"] = 0.2  # a schedule did that
    iterate(opt, model)
    ratio = opt.state_report().ratio
    assert [g["damping"] for g in opt.param_groups] == [LM().update(d, ratio) for d in (0.4, 0.2)]
    plain = ng.kfac(net(), CE, damping=ng.Relative(0.2, per="block"))
    assert plain.param_groups[0]["damping"] == 0.2
    assert not plain._flow.choices.is_judged(plain._live.state)


def test_a_loss_that_was_rounded_is_computed_again():
    model = build_seeded(lambda: nn.Linear(3, 3)).float()
    opt = judged_next(ng.kfac(model, CE, damping=LM(0.05), max_kl=1e-4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = opt.loss(model(X.float()), Y)
    before = value(model, X.float())
    assert float(loss.detach()) != before
    loss.backward()
    start, gradient = flat(model), flat_gradient(model)
    opt.step()
    step = flat(model) - start
    promised = float(step @ gradient) + opt.state_report().kl + damping_term(opt, model, step)
    assert opt.state_report().ratio == pytest.approx((value(model, X.float()) - before) / promised, rel=0.05)
