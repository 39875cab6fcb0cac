"""What an optimizer says of its last steps follows from their numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from optim_models import CE, X, Y, net
from torch import nn

import natgrad as ng
from natgrad.optim import StateReport
from natgrad.optim.explanations import KEPT, Steps, explain_steps
from natgrad.rules import NoiseAware, Rate, SpectralDescent


def run(opt: ng.NaturalGradient | ng.StructuredNaturalGradient, steps: int = 5, x: torch.Tensor = X) -> str:
    for _ in range(steps):
        opt.zero_grad()
        opt.loss(opt.model(x), Y).backward()
        opt.step()
    return opt.explain()


def explain(reports: list[StateReport], bounds: list[float] | None = None, **settings) -> str:
    chosen = {"rule": Rate(), "lr": 1.0, "settings": {}} | settings
    return explain_steps(Steps(reports, bounds or [math.inf] * len(reports), **chosen))


def test_the_kl_bound_is_said_to_cut_the_steps_that_it_cut():
    """A small share of the loss binds at every step, and each moves what the rule allows then."""
    opt = ng.kfac(net(), CE, rule=ng.MeasuredLength(kl_share=1e-3, warm=1))
    text = run(opt, 6)
    assert "The KL bound cut 6 of 6 steps" in text
    assert "kl_share (now 0.001)" in text
    report = opt.state_report()
    assert 0.5 < report.kl / opt._kl_bound(report) <= 1 + 1e-6
    assert opt._kl_bound(report) == pytest.approx(1e-3 * report.loss, rel=1e-6)


def test_no_bound_is_blamed_for_whole_steps():
    text = run(ng.natgrad_cg(net(), CE))
    assert "Steps were taken whole" in text
    assert "bound cut" not in text


@pytest.mark.parametrize("lr", [0.1, 1.0])
def test_a_trust_region_is_the_bound(lr: float):
    opt = ng.NaturalGradient(model := net(), ng.fisher(model, CE), lr=100 * lr, rule=ng.TrustRegion(1e-4))
    assert "The KL bound cut 5 of 5 steps: it was 0.0001 nats" in run(opt)


def test_before_the_first_step():
    assert ng.kfac(net(), CE).explain().startswith("No step yet")


def test_steps_that_were_left_out_are_counted():
    opt = ng.kfac(net(), CE)
    run(opt, 3)
    bad = X.clone()
    bad[0] = math.nan
    text = run(opt, 1, bad)
    assert "1 of the last 4 steps were left out" in text
    assert "on_trouble" in text


def test_no_more_than_the_last_steps_are_looked_at():
    opt = ng.kfac(net(), CE)
    text = run(opt, KEPT + 5)
    assert f"over the last {KEPT} steps" in text
    assert f"Step {KEPT + 5}:" in text


def test_a_rising_loss_is_said_to_rise():
    reports = [StateReport(step=i, loss=1.0 + i, rate=1.0, kl=0.1, gradient=1.0) for i in range(1, 7)]
    assert "the loss rises to 6.5, from 2.5" in explain(reports)
    assert "Try: a lower lr" in explain(reports)
    assert "the loss falls to 2.5, from 6.5" in explain(reports[::-1])


def test_a_loss_that_stands_still_at_no_gradient():
    reports = [StateReport(step=i, loss=1.0, rate=1.0, gradient=0.0) for i in range(1, 5)]
    assert "The gradient is zero" in explain(reports)


def test_what_the_ratio_and_the_solver_say():
    reports = [
        StateReport(
            step=i, loss=1.0 / i, ratio=0.1, refused=i, status="max_steps", residual=0.5, outside=0.95, damping=3.0
        )
        for i in range(1, 6)
    ]
    text = explain(reports)
    assert "less than the quadratic model promises (ratio 0.1)" in text
    assert "4 of the last 5 steps were not taken" in text
    assert "stopped at its limit in 5 of 5 steps" in text
    assert "95% of the gradient is left to the damping" in text


def test_steps_shortened_by_the_measured_metric():
    reports = [StateReport(step=i, loss=1.0 / i, rate=0.25, excess=4.0, kl=1e-6) for i in range(1, 6)]
    text = explain(reports, [0.1] * 5)
    assert "5 of 5 steps were shortened to 0.25 of the proposal, where the quadratic model is least" in text
    assert "bound cut" not in text


def test_steps_shortened_by_layers():
    reports = [StateReport(step=i, loss=1.0 / i, rate=0.2, kl=1e-6) for i in range(1, 6)]
    text = explain(reports, [0.1] * 5, rule=NoiseAware())
    assert "5 of 5 steps were shortened to about 0.2 of the proposal" in text
    assert "NoiseAware(move=0.2)" in text


@pytest.mark.parametrize(("most", "named"), [(1e-6, "max_kl (now 1e-06)"), (10.0, "kl_share (now 0.1)")])
def test_the_bound_that_cut_is_the_one_to_raise(most: float, named: str):
    """The bound is the lesser of max_kl and a share of the loss: to raise the other changes nothing."""
    bounds = [min(most, 0.1)] * 6
    reports = [StateReport(step=i, loss=1.0, rate=0.1, kl=bounds[0], gradient=1.0) for i in range(1, 7)]
    text = explain(reports, bounds, settings={"max_kl": most, "kl_share": 0.1})
    assert "cut 6 of 6 steps" in text
    assert f"a larger {named}" in text
    assert "schedule" not in text


def test_the_bound_of_targets_in_units_of_their_own_is_a_share_of_the_loss():
    """The usual max_kl counts in units of the errors there, and so does what is said of it."""
    torch.manual_seed(0)
    opt = ng.kfac(model := nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), nn.MSELoss())
    x = torch.randn(20, 4)
    for _ in range(8):
        opt.zero_grad()
        opt.loss(model(x), 1e4 * (5 + x[:, :1])).backward()
        opt.step()
    report = opt.state_report()
    assert report.kl <= opt._kl_bound(report) * (1 + 1e-5)
    assert opt._kl_bound(report) > 1e3


@pytest.mark.parametrize("lr", [0.0, 1e-6])
def test_a_rate_at_which_nothing_moves_is_what_to_change(lr: float):
    """Advice on noise, damping and bounds would lead away from it."""
    text = run(ng.kfac(net(), CE, lr=lr))
    assert "stands still" in text
    assert f"lr is {'0' if lr == 0 else '1e-06'}: " in text
    assert "Try:" not in text


def test_damping_that_leaves_hardly_a_step_is_what_to_change():
    text = run(ng.kfac(net(), CE, damping=1e6), 6)
    assert "A step moves the model by about" in text
    assert "Try: less damping or a larger lr" in text
    assert "schedule" not in text


@pytest.mark.parametrize("rule", [NoiseAware(), SpectralDescent()])
def test_spectral_steps_are_not_called_short(rule):
    """Their length is relative to a direction of their own, not to the whole of a natural step."""
    reports = [StateReport(step=i, loss=1.0 / i, rate=0.05, excess=3.0, kl=1e-6) for i in range(6, 12)]
    text = explain(reports, [0.1] * 6, rule=rule, turned=3 if rule.turns_at else -1)
    assert "of the proposal" not in text
    assert ("since step 3" in text) == bool(rule.turns_at)
    short = [replace(report, rate=0.02) for report in reports]
    assert "6 of 6 steps were shortened to about 0.02" in explain(short, [0.1] * 6, rule=rule, turned=3)


def test_a_rate_that_falls_by_itself_asks_for_no_schedule():
    reports = [StateReport(step=i, loss=1.0, rate=0.05, gradient=1.0, kl=1e-6) for i in range(6, 12)]
    falling = NoiseAware(spectral=SpectralDescent(falls_after=20))
    assert 'rate="auto"' in explain(reports, [0.1] * 6, rule=NoiseAware(), turned=3)
    text = explain(reports, [0.1] * 6, rule=falling, turned=3)
    assert "falls by itself" in text
    assert "schedule" not in text


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg])
def test_an_optimizer_shows_its_choices(recipe):
    opt = recipe(nn.Linear(3, 2), CE)
    text = repr(opt)
    assert "model: Linear, 8 parameters" in text
    assert f"structure: {opt.structure}" in text
    assert f"rule: {opt.rule}" in text
    assert "Parameter Group 0" in text
    assert "lr: " in text
