"""A loss that does not go backward changes no step, whatever it is of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import draw
from optim_models import CE, X, Y, flat, net

import natgrad as ng

RECIPES = [ng.kfac, ng.ekfac, ng.unitwise, ng.diagonal, ng.hessian_free, ng.natgrad_cg]
CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "judged": {"damping": ng.LevenbergMarquardt()},
    "searched": {"rule": ng.LineSearch()},
    "measured": {"rule": ng.rules.MeasuredLength()},
}
PAIRS = [(recipe, choice) for recipe in RECIPES for choice in CHOICES] + [
    (recipe, choice) for recipe in (ng.online_ng, ng.tonga) for choice in ("default", "measured")
]


def train(recipe: Any, options: dict[str, Any], looks: str, micro: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    model = net()
    opt = recipe(model, CE, **options)
    for k in range(5):
        opt.zero_grad()
        other, labels = draw(12, X.shape[1], seed=50 + k), Y.roll(1).repeat(2)[:12]
        if looks == "before, without gradients":
            with torch.no_grad():
                opt.loss(model(other), labels)
        for part in (slice(0, 5), slice(5, None)) if micro else (slice(None),):
            opt.loss(model(X[part]), Y[part]).backward()
        if looks == "after":
            opt.loss(model(other), labels)
            opt.loss(model(2 * other), labels)
        if looks == "after, in evaluation mode":
            opt.loss(model.eval()(other), labels)
            model.train()
        opt.step()
    return flat(model), copy.deepcopy(opt.state_dict()["state"])


@pytest.mark.parametrize("looks", ["after", "after, in evaluation mode", "before, without gradients"])
@pytest.mark.parametrize(("recipe", "choice"), PAIRS, ids=lambda part: getattr(part, "__name__", part))
def test_a_loss_that_is_only_looked_at_changes_nothing(recipe: Any, choice: str, looks: str) -> None:
    micro = choice not in ("judged", "searched")  # which compare one loss with itself
    expected = train(recipe, CHOICES[choice], "", micro)
    found = train(recipe, CHOICES[choice], looks, micro)
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()


def test_micro_batches_that_went_backward_hold_no_averages_of_before() -> None:
    """A hundred of them would hold as many copies of all factors."""
    model = net()
    opt = ng.kfac(model, CE)
    for _ in range(5):
        opt.loss(model(X), Y).backward()
    assert len(opt._pending.losses) == 1
    opt.step()
    assert opt._pending.losses == []
