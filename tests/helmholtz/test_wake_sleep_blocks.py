"""Natural wake-sleep: what is kept of the blocks, their inverses, shared bases, and how far a step goes."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from helmholtz_models import ALGORITHMS, KINDS, data, fisher, machine, some_rows
from models import F64, assert_close, tensor

import natgrad as ng
from natgrad.helmholtz import Classic, Reweighted
from natgrad.helmholtz.blocks import FEW, UnitBlocks, draw_places, find_shortening, shorten_directions, thin_rows
from natgrad.helmholtz.units import LogisticRows, activate_generation
from natgrad.operators import Units


def refresh(blocks: UnitBlocks, rows: LogisticRows, level: float) -> bool:
    """Take in a batch and invert."""
    state = blocks.average(rows)
    return blocks.commit(state, blocks.operator(state), level)


@torch.no_grad()
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_one_natural_step_is_the_damped_solve_of_its_own_rows(kind, algorithm):
    found, x = machine(**KINDS[kind]), data(kind)
    lesson = algorithm.lesson(found, x, 4, torch.Generator().manual_seed(3))
    before = copy.deepcopy(found)
    trainer = ng.NaturalWakeSleep(found, lr=0.1, samples=4, damping=0.2, algorithm=algorithm, seed=3)
    bound = trainer.step(x)
    assert bound == pytest.approx(float(lesson.bound.mean()))
    networks = ("generation", lesson.generation), ("recognition", lesson.recognition)
    for name, rows in ((f"{network}.{i}", r) for network, all_rows in networks for i, r in enumerate(all_rows)):
        old, new = (m.get_submodule(name).weight.detach() for m in (before, found))
        if not found.get_submodule(name).weight.requires_grad:
            assert torch.equal(old, new)
            continue
        blocks = fisher(rows).dense()
        solved = torch.linalg.solve(blocks + 0.2 * torch.eye(len(blocks), dtype=F64), rows.ascent().flatten())
        assert_close(new - old, 0.1 * 1.2 * solved.view_as(old), rtol=1e-9)
        mask = found.get_submodule(name).mask
        assert not bool(new[~mask].any())


@torch.no_grad()
def test_the_running_average_is_that_of_the_blocks_whether_rows_or_blocks_are_kept():
    torch.manual_seed(0)
    wide = ng.HelmholtzMachine([60, 2]).double()
    generator = torch.Generator().manual_seed(0)
    lessons = []
    for _ in range(7):
        x = torch.randint(0, 2, (4, 60), generator=generator).to(F64)
        lessons.append(Classic().lesson(wide, x, 1, generator).recognition[0])
    kept = UnitBlocks(0.5, {})
    for rows in lessons:
        assert refresh(kept, rows, 0.1)
    assert "rows" in kept.state  # two refreshes of at most four rows are kept, fewer than the columns
    blocks = [fisher(r).blocks() for r in lessons]
    expected = Units((blocks[-1] + 0.5 * blocks[-2]) / 1.5).inverse(0.1)
    vector = torch.randn(122, dtype=F64)
    assert kept.inverse is not None
    assert_close(kept.inverse.mv(vector), 1.1 * expected.mv(vector), rtol=1e-10)

    narrow = UnitBlocks(0.5, {})
    up = [torch.ones(9, 60, dtype=F64), torch.ones(9, 2, dtype=F64)]
    seen = activate_generation(wide.generation, up)[0]
    every = [seen.teach(torch.full((9,), w, dtype=F64)) for w in (1.0, 2.0)]
    for rows in every:
        assert refresh(narrow, rows, 0.1)
    assert narrow.state["weight"] == 1.5
    first, second = (fisher(r).blocks() for r in every)
    assert_close(narrow.state["blocks"], 0.5 * first + second)


def test_a_refresh_takes_a_row_as_often_as_its_weight_says():
    rows = some_rows(1000, 5)
    found = thin_rows(rows, 256)
    assert len(found.inputs) == len(found.weights) == 256
    assert_close(found.weights.sum(), rows.weights.sum())
    places = (found.inputs.unsqueeze(1) == rows.inputs).all(2)
    assert bool((places.sum(1) == 1).all())
    expected = 256 * rows.weights / rows.weights.sum()
    assert bool(((places.sum(0) - expected).abs() < 1).all())
    assert torch.equal(found.slopes, rows.slopes[places.to(torch.uint8).argmax(1)])
    few = some_rows(200, 5)
    assert thin_rows(few, 256) is few


@torch.no_grad()
def test_a_step_in_a_shared_basis_is_the_solve_with_its_blocks():
    found, x = machine(), data("bits")
    lesson = Reweighted().lesson(found, x, 4, torch.Generator().manual_seed(3))
    before = copy.deepcopy(found)
    ng.NaturalWakeSleep(found, lr=0.1, samples=4, damping=0.2, exact=False, seed=3).step(x)
    networks = ("generation", lesson.generation), ("recognition", lesson.recognition)
    for name, rows in ((f"{network}.{i}", r) for network, all_rows in networks for i, r in enumerate(all_rows)):
        old, new = (m.get_submodule(name).weight.detach() for m in (before, found))
        blocks = fisher(rows).spectral(256).dense()
        solved = torch.linalg.solve(blocks + 0.2 * torch.eye(len(blocks), dtype=F64), rows.ascent().flatten())
        assert_close(new - old, 0.1 * 1.2 * solved.view_as(old), rtol=1e-9)


@pytest.mark.parametrize(("exact", "shared"), [(None, [False, False, True]), (True, [False] * 3), (False, [True] * 3)])
def test_wide_layers_share_a_basis_unless_told_otherwise(exact, shared):
    torch.manual_seed(0)
    trainer = ng.NaturalWakeSleep(ng.HelmholtzMachine([130, 6]), samples=2, exact=exact)
    trainer.step(torch.randint(0, 2, (9, 130), generator=torch.Generator().manual_seed(0)).float())
    assert trainer.failures == 0
    layers = ["generation.0", "generation.1", "recognition.0"]
    assert [not trainer.blocks.layers[name].exact for name in layers] == shared


@torch.no_grad()
def test_a_step_moves_no_unit_further_than_the_radius():
    """KL of every unit, before and after, in the mean over its rows; units that move less are left alone."""
    torch.manual_seed(0)
    layer = ng.HelmholtzMachine([6, 4]).double().generation[0]
    rows = some_rows(90, 5)
    rows = replace(rows, weights=2 * rows.weights)
    direction = torch.randn(6, 5, dtype=F64) * torch.tensor([100.0, 10, 1, 1e-3, 1e-6, 0], dtype=F64).unsqueeze(1)
    found = shorten_directions(0.02, direction, rows, rate=0.5)
    old, new = (rows.inputs @ weight.mT for weight in (layer.weight, layer.weight + 0.5 * found))
    up = torch.sigmoid(old)
    kl = up * (old - new) + torch.nn.functional.softplus(new) - torch.nn.functional.softplus(old)
    assert float((rows.weights @ kl).max()) <= 0.02
    assert_close(rows.weights @ (0.5 * rows.inputs @ found.mT).square()[:, :2] / 8, tensor([0.02, 0.02]), rtol=1e-9)
    assert torch.equal(found[3:], direction[3:])
    assert_close(torch.nn.functional.normalize(found[:3]), torch.nn.functional.normalize(direction[:3]))


@torch.no_grad()
def test_units_that_few_rows_show_to_be_short_are_left_alone_and_all_others_measured_on_more():
    generator = torch.Generator().manual_seed(0)
    rows = some_rows(600, 40)
    inputs = rows.inputs[draw_places(rows.weights, FEW)]
    direction = torch.randn(30, 40, dtype=F64, generator=generator)
    direction *= torch.logspace(-3, 1, 30, dtype=F64).unsqueeze(1)  # from far below the radius to far above it
    factors = find_shortening(0.02, direction, inputs, rate=0.5)
    assert 5 < int((factors < 1).sum()) < 25
    assert_close(shorten_directions(0.02, direction, rows, rate=0.5), direction * factors, rtol=1e-12)
    short = direction[:5]
    assert shorten_directions(0.02, short, rows, rate=0.5) is short  # 128 rows were not looked at


@pytest.mark.parametrize("exact", [True, False])
def test_a_state_of_another_machine_is_refused(exact):
    trainer = ng.NaturalWakeSleep(ng.HelmholtzMachine([6, 3]), exact=exact)
    trainer.step(torch.ones(5, 6))
    for sizes in ([7, 3], [6, 4], [6, 3, 2], [6, 3]):
        other = ng.NaturalWakeSleep(ng.HelmholtzMachine(sizes), exact=exact)
        if sizes == [6, 3]:
            other.load_state_dict(trainer.state_dict())
            continue
        with pytest.raises(ValueError, match="of another machine"):
            other.load_state_dict(trainer.state_dict())
        assert other.steps == 0


@torch.no_grad()
def test_momentum_does_not_carry_a_step_over_the_radius():
    torch.manual_seed(0)
    found = ng.HelmholtzMachine([130, 3])
    x = torch.ones(20, 130)
    inputs = torch.ones(1, 131)
    trainer = ng.NaturalWakeSleep(found, 1.0, momentum=0.9)
    for _ in range(15):
        before = found.recognition[0].weight.clone()
        trainer.step(x)
        assert float(((found.recognition[0].weight - before) @ inputs.mT).square().max()) / 8 <= 0.03 * (1 + 1e-3)


def test_blocks_are_read_anew_when_a_refresh_is_due_and_not_before():
    trainer, x, inverses = ng.NaturalWakeSleep(machine(), 0.1, samples=2, refresh=3, seed=0), data("plain"), []
    for _ in range(7):
        trainer.step(x)
        inverses.append(trainer.blocks.keep("generation.0").inverse)
    fresh = [new is not old for old, new in itertools.pairwise(inverses)]
    assert fresh == [False, False, True, False, False, True]
