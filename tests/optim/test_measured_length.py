"""How far a structured optimizer follows its direction: measured against the metric itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import read_pass
from models import CASES, F64, Assembled, assert_close, build_seeded, draw
from optim_models import CE, X, Y, dropout_net, flat, flat_gradient, iterate, net
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.constants import FALLS_TO, KL_SLACK
from natgrad.optim.block_step import measure_excess, pool_form, squares_and_sums
from natgrad.optim.processes import Processes
from natgrad.optim.reading import Reading
from natgrad.optim.state import Length

WARM = ng.MeasuredLength().warm

RECIPES = [ng.kfac, ng.ekfac, ng.diagonal, ng.unitwise]
EXACT = ng.ExactLabels()


LAYERS = ["mlp", "linear over positions", "conv1d", "conv2d", "odd convolutions", "group norm", "frozen", "twice used"]


def linear() -> nn.Module:
    """Outputs linear in the parameters: the quadratic model's form is exact for steps of any length."""
    return build_seeded(lambda: nn.Linear(X.shape[1], 3))


def move(opt: Any, model: nn.Module, x: Any = X, y: Any = Y) -> Tensor:
    """One step of the loop."""
    before = flat(model)
    iterate(opt, model, x, y)
    return flat(model) - before


def measure_form(opt: Any, outputs: Tensor, targets: Any, vector: Tensor, params: Any) -> Tensor:
    """The form along a step of all parameters, from what the optimizer reads in one pass."""
    opt._live.record.record_loss(opt.criterion, outputs, targets, outputs.sum())
    reading, step = read_pass(opt, outputs, targets), ng.Space(params).unflatten(vector)
    assert set(squares_and_sums(reading, step, params)[2]) == set(params)
    return pool_form(reading, step, {}, params, Processes())[0] / reading.all_rows


@pytest.mark.parametrize("name", LAYERS)
def test_the_form_along_a_step_is_the_metrics(name: str):
    case = CASES[name]
    model, params = case.make()
    metric = ng.fisher(model, case.family).at(params, case.inputs)
    vector, opt = draw(metric.size, seed=3), ng.kfac(model, case.family, estimate=EXACT)
    outputs = model(case.inputs)
    targets = case.family.sample(outputs, torch.Generator().manual_seed(0))
    form = measure_form(opt, outputs, targets, vector, params)
    assert_close(form, vector @ metric.mv(vector), 1e-9)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("criterion", [CE, nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss()])
def test_steps_end_at_the_minimum_of_the_true_quadratic_model(recipe: Callable[..., Any], criterion: nn.Module):
    model = linear()
    targets = draw(len(X), 3) if isinstance(criterion, nn.MSELoss) else Y
    metric = ng.fisher(model, criterion).at(ng.trainable(model), X)
    rule = ng.MeasuredLength(math.inf, math.inf)
    opt = recipe(model, criterion, estimate=EXACT, damping=1e-3, rule=rule)
    step = move(opt, model, X, targets)
    gradient = flat_gradient(model) / (len(X) if criterion.reduction == "sum" else 1)
    if opt.state_report().rate < 1:  # at 1, the step is the damped one of the blocks
        assert_close(-step @ gradient, step @ metric.mv(step), 1e-8)
    nats = 3 if isinstance(criterion, nn.MSELoss) else 1
    assert step @ metric.mv(step) <= -step @ gradient * (1 + 1e-8)
    assert opt.state_report().kl >= nats * 0.5 * float(step @ metric.mv(step)) * (1 - 1e-8)


def test_blocks_that_promise_too_little_are_seen_through():
    layers = [nn.Linear(3, 3, bias=False) for _ in range(4)]  # that all do the same
    for layer in layers:
        nn.init.eye_(layer.weight)
    model = nn.Sequential(*layers).to(F64)
    x, y = draw(16, 3), draw(16, 3, seed=1)
    opt = ng.kfac(model, nn.MSELoss(), estimate=EXACT, momentum=0.0, rule=ng.MeasuredLength(math.inf, math.inf))
    metric = ng.fisher(model, nn.MSELoss()).at(ng.trainable(model), x)
    step = move(opt, model, x, y)
    assert opt._live.state.length.excess > 2
    assert_close(-step @ flat_gradient(model), step @ metric.mv(step), 1e-8)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bound_on_the_kl_is_met(recipe: Callable[..., Any]):
    for bound in ({"max_kl": 1e-5}, {"kl_share": 1e-5}):
        model = net()
        opt = recipe(model, CE, **bound, estimate=EXACT)
        metric = ng.fisher(model, CE).at(ng.trainable(model), X)
        loss = float(CE(model(X), Y).detach())
        step = move(opt, model)
        allowed = 1e-5 * (loss if "kl_share" in bound else 1.0) / WARM
        allowed *= 1 if "kl_share" in bound else 1 - KL_SLACK
        assert_close(torch.tensor(opt.state_report().kl), torch.tensor(allowed), 1e-4)
        assert 0.5 * step @ metric.mv(step) <= allowed * (1 + 1e-4)
        if opt._live.state.length.excess > 1:
            assert_close(0.5 * step @ metric.mv(step), torch.tensor(allowed, dtype=F64), 1e-4)


def test_the_rate_scales_what_was_found_and_never_beyond_the_bound():
    steps = []
    for lr in (1.0, 0.1, 10.0):
        model = linear()
        steps.append(move(ng.kfac(model, CE, lr, estimate=EXACT, max_kl=1e-5), model))
    assert_close(steps[1], 0.1 * steps[0], 1e-6)
    assert_close(steps[2], steps[0], 1e-6)  # the bound was met already


def test_parameters_without_a_layer_are_measured_by_their_summed_scores():
    scale = nn.Parameter(torch.ones(3, dtype=F64))
    model = Assembled(lambda m, x: m.scale * m.linear(x), scale=scale, linear=linear())
    params = ng.trainable(model)
    vector = torch.cat([draw(3), torch.zeros(12, dtype=F64)])
    expected = vector @ ng.fisher(model, CE).at(params, X).mv(vector)
    opt = ng.kfac(model, CE, estimate=ng.Sampled(800))
    form = measure_form(opt, model(X), Y, vector, params)
    assert_close(form, expected, 0.2)  # 800 squares of normal draws: 5 % standard deviation


def test_measuring_makes_no_pass_of_its_own():
    model, calls = dropout_net(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    opt = ng.kfac(model, CE)
    for _ in range(3):
        move(opt, model)
    assert len(calls) == 3
    assert opt._live.state.length.excess is not None


def test_outputs_may_be_rearranged_before_the_loss():
    model, x, y = linear(), X.reshape(2, 4, -1), Y.reshape(2, 4)
    params = ng.trainable(model)
    metric = ng.fisher(model, CE).at(params, X)  # of the eight positions
    vector = draw(metric.size)
    opt = ng.kfac(model, CE, estimate=EXACT)
    form = measure_form(opt, model(x).transpose(1, 2), y, vector, params)
    assert_close(form, vector @ metric.mv(vector), 1e-9)


def test_losses_that_can_be_negative_get_a_bound_in_nats():
    model = linear()
    opt = ng.kfac(model, ng.Gaussian(0.01), kl_share=0.01)  # its loss is negative where it fits
    for _ in range(3):
        move(opt, model, X, model(X).detach() + 1e-3)
        assert opt.state_report().loss < 0
        assert opt.state_report().kl <= 0.01 * (1 + 1e-6)


def learn_ratio(length: Length, form: float, promised: float = 1.0) -> Length:
    """What is known after a measurement, made up as one parameter's summed score."""
    step = {"w": torch.ones((), dtype=F64)}
    sample = Reading([], {}, 1, [], ({"w": torch.tensor(form, dtype=F64).sqrt()},))
    return measure_excess(length, sample, step, {"w": torch.tensor(promised, dtype=F64)}, step, Processes())


def assert_ratio(length: Length, expected: float) -> None:
    assert length.excess is not None
    assert float(length.excess) == pytest.approx(expected)


def test_the_ratio_rises_at_once_and_falls_slowly():
    assert Length().excess is None
    length = learn_ratio(Length(), 8.0)
    assert_ratio(length, 8.0)
    length = learn_ratio(length, 20.0)
    assert_ratio(length, 20.0)
    assert not length.falls
    length = learn_ratio(length, 2.0)
    assert_ratio(length, FALLS_TO * 20)
    assert length.falls  # a tenth of what it was: the next pass is asked again
    assert_ratio(learn_ratio(length, 18.0), 18.0)
    assert_ratio(learn_ratio(Length(), 0.2), 0.2)


def test_a_form_that_is_not_finite_shortens_the_next_steps_and_one_of_zero_says_nothing():
    length = learn_ratio(Length(), 2.0)
    assert_ratio(learn_ratio(length, 0.0), 2.0)
    assert_ratio(learn_ratio(length, 4.0, promised=0.0), 2.0)
    length = learn_ratio(length, math.inf)
    assert_ratio(length, 20.0)
    assert_ratio(learn_ratio(length, 30.0), 30.0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_is_as_long_as_the_metric_of_today_says_where_the_averages_remember_a_larger_one(recipe: Any):
    model = build_seeded(lambda: nn.Linear(3, 3, bias=False))
    x, y = torch.eye(3, dtype=F64).repeat(3, 1), draw(9, 3)
    rule = ng.MeasuredLength(math.inf, math.inf)
    due = {"update_every": 1, "invert_every": 1}
    opt = recipe(model, nn.MSELoss(), decay=0.999, estimate=EXACT, momentum=0.0, damping=1e-8, rule=rule, **due)
    for _ in range(4):
        move(opt, model, x, y)
    metric = ng.fisher(model, nn.MSELoss()).at(ng.trainable(model), 0.1 * x)
    for _ in range(10):
        step = move(opt, model, 0.1 * x, y)
        gradient = flat_gradient(model)
        # not beyond the minimum along it, but for what the averages forget between two measurements
        assert step @ metric.mv(step) <= -1.5 * step @ gradient
    assert opt.state_report().rate > 10
