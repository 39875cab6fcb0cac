"""What people type wrongly in their first training loop is said at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.arange(8) % 2
RECIPE: Any = ng.kfac
OPTIMISERS = [ng.kfac, ng.hessian_free]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("build", OPTIMISERS)
def test_a_step_without_backward_is_said(build: Any):
    model = net()
    opt = build(model, CE)
    before = [p.detach().clone() for p in model.parameters()]
    opt.loss(model(X), Y)
    with pytest.warns(UserWarning, match=r"this step does nothing.*loss\.backward\(\) before optimizer\.step\(\)"):
        opt.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    opt.step()  # no loss, no gradient: as in torch, nothing to say


@pytest.mark.parametrize("build", OPTIMISERS)
@pytest.mark.parametrize("criterion", [CE, MSE])
def test_targets_in_place_of_outputs_are_said(build: Any, criterion: nn.Module):
    model = net()
    opt = build(model, criterion)
    outputs = model(X)
    targets = Y if criterion is CE else torch.zeros_like(outputs)
    with pytest.raises(ValueError, match=r"outputs first: call optimizer\.loss\(outputs, targets\)"):
        opt.loss(targets, outputs)


@pytest.mark.parametrize("given", [(), (net(),), (net().parameters(),)])
def test_a_missing_criterion_is_shown_in_its_place(given: tuple[Any, ...]):
    missing = "'criterion'" if given else "'model' and 'criterion'"
    with pytest.raises(TypeError, match=re.escape(f"kfac() lacks {missing}, expected kfac(model, criterion)")):
        RECIPE(*given, lr=0.1)


def test_parameters_in_place_of_the_model_are_said():
    with pytest.raises(TypeError, match=r"give the model itself, not model\.parameters\(\)"):
        RECIPE(net().parameters(), CE)


@pytest.mark.parametrize(
    ("criterion", "targets", "words"),
    [
        (CE, Y.int(), r"targets are torch\.int32, expected torch\.int64; convert them with targets\.long\(\)"),
        (nn.NLLLoss(), Y, "outputs are not log-probabilities.*CrossEntropyLoss"),
    ],
)
def test_outputs_and_targets_are_those_of_the_criterion(criterion: nn.Module, targets: Tensor, words: str):
    model = net()
    with pytest.raises(ValueError, match=words):
        ng.kfac(model, criterion).loss(model(X), targets)


def test_no_distant_keyword_is_proposed():
    with pytest.raises(TypeError, match="'betas'; it takes criterion, "):
        RECIPE(net(), CE, betas=(0.9, 0.99))
