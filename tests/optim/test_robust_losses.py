"""Losses of absolute errors and of class probabilities train under every recipe, in units of their own too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import assert_close, build_seeded, draw
from torch import Tensor, nn

import natgrad as ng

RECIPES = [ng.kfac, ng.ekfac, ng.unitwise, ng.diagonal, ng.online_ng]
ERRORS = {
    "L1Loss": nn.L1Loss,
    "SmoothL1Loss": nn.SmoothL1Loss,
    "HuberLoss": lambda reduction="mean": nn.HuberLoss(reduction=reduction, delta=0.5),
}
X = draw(64, 4)
SMOOTH = torch.sin(X @ draw(4, 2, seed=1))


def regressor() -> nn.Module:
    return build_seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)))


def classifier() -> nn.Module:
    return nn.Sequential(regressor(), nn.LogSoftmax(dim=-1))


def train(recipe: Any, model: nn.Module, criterion: Any, targets: Tensor, steps: int, **options: Any) -> list[float]:
    """The losses of some steps on all data, with a falling rate."""
    opt = recipe(model, criterion, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / steps)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = opt.loss(model(X), targets)
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.__name__)
def test_errors_fall_under_every_recipe(recipe: Any, kind: str):
    criterion = ERRORS[kind]()
    losses = train(recipe, regressor(), criterion, SMOOTH, 40)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", ["L1Loss", "HuberLoss"])
def test_targets_in_units_of_a_thousand_are_learnt(kind: str):
    """The same network in sixty steps; without the size of the errors .95 of the loss is left."""
    losses = train(ng.kfac, regressor(), ERRORS[kind](), 1e3 * SMOOTH, 60)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.__name__)
def test_distillation_falls_under_every_recipe(recipe: Any, reduction: str):
    targets = (3 * SMOOTH).softmax(1)
    losses = train(recipe, classifier(), nn.KLDivLoss(reduction=reduction), targets, 40)
    assert losses[-1] < 0.2 * losses[0]


def test_a_divergence_takes_the_steps_of_soft_cross_entropy():
    """Same gradient and metric; without a bound that is a share of the loss, the same steps."""
    logits, soft = regressor(), classifier()
    targets = (3 * SMOOTH).softmax(1)
    rule = ng.Rate()
    train(ng.natgrad_cg, logits, nn.CrossEntropyLoss(), targets, 5, rule=rule)
    train(ng.natgrad_cg, soft, nn.KLDivLoss(reduction="batchmean"), targets, 5, rule=rule)
    for one, other in zip(logits.parameters(), soft.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), 1e-7)
