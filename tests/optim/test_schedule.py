"""When a structured optimizer reads statistics: at every step first, then ever more rarely."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from optim_models import CE, X, Y, net

import natgrad as ng
from natgrad.optim.block_step import RAMP, TURNED, is_due

STEPS = 60


def updates(recipe: Callable[..., Any], **choices: Any) -> list[int]:
    """The steps at which statistics were read, and inverses made, in a run."""
    model = net()
    opt, found = recipe(model, CE, **{"lr": 1e-4, **choices}), []
    for step in range(STEPS):
        opt.zero_grad()
        loss = opt.loss(model(X), Y)
        found += [step] if opt._pending.update is not None else []
        loss.backward()
        opt.step()
        assert not opt._reader.taps.calls  # nothing holds a graph
        assert opt._state.pace.inverted == found[-1]
    return found


def gaps(steps: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(steps)]


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal, ng.unitwise, ng.online_ng, ng.tonga])
def test_statistics_are_read_ever_more_rarely(recipe: Callable[..., Any]):
    found = updates(recipe, rule=ng.TrustRegion(0.1))
    assert found[:RAMP] == [step for step in range(STEPS) if step < RAMP]
    assert gaps(found) == sorted(gaps(found))


@pytest.mark.parametrize("every", [1, 4])
def test_updates_are_never_further_apart_than_was_said(every: int):
    found = updates(ng.kfac, update_every=every, invert_every=every)
    assert max(gaps(found)) == every


def test_intervals_grow_where_noise_has_hidden_the_gradient():
    longer = (1 + 30 // RAMP) * TURNED
    assert [is_due(30 - gap, 30, True, 100) for gap in (longer - 1, longer)] == [False, True]
    assert is_due(30 - longer // TURNED, 30, False, 100)
    assert is_due(20, 30, True, 10)  # never further apart than was said
