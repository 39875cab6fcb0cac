"""`rate="auto"`: spectral steps that get shorter by themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import MeasuredLength, NoiseAware, SpectralDescent, SpectralProgress

F64 = torch.float64
CE = nn.CrossEntropyLoss()
RECIPES = [ng.kfac, ng.ekfac]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(F64)


def train_on_noise(model: nn.Module, opt: Any, steps: range, rates: list[float] | None = None) -> None:
    """Steps on batches whose labels are noise."""
    torch.manual_seed(steps.start)  # the labels of the metric are drawn
    for k in steps:
        draw = torch.Generator().manual_seed(k)
        x, y = torch.randn(8, 4, generator=draw, dtype=F64), torch.randint(3, (8,), generator=draw)
        if rates is not None:
            opt.param_groups[0]["lr"] = rates[k]
        opt.zero_grad()
        opt.loss(model(x), y).backward()
        opt.step()


def params(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_the_schedule_that_a_scheduler_would_set(recipe: Any) -> None:
    """The bounds on a step and the decay of weights follow as well."""
    one, other = make_model(), make_model()
    opt = recipe(one, CE, rate="auto", weight_decay=0.01)
    train_on_noise(one, opt, range(60))
    turned = opt._state.noise.turned
    assert 0 <= turned < 20
    rates = [1.0 if k <= turned else min(1.0, math.sqrt(20 / (k - turned))) for k in range(60)]
    assert rates[-1] < 0.7
    train_on_noise(other, recipe(other, CE, weight_decay=0.01), range(60), rates)
    torch.testing.assert_close(params(one), params(other), rtol=1e-12, atol=1e-12)


def test_it_multiplies_the_rate_of_a_group() -> None:
    one, other = make_model(), make_model()
    rule = SpectralDescent(falls_after=2)
    train_on_noise(one, ng.kfac(one, CE, lr=0.5, rule=rule), range(12))
    rates = [0.5 * min(1.0, math.sqrt(2 / max(k, 1))) for k in range(12)]
    train_on_noise(other, ng.kfac(other, CE, rule=SpectralDescent()), range(12), rates)
    torch.testing.assert_close(params(one), params(other), rtol=1e-12, atol=1e-12)


def test_steps_that_have_not_turned_are_as_long_as_ever() -> None:
    one, other = make_model(), make_model()
    rules = [NoiseAware(noise=1e-9, spectral=SpectralDescent(falls_after=n)) for n in (1, math.inf)]
    for model, rule in zip((one, other), rules, strict=True):
        opt = ng.kfac(model, CE, rule=rule)
        train_on_noise(model, opt, range(8))  # noise is not believed before the tenth step
        assert opt._state.noise.turned == -1
    assert torch.equal(params(one), params(other))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rule", [MeasuredLength(), NoiseAware(noise=0.0), ng.TrustRegion(0.1)])
def test_rules_without_spectral_steps_are_refused(recipe: Any, rule: Any) -> None:
    with pytest.raises(ValueError, match=r'rate="auto" shortens spectral steps, and .* takes none: leave rule= out'):
        recipe(make_model(), CE, rate="auto", rule=rule)


@pytest.mark.parametrize("rate", ["Auto", 0.1, None])
def test_a_rate_that_is_not_a_word(rate: Any) -> None:
    with pytest.raises(ValueError, match='expected "constant" or "auto"; a number goes to lr='):
        ng.kfac(make_model(), CE, rate=rate)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_fall_from_no_step_on_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="falls_after is"):
        SpectralDescent(falls_after=value)


def test_the_users_rule_keeps_its_numbers() -> None:
    rule = NoiseAware(move=0.05, spectral=SpectralDescent(length=0.02, falls_after=7))
    assert ng.kfac(make_model(), CE, rate="auto", rule=rule).rule == rule
    plain = ng.kfac(make_model(), CE, rate="auto", max_kl=0.5).rule
    assert plain == NoiseAware(max_kl=0.5, spectral=SpectralProgress(falls_after=20))
