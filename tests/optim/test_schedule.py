"""When a structured optimizer reads statistics: at every step first, then ever more rarely, by how much they move."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import assert_close, draw
from optim_models import CE, X, Y, net
from torch import Tensor

import natgrad as ng
from natgrad.optim.block_step import RAMP, TOLERANCE, TURNED, follow_drift, is_due
from natgrad.optim.blocks import measure_change
from natgrad.optim.state import Pace

STEPS = 60


def updates(recipe: Callable[..., Any], scales: Callable[[int], float] = lambda step: 1.0, **choices: Any) -> list[int]:
    """The steps at which statistics were read, and inverses made, with inputs of these scales."""
    model = net()
    opt, found = recipe(model, CE, **{"lr": 1e-4, **choices}), []
    for step in range(STEPS):
        opt.zero_grad()
        loss = opt.loss(model(scales(step) * X), Y)
        found += [step] if opt._update is not None else []
        loss.backward()
        opt.step()
        assert not opt._reader.taps.calls  # nothing holds a graph
        assert opt._state.pace.inverted == found[-1]
    return found


def gaps(steps: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(steps)]


RAMPED = [step for step in range(STEPS) if step < RAMP]


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal, ng.unitwise])
def test_statistics_that_stand_still_are_read_ever_more_rarely(recipe: Callable[..., Any]):
    found = updates(recipe, estimate=ng.ExactLabels())  # the same batch, a model that hardly moves
    assert gaps(found) == sorted(gaps(found))
    assert len(found) < 15
    assert gaps(found)[-1] > 1 + STEPS // RAMP


@pytest.mark.parametrize("recipe", [ng.kfac, ng.ekfac, ng.diagonal])
def test_statistics_that_move_are_read_at_every_step_in_the_first_ten(recipe: Callable[..., Any]):
    found = updates(recipe, lambda step: 3.0 ** (step % 3), decay=0.5)
    assert found[:RAMP] == RAMPED
    assert gaps(found)[-1] == 1 + STEPS // RAMP - 1  # and from then on as they always were


@pytest.mark.parametrize("recipe", [ng.online_ng, ng.tonga])
def test_structures_without_sums_keep_the_steady_growth(recipe: Callable[..., Any]):
    found = updates(recipe)
    assert found[:RAMP] == RAMPED
    assert gaps(found) == sorted(gaps(found))


@pytest.mark.parametrize("every", [1, 4])
def test_updates_are_never_further_apart_than_was_said(every: int):
    found = updates(ng.kfac, update_every=every, invert_every=every)
    assert max(gaps(found)) == every


def test_the_change_is_that_of_the_averages():
    old, new = ({"left": draw(4, 4, seed=s), "right": draw(3, 3, seed=s + 2)} for s in (0, 1))
    found = measure_change({**old, "left_vectors": draw(4, 4)}, {**new, "left_vectors": draw(4, 4, seed=7)}, 5.0 / 8.0)
    expected = [float((new[k] / 8 - old[k] / 5).norm() / (old[k] / 5).norm()) for k in old]
    assert_close(found, torch.tensor(max(expected), dtype=torch.float64), 1e-12)
    zero = {"squares": torch.zeros(3)}
    assert float(measure_change(zero, zero, 1.0)) == 0.0  # a dead layer asks for nothing


def test_small_changes_lengthen_the_interval_and_large_ones_shorten_it():
    pace = Pace(interval=4.0)
    assert follow_drift(pace, None, 20) == pace
    for drift, expected in (
        (TOLERANCE, 4.0),
        (TOLERANCE / 1.25, 5.0),
        (0.0, 7.5),
        (1.0, 3.75),
        (1.0, 1.875),
        (1.0, 1.0),
    ):
        pace = follow_drift(pace, drift, 20)
        assert pace.interval == pytest.approx(expected)
    for _ in range(20):
        pace = follow_drift(pace, 0.0, 20)
    assert pace.interval == 20.0
    assert not is_due(pace, 1000, 1019, False, 20)
    assert is_due(pace, 1000, 1020, False, 20)


def test_intervals_grow_where_noise_has_hidden_the_gradient():
    pace = Pace()
    longer = (1 + 30 // RAMP) * TURNED
    assert longer < 20
    assert [is_due(pace, 30 - gap, 30, True, 20) for gap in (longer - 1, longer)] == [False, True]
    assert is_due(pace, 30 - longer // TURNED, 30, False, 20)
    assert is_due(pace, 20, 30, True, 10)  # never further apart than was said


def test_an_averages_first_reading_says_nothing():
    model = net()
    opt = ng.kfac(model, CE)
    loss: Tensor = opt.loss(model(X), Y)
    assert opt._averages.drift(opt._update) is None
    loss.backward()
