"""One wild batch is left out of a run, in parameters and in momentum; data of a new scale are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build_seeded, draw
from torch import nn

import natgrad as ng

MATRIX_FREE = [ng.hessian_free, ng.natgrad_cg, ng.krylov_subspace]
RECIPES = [ng.kfac, ng.ekfac, ng.unitwise, ng.diagonal, ng.online_ng, ng.tonga, *MATRIX_FREE]


def train(recipe: Any, steps: int, scales: dict[int, float], **options: Any) -> tuple[nn.Module, Any]:
    """A regression in which the first target of some steps is multiplied."""
    torch.manual_seed(0)
    model = build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    opt, weight = recipe(model, nn.MSELoss(), **options), draw(4, 2)
    for step in range(steps):
        x = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        y = torch.sin(x @ weight)
        y[0] *= scales.get(step, 1.0)
        opt.zero_grad()
        opt.loss(model(x), y).backward()
        opt.step()
    return model, opt


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.__name__)
@pytest.mark.parametrize("scale", [1e3, -1e6, 1e12])
def test_a_step_on_a_wild_batch_is_none(recipe: Any, scale: float):
    model, opt = train(recipe, 13, {12: scale})
    before, _ = train(recipe, 12, {})
    assert all(torch.equal(a, b) for a, b in zip(parameters(model), parameters(before), strict=True))
    assert opt.state_report().failures == 1


@pytest.mark.parametrize("recipe", [ng.kfac, ng.diagonal, ng.natgrad_cg], ids=lambda r: r.__name__)
def test_what_a_wild_batch_leaves_is_no_momentum(recipe: Any):
    model, _ = train(recipe, 30, {12: 1e4})
    clean, _ = train(recipe, 30, {})
    x = draw(200, 4)
    y = torch.sin(x @ draw(4, 2))
    assert nn.MSELoss()(model(x), y) < 1.5 * nn.MSELoss()(clean(x), y) + 0.05


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg], ids=lambda r: r.__name__)
def test_data_of_a_new_scale_are_taken_after_three_batches(recipe: Any):
    _, opt = train(recipe, 20, dict.fromkeys(range(12, 20), 1e4))
    assert opt.state_report().failures == 3


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg], ids=lambda r: r.__name__)
def test_the_first_steps_set_the_scale(recipe: Any):
    _, opt = train(recipe, 8, {3: 100.0})
    assert opt.state_report().failures == 0


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.__name__)
def test_a_second_batch_beyond_all_measure_is_left_out(recipe: Any):
    model, opt = train(recipe, 2, {1: 1e8})
    before, _ = train(recipe, 1, {})
    assert all(torch.equal(a, b) for a, b in zip(parameters(model), parameters(before), strict=True))
    assert opt.state_report().failures == 1


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg], ids=lambda r: r.__name__)
def test_raising_names_the_loss(recipe: Any):
    with pytest.raises(ValueError, match="more than ten times the highest"):
        train(recipe, 13, {12: 1e6}, on_trouble="raise")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_a_target_that_counts_is_left_out(recipe: Any, reduction: str):
    model = build_seeded(lambda: nn.Linear(4, 3))
    opt, x, y = recipe(model, nn.CrossEntropyLoss(reduction=reduction)), draw(6, 4), torch.arange(6) % 3
    for step, targets in enumerate([y, torch.full_like(y, -100), y]):
        before = parameters(model)
        opt.zero_grad()
        opt.loss(model(x), targets).backward()
        opt.step()
        moved = any(not torch.equal(a, b) for a, b in zip(parameters(model), before, strict=True))
        assert moved == (step != 1)
    assert opt.state_report().failures == 1


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg], ids=lambda r: r.__name__)
def test_a_checkpoint_knows_the_highest_loss(recipe: Any):
    model, opt = train(recipe, 12, {})
    other = build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    resumed = recipe(other, nn.MSELoss())
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(opt.state_dict())
    before = parameters(other)
    x = draw(16, 4)
    resumed.loss(other(x), 1e5 * torch.ones(16, 2, dtype=torch.float64)).backward()
    resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters(other), before, strict=True))
