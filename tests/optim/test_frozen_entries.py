"""Entries of a gradient that a hook or a mask sets to zero stay, or a sentence says that the metric moves them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from optim_models import CE, X, Y, net

import natgrad as ng

MASKS = {
    "rows": lambda g: torch.cat([torch.zeros_like(g[:1]), g[1:]]),
    "columns": lambda g: torch.cat([torch.zeros_like(g[:, :1]), g[:, 1:]], 1),
    "entries": lambda g: g * (torch.arange(g.numel()).reshape(g.shape) % 3 > 0),
    "all": torch.zeros_like,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["hook", "after backward"])
@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal, ng.hessian_free, ng.natgrad_cg])
def test_entries_that_a_mask_freezes_stay_or_are_named(recipe: Any, way: str, mask: str) -> None:
    """Adam leaves them; a metric that ties them to others moves them, and says so."""
    model, hold = net(), MASKS[mask]
    weight = model.get_submodule("2").weight
    free = hold(torch.ones_like(weight)) != 0
    if way == "hook":
        weight.register_hook(hold)
    opt = recipe(model, CE)
    before = weight.detach().clone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            opt.zero_grad()
            opt.loss(model(X), Y).backward()
            if way != "hook":
                weight.grad = hold(weight.grad)
            opt.step()
    moved = (weight.detach() - before)[~free]
    named = [str(one.message) for one in told if "['2.weight'] is zero in entries" in str(one.message)]
    assert len(named) == 1 if bool(moved.any()) else len(named) <= 1
    assert len(told) == len(named)
