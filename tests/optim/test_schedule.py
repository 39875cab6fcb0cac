"""When a structured optimizer reads statistics: at every step first, then ever more rarely."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_state import blocks_of
from models import draw
from optim_models import CE, X, Y, net, same, train
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.constants import RAMP, TURNED
from natgrad.layers.moments import spread_rows
from natgrad.optim.block_step import is_due, is_due_to_measure, part_of_rows
from natgrad.optim.state import Pace
from natgrad.rules import BlockStep, Parts, Products

STEPS = 40


def updates(recipe: Callable[..., Any], **choices: Any) -> list[int]:
    """The steps at which statistics were read, and inverses made, in a run."""
    model = net()
    opt, found = recipe(model, CE, **{"lr": 0.02, **choices}), []
    for step in range(STEPS):
        opt.zero_grad()
        loss = opt.loss(model(X), Y)
        found += [step] if opt._flow.pending.update is not None else []
        loss.backward()
        opt.step()
        assert not opt._flow.reader.taps.find_calls(loss)  # nothing holds what went into the layers
        assert opt._live.state.pace.inverted == found[-1]
    return found


def gaps(steps: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(steps)]


@pytest.mark.parametrize("recipe", [ng.kfac, ng.diagonal, ng.online_ng])
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


# factors from a part of a pass's rows, lengths that are measured now and then, forms that are believed for a while


@pytest.mark.parametrize(("count", "some"), [(1000, 100), (2048, 1026), (997, 512), (640, 64)])
def test_rows_are_spread_over_the_pass_and_over_every_period_in_it(count: int, some: int) -> None:
    kept = spread_rows(count, some, torch.device("cpu"))
    assert 0.7 * some <= len(kept) <= 1.5 * some
    assert len(kept.unique()) == len(kept)
    assert int(kept.max()) < count
    stretch = round(count / some)
    phases = torch.bincount(kept % stretch, minlength=stretch)
    assert int(phases.max() - phases.min()) <= 1


Factors = dict[str, dict[str, Tensor]]


def read_factors(
    rows: float, model: nn.Module, x: Tensor, y: Tensor, steps: int = 4, update_every: int = 20
) -> Factors:
    """The running averages' factors by layer, after some steps at one point."""
    structure = ng.Kronecker(0.95, rows=rows)
    opt = ng.StructuredNaturalGradient(model, CE, structure, lr=0.0, measure=False, update_every=update_every)
    train(opt, model, steps, x, y)
    return {b.key: {side: total / b.weight for side, total in b.totals.items()} for b in blocks_of(opt)}


def assert_near(some: Factors, every: Factors) -> None:
    """Factors of a part of the rows are not those of all, but up to chance."""
    assert any(not torch.equal(every[key]["left"], some[key]["left"]) for key in every)
    for key, factors in every.items():
        for side, factor in factors.items():
            assert (some[key][side] - factor).norm() < 0.2 * factor.norm(), (key, side)


def sequence_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3), nn.Flatten(0, 1))


def image_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(20, 3))


@pytest.mark.parametrize("name", ["sequence", "image"])
def test_factors_of_a_part_of_the_rows_are_those_of_all_up_to_chance(name: str) -> None:
    torch.manual_seed(0)
    model, shape, count = (
        (sequence_model(), (60, 40, 6), 2400) if name == "sequence" else (image_model(), (300, 2, 8, 8), 300)
    )
    x, y = draw(*shape).float(), torch.randint(3, (count,))
    assert_near(read_factors(2, model, x, y), read_factors(math.inf, model, x, y))
    if name == "sequence":  # a pass with few rows is taken whole
        few = model, x[:15], y[:600]
        assert same(read_factors(2, *few, 2), read_factors(math.inf, *few, 2))
    with pytest.raises(ValueError, match="rows is 0"):
        ng.Kronecker(rows=0)


def test_an_update_that_comes_before_it_is_due_needs_as_many_fewer_rows() -> None:
    assert part_of_rows(Pace(), 0, False) == 1.0  # the first one
    for step, every, part in (
        (3, 1, 1.0),
        (12, 1, 1 / 3),
        (12, 3, 1.0),
        (50, 1, 1 / 11),
        (500, 5, 1 / 4),
        (500, 20, 1.0),
    ):
        pace = Pace(updated=step - every)
        assert part_of_rows(pace, step, False) == part
        assert is_due(pace.updated, step, False, 20) == (part == 1.0)


def test_factors_on_every_step_come_from_fewer_rows_and_are_those_of_all_up_to_chance() -> None:
    torch.manual_seed(0)
    model, x, y = sequence_model(), draw(60, 80, 6).float(), torch.randint(3, (4800,))
    every = read_factors(math.inf, model, x, y, 30)
    for often in (1, 20):
        assert_near(read_factors(2, model, x, y, 30, update_every=often), every)


def test_layers_of_a_step_are_scaled_without_a_product() -> None:
    vector = Parts({"a": draw(3).float(), "b": draw(2).float(), "c": draw(4).float()}, length=0.5)
    squares = vector.squares().tolist()
    products = {"a": Products(2.0, -1.0, squares[0] + squares[1]), "c": Products(5.0, -3.0, squares[2])}
    whole = BlockStep.of_products(vector, products)
    step = replace(whole, true=whole.promise.scale_by(3.0), ratio=3.0).scale_by(0.1)
    factors = {"a": 0.5, "b": 0.5, "c": 1.0}
    scaled = step.scale_layers(factors)
    assert scaled is not None
    assert float(scaled.promised_form(0.0)) == pytest.approx(0.01 * (2.0 / 4 + 5.0))
    assert float(scaled.form()) == pytest.approx(0.03 * (2.0 / 4 + 5.0))
    slope = scaled.known_slope()
    assert slope is not None
    assert float(slope) == pytest.approx(-0.1 * (1.0 / 2 + 3.0))
    for name, factor in factors.items():
        torch.testing.assert_close(scaled.vector[name], factor * 0.1 * vector[name])
        assert scaled.vector.parts[name] is vector.parts[name]  # no copy
    flat = torch.cat(list(scaled.vector.tensors().values()))
    torch.testing.assert_close(scaled.vector.norm(), flat.norm())
    assert float(scaled.norm()) == pytest.approx(float(flat.norm()))
    torch.testing.assert_close(scaled.vector @ vector, flat @ torch.cat(list(vector.tensors().values())))
    assert (
        BlockStep(vector, whole.true, whole.promise, None, {}).scale_layers(factors) is None
    )  # known as a whole alone


def test_lengths_are_measured_ever_more_seldom() -> None:
    pace, measured = Pace(), list[int]()
    for step in range(100):
        if is_due_to_measure(pace, step, 20):
            pace = Pace(measured=step)
            measured.append(step)
    assert measured[:5] == [0, 1, 2, 3, 5]
    assert max(gaps(measured)) == 20


@pytest.mark.parametrize(("estimate", "some"), [(ng.Sampled(), True), (ng.ExactLabels(), False)])
def test_kfac_takes_all_rows_where_labels_are_exact(estimate: Any, some: bool) -> None:
    rows = ng.kfac(sequence_model(), CE, estimate=estimate).structure.rows
    assert math.isfinite(rows) == some
