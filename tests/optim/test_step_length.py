"""How long a step is: trust region, line search, Levenberg-Marquardt damping."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from models import draw, mlp
from optim_models import CE, X, Y, iterate, net
from torch import Tensor, nn

import natgrad as ng

T = draw(8, 2, seed=5)
MSE = nn.MSELoss()


def true_kl(model: nn.Module, twin: nn.Module, x: Tensor) -> float:
    """KL between the old and the new outputs, nats per example."""
    with torch.no_grad():
        return float(ng.Categorical().kl(twin(x), model(x)).mean())


def test_a_trust_region_moves_its_radius_in_nats() -> None:
    errors = []
    for radius in (1e-4, 1e-6, 1e-8):
        model = net()
        twin = copy.deepcopy(model)
        opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=100.0, damping=0.01, rule=ng.TrustRegion(radius))
        iterate(opt, model, X, Y)
        assert opt.state_report().kl == pytest.approx(radius, rel=1e-10)
        errors.append(abs(true_kl(model, twin, X) / radius - 1))
    # KL is quadratic up to a third-order term: a hundredth of the radius, a tenth of the error
    assert errors[0] < 0.02
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)
    assert errors[2] == pytest.approx(errors[1] / 10, rel=0.2)


@pytest.mark.parametrize(
    ("reduction", "own_loss"), [("mean", True), ("mean", False), ("sum", True)]
)  # sums need opt.loss
def test_the_kl_of_an_entrywise_mean_is_in_nats_per_example(own_loss: bool, reduction: str) -> None:
    # MSELoss averages over entries; nats are those of N(outputs, 1/2), summed over the entries of an example
    model, criterion = mlp(3, 4, 2), nn.MSELoss(reduction=reduction)
    twin = copy.deepcopy(model)
    opt = ng.NaturalGradient(model, ng.fisher(model, criterion), lr=1.0, damping=0.01, rule=ng.TrustRegion(1e-7))
    loss = opt.loss(model(X), T) if own_loss else criterion(model(X), T)
    loss.backward()
    opt.step()
    with torch.no_grad():
        kl = float((model(X) - twin(X)).square().sum(1).mean())  # |d|^2 / (2 * 1/2)
    assert opt.state_report().kl == pytest.approx(1e-7, rel=1e-10)
    assert kl == pytest.approx(1e-7, rel=1e-2)


@pytest.mark.parametrize("lr", [0.01, 1.0, 30.0, 300.0])
@pytest.mark.parametrize("rule", [ng.LineSearch(backtracks=20), ng.TrustRegion(50.0, backtracks=10)], ids=repr)
def test_a_rule_that_looks_at_the_loss_never_raises_it(rule: ng.Rule, lr: float) -> None:
    model = net()
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=lr, damping=1e-3, rule=rule)
    losses = []
    for _ in range(8):
        losses.append(float(CE(model(X), Y).detach()))
        iterate(opt, model, X, Y)
    assert all(after <= before + 1e-15 for before, after in pairwise(losses))
    assert losses[-1] < losses[0]


class Cliff(nn.Module):
    """Outputs that are not a number beyond w = 1, as behind a logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w / (1 - self.w).sqrt() * (1 - self.w).sqrt()


def test_a_line_search_steps_back_from_a_cliff() -> None:
    model = Cliff()
    x = torch.ones(2, 1).double()
    opt = ng.NaturalGradient(model, ng.fisher(model, MSE), lr=1.0, damping=0.0, rule=ng.LineSearch())
    iterate(opt, model, x, 3 * x)  # the full step leads to w = 3, half of it to 1.5, a quarter to 0.75
    assert float(model.w.detach()) == pytest.approx(0.75, rel=1e-12)
    assert opt.state_report().rate == pytest.approx(0.25, rel=1e-12)


def test_a_step_that_ends_in_nan_is_rejected_and_raises_the_damping() -> None:
    model = Cliff()
    x = torch.ones(2, 1).double()
    opt = ng.NaturalGradient(
        model, ng.fisher(model, MSE), lr=1.0, damping=ng.LevenbergMarquardt(start=0.01), rule=ng.Rate()
    )
    iterate(opt, model, x, 3 * x)
    told = opt.state_report()
    assert float(model.w.detach()) == 0.0
    assert math.isnan(told.ratio)
    assert told.kl == 0.0
    for _ in range(40):
        iterate(opt, model, x, 3 * x)
    assert 0.0 < float(model.w.detach()) < 1.0  # once the damping is high enough, it moves


def test_a_step_that_lowers_the_loss_is_taken_whatever_the_model_thought() -> None:
    # beyond twice the Newton step the quadratic model promises a rise; the loss knows better
    model = net()
    opt = ng.NaturalGradient(
        model, ng.fisher(model, CE), lr=10.0, damping=ng.LevenbergMarquardt(start=1.0), rule=ng.LineSearch()
    )
    first = float(CE(model(X), Y).detach())
    iterate(opt, model, X, Y)
    assert float(CE(model(X), Y).detach()) < first
    assert opt.state_report().rate > 0.2


@pytest.mark.parametrize("lr", [0.1, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("linear_model", [True, False])
def test_on_a_quadratic_the_ratio_is_one_or_one_minus_half_the_rate(lr: float, linear_model: bool) -> None:
    # linear model, squared loss, exact solve, no damping; eq. 30 predicts by the slope alone
    model = mlp(3, 2)
    opt = ng.NaturalGradient(
        model,
        ng.fisher(model, MSE),
        lr=lr,
        solver=ng.Direct(),
        damping=ng.LevenbergMarquardt(start=0.0, floor=0.0, linear_model=linear_model),
    )
    iterate(opt, model, X, T)
    assert opt.state_report().ratio == pytest.approx(1 - lr / 2 if linear_model else 1.0, rel=1e-10)


@pytest.mark.parametrize("start", [1e-4, 1e8])
def test_levenberg_marquardt_recovers_from_absurd_starts(start: float) -> None:
    model = mlp(3, 4, 3)
    damping = ng.LevenbergMarquardt(start=start, raise_by=10.0, lower_by=0.1)
    opt = ng.NaturalGradient(model, ng.fisher(model, CE), lr=1.0, damping=damping, rule=ng.LineSearch())
    first = float(CE(model(X), Y).detach())
    seen = []
    for _ in range(25):
        iterate(opt, model, X, Y)
        seen.append(opt.state_report().damping)
    assert float(CE(model(X), Y).detach()) < 0.1 * first
    assert seen[-1] < 1e3


def test_momentum_with_levenberg_marquardt_reaches_the_minimum() -> None:
    model = mlp(3, 2)
    opt = ng.NaturalGradient(
        model, ng.fisher(model, MSE), lr=0.3, damping=ng.LevenbergMarquardt(start=0.1), rule=ng.Momentum(0.9)
    )
    for _ in range(150):
        iterate(opt, model, X, T)
    design = torch.cat([X, torch.ones(8, 1).double()], dim=1)
    best = MSE(design @ torch.linalg.lstsq(design, T).solution, T)
    assert float(MSE(model(X), T).detach()) == pytest.approx(float(best), rel=1e-4)
