"""Helmholtz machines: Fisher blocks, likelihoods, lessons and steps against enumeration and autodiff."""

from __future__ import annotations

import copy
import io
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import F64, assert_close
from torch import Tensor

import natgrad as ng
from natgrad.applications.helmholtz import Bidirectional, Classic, Reweighted
from natgrad.applications.helmholtz.blocks import RADIUS, Kept, thinned, within
from natgrad.applications.helmholtz.rows import Rows, generation_rows
from natgrad.operators import SharedRows, Units

VECTORS = json.loads((Path(__file__).parent / "vectors" / "helmholtz.json").read_text(encoding="utf-8"))
BITS = torch.tensor([[1.0, 0, 1], [1, 1, 0], [0, 0, 1], [0, 1, 1]])
ALGORITHMS = [Classic(), Reweighted(), Reweighted(wake_phi=1.0), Reweighted(wake_phi=0.0), Bidirectional()]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


def machine(**options: Any) -> ng.HelmholtzMachine:
    torch.manual_seed(0)
    found = ng.HelmholtzMachine([3, 2, 2], **options).double()
    with torch.no_grad():
        for layer in (*found.generation, *found.recognition):
            layer.weight.add_(0.7 * torch.randn(layer.weight.shape, dtype=F64) * layer.mask)
    return found


def reference() -> tuple[ng.HelmholtzMachine, Tensor]:
    found, given = ng.HelmholtzMachine([3, 2, 2]).double(), VECTORS["inputs"]
    with torch.no_grad():
        for layer, key in zip(found.generation[:2], ("W_x_given_h1", "W_h1_given_h2"), strict=True):
            layer.weight.copy_(tensor(given[key]))
        found.generation[2].weight.copy_(tensor(given["b_h2"]).unsqueeze(1))
        for layer, key in zip(found.recognition, ("V_h1_given_x", "V_h2_given_h1"), strict=True):
            layer.weight.copy_(tensor(given[key]))
    return found, tensor(given["X_data"])


KINDS: dict[str, dict[str, Any]] = {
    "bits": {},
    "signs": {"units": (-1, 1)},
    "autoregressive": {"autoregressive": True},
    "fixed prior": {"prior": 0.3},
}


def data(kind: str) -> Tensor:
    return (2 * BITS - 1 if kind == "signs" else BITS).to(F64)


def test_blocks_and_likelihood_have_the_reference_values():
    found, x = reference()
    blocks, expected = found.fisher_blocks(x), VECTORS["expected"]
    keys = {"generation.0": "Fp_x", "generation.1": "Fp_h1", "recognition.0": "Fq_h1", "recognition.1": "Fq_h2"}
    for name, key in keys.items():
        assert_close(blocks[name], tensor(expected[key]))
    assert_close(blocks["generation.2"].flatten(), tensor(expected["Fp_top"]))
    assert_close(found.log_likelihood(x, samples=None), tensor(expected["log_p_x_data"]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_fisher_of_the_joint_is_the_blocks_and_nothing_else(kind):
    """E_p[g g^T] by enumeration and autodiff, g the gradient of log p(x, h): block-diagonal, one block per unit."""
    found = machine(**KINDS[kind])
    states, logs = found.joint()
    assert_close(logs.exp().sum(), tensor(1.0))
    weights = [layer.weight for layer in found.generation]
    total = torch.zeros(sum(w.numel() for w in weights), dtype=F64).outer(torch.zeros(sum(w.numel() for w in weights)))
    for i, log in enumerate(logs):
        value = found.log_joint([s[i] for s in states])
        slopes = torch.autograd.grad(value, [w for w in weights if w.requires_grad])
        queue = iter(slopes)
        flat = torch.cat([(next(queue) if w.requires_grad else torch.zeros_like(w)).flatten() for w in weights])
        total += log.exp() * torch.outer(flat, flat)
    blocks = found.fisher_blocks(data(kind))
    named = [blocks[f"generation.{i}"] for i in range(3)]
    if kind == "fixed prior":
        named[2] = torch.zeros_like(named[2])
    assert_close(torch.block_diag(*(block for part in named for block in part)), total, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_recognition_blocks_are_the_fisher_of_the_posterior(kind):
    found, x = machine(**KINDS[kind]), data(kind)
    hidden = found.hidden()
    weights = [layer.weight for layer in found.recognition]
    size = sum(w.numel() for w in weights)
    total = torch.zeros(size, size, dtype=F64)
    for example in x:
        for i in range(len(hidden[0])):
            value = found.log_posterior([example, *(h[i] for h in hidden)])
            flat = torch.cat([g.flatten() for g in torch.autograd.grad(value, weights)])
            total += value.detach().exp() / len(x) * torch.outer(flat, flat)
    blocks = found.fisher_blocks(x)
    units = [block for i in range(2) for block in blocks[f"recognition.{i}"]]
    assert_close(torch.block_diag(*units), total, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_blocks_are_unbiased(kind):
    found, x = machine(**KINDS[kind]), data(kind)
    exact, generator = found.fisher_blocks(x), torch.Generator().manual_seed(1)
    draws = [found.fisher_blocks(x, samples=20, generator=generator) for _ in range(60)]
    for name, expected in exact.items():
        values = torch.stack([draw[name] for draw in draws])
        assert ((values.mean(0) - expected).abs() <= 5 * values.std(0) / len(draws) ** 0.5 + 1e-9).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_likelihoods_agree(kind):
    """The enumeration sums to one over x, and importance sampling finds it within its standard error."""
    found = machine(**KINDS[kind])
    every = torch.cartesian_prod(*[tensor(found.units)] * 3)
    exact = found.log_likelihood(every, samples=None)
    assert_close(exact.exp().sum(), tensor(1.0))
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([found.log_likelihood(every, samples=500, generator=generator).exp() for _ in range(40)])
    assert ((draws.mean(0) - exact.exp()).abs() < 4.5 * draws.std(0) / 40**0.5 + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_dreams_have_the_model_s_frequencies(kind):
    found, generator = machine(**KINDS[kind]), torch.Generator().manual_seed(0)
    every = torch.cartesian_prod(*[tensor(found.units)] * 3)
    p = found.log_likelihood(every, samples=None).exp()
    drawn = found.sample(20000, generator)
    counts = (drawn.unsqueeze(1) == every).all(2).to(F64).mean(0)
    assert ((counts - p).abs() < 5 * (p * (1 - p) / 20000).sqrt()).all()
    means = found.sample(7, generator, means=True)
    assert means.shape == (7, 3)
    assert ((means > 0) & (means < 1)).all()


def expected_gradients(found: ng.HelmholtzMachine, x: Tensor) -> list[Tensor]:
    """d/d theta of sum_x E_{q(h|x)}[log p(x, h)] / b by enumeration."""
    hidden = found.hidden()
    total: Any = 0.0
    for example in x:
        states = [example.expand(len(hidden[0]), -1), *hidden]
        total = total + (found.log_posterior(states).detach().exp() * found.log_joint(states)).sum() / len(x)
    return list(torch.autograd.grad(total, [layer.weight for layer in found.generation if layer.weight.requires_grad]))


@pytest.mark.parametrize("kind", KINDS)
def test_classic_wake_teaches_the_expected_gradient(kind):
    found, x = machine(**KINDS[kind]), data(kind)
    generator = torch.Generator().manual_seed(0)
    lessons = [Classic().lesson(found, x, 50, generator).generation for _ in range(60)]
    trained = [i for i, layer in enumerate(found.generation) if layer.weight.requires_grad]
    for i, expected in zip(trained, expected_gradients(found, x), strict=True):
        values = torch.stack([lesson[i].ascent() for lesson in lessons]).detach()
        assert ((values.mean(0) - expected).abs() <= 5 * values.std(0) / len(values) ** 0.5 + 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reweighted_lessons_tend_to_the_likelihood_s_gradient(kind):
    """With many draws the self-normalised estimate is d/d theta log p(x), and wake-phi E_{p(h|x)}[d log q]."""
    found, x = machine(**KINDS[kind]), data(kind)
    hidden = found.hidden()
    logs = torch.stack([found.log_joint([e.expand(len(hidden[0]), -1), *hidden]) for e in x])  # (b, states)
    trained = [layer.weight for layer in found.generation if layer.weight.requires_grad]
    expected = list(torch.autograd.grad(logs.logsumexp(1).mean(), trained))
    posterior = logs.detach().softmax(1)
    seen = torch.stack([found.log_posterior([e.expand(len(hidden[0]), -1), *hidden]) for e in x])
    expected += torch.autograd.grad((posterior * seen).sum(1).mean(), [layer.weight for layer in found.recognition])
    generator, values = torch.Generator().manual_seed(0), []
    for _ in range(30):
        lesson = Reweighted(wake_phi=1.0).lesson(found, x, 3000, generator)
        rows = [r for r, layer in zip(lesson.generation, found.generation, strict=True) if layer.weight.requires_grad]
        values.append([r.ascent().detach() for r in (*rows, *lesson.recognition)])
    for i, reference_value in enumerate(expected):
        draws = torch.stack([value[i] for value in values])
        assert ((draws.mean(0) - reference_value).abs() <= 5 * draws.std(0) / 30**0.5 + 3e-3).all()


def test_a_reconstruction_is_one_way_up_and_down():
    """The mean over draws is sum_h q(h_1 | x) sigmoid(W [h_1; 1]), by enumeration."""
    found, x = machine(), data("bits")
    ups, downs = found.recognition[0], found.generation[0]
    states = torch.cartesian_prod(*[tensor((0, 1))] * 2)
    weights = torch.stack([ups.log_prob(x, state.expand(len(x), -1)).exp() for state in states])
    expected = torch.einsum("sb,sj->bj", weights, torch.sigmoid(downs.logits(states, torch.zeros(4, 3, dtype=F64))))
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([found.reconstruct(x, generator) for _ in range(400)])
    assert ((draws.mean(0) - expected.detach()).abs() < 5 * draws.std(0) / 400**0.5 + 1e-12).all()


def test_the_weights_do_not_overflow():
    found = machine()
    with torch.no_grad():
        for layer in found.generation:
            layer.weight.mul_(1e4)
    lesson = Reweighted().lesson(found, data("bits"), 5, torch.Generator().manual_seed(0))
    for rows in (*lesson.generation, *lesson.recognition):
        assert torch.isfinite(rows.weights).all()
        assert_close(rows.weights.sum(), tensor(1.0), rtol=1e-9)


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
        fisher = SharedRows(rows.inputs, (rows.slopes * rows.weights.unsqueeze(1)).mT, rows.mask).dense()
        solved = torch.linalg.solve(fisher + 0.2 * torch.eye(len(fisher), dtype=F64), rows.ascent().flatten())
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
    kept = Kept(0.5, 0.1, {})
    for rows in lessons:
        assert kept.refresh(rows)
    assert "rows" in kept.state  # two refreshes of at most four rows are kept, fewer than the columns
    blocks = [SharedRows(r.inputs, (r.slopes * r.weights.unsqueeze(1)).mT).blocks() for r in lessons]
    expected = Units((blocks[-1] + 0.5 * blocks[-2]) / 1.5).inverse(0.1)
    vector = torch.randn(122, dtype=F64)
    assert kept.inverse is not None
    assert_close(kept.inverse.mv(vector), 1.1 * expected.mv(vector), rtol=1e-10)

    narrow = Kept(0.5, 0.1, {})
    up = [torch.ones(9, 60, dtype=F64), torch.ones(9, 2, dtype=F64)]
    every = [generation_rows(wide.generation, up, torch.full((9,), w, dtype=F64)) for w in (1.0, 2.0)]
    for rows in every:
        assert narrow.refresh(rows[0])
    assert narrow.state["weight"] == 1.5
    first, second = (SharedRows(r[0].inputs, (r[0].slopes * r[0].weights.unsqueeze(1)).mT).blocks() for r in every)
    assert_close(narrow.state["blocks"], 0.5 * first + second)


def some_rows(count: int, columns: int) -> Rows:
    generator = torch.Generator().manual_seed(4)
    weights = torch.rand(count, dtype=F64, generator=generator) ** 4
    inputs = torch.randn(count, columns, dtype=F64, generator=generator)
    slopes = torch.rand(count, 2, dtype=F64, generator=generator)
    return Rows(inputs, slopes, slopes, weights / (2 * weights.sum()), None)


def test_a_refresh_takes_a_row_as_often_as_its_weight_says():
    rows = some_rows(1000, 5)
    found = thinned(rows, 256)
    assert len(found.inputs) == len(found.weights) == 256
    assert_close(found.weights.sum(), rows.weights.sum())
    places = (found.inputs.unsqueeze(1) == rows.inputs).all(2)
    assert bool((places.sum(1) == 1).all())
    expected = 256 * rows.weights / rows.weights.sum()
    assert bool(((places.sum(0) - expected).abs() < 1).all())
    assert torch.equal(found.slopes, rows.slopes[places.to(torch.uint8).argmax(1)])
    few = some_rows(200, 5)
    assert thinned(few, 256) is few


@pytest.mark.parametrize(("count", "columns"), [(40, 100), (300, 700), (60, 100), (10, 100)])
def test_what_is_kept_of_a_wide_layer_is_half_its_columns(count, columns):
    kept = Kept(0.8, 0.1, {})
    for _ in range(7):
        assert kept.refresh(some_rows(count, columns))
    if 2 * count > columns:
        assert "blocks" in kept.state
    else:
        assert len(kept.state["rows"]) == count * min(5, columns // (2 * count))


def fisher(rows: Rows) -> SharedRows:
    return SharedRows(rows.inputs, (rows.slopes * rows.weights.unsqueeze(1)).mT)


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


@torch.no_grad()
def test_a_shared_basis_sees_as_many_refreshes_as_the_running_average():
    kept = Kept(0.5, 0.1, {}, exact=False)
    every = [some_rows(20 + i, 7) for i in range(4)]
    for rows in every:
        assert kept.refresh(rows)
    last, first = every[-1], every[-2]
    assert len(kept.state["rows"]) == 45
    both = SharedRows(
        torch.cat([last.inputs, first.inputs]), torch.cat([fisher(last).weights, 0.5 * fisher(first).weights], 1) / 1.5
    )
    vector = torch.randn(14, dtype=F64)
    assert kept.inverse is not None
    assert_close(kept.inverse.mv(vector), 1.1 * both.spectral(7).inverse(0.1).mv(vector), rtol=1e-9)
    inverse = kept.inverse
    broken = replace(every[0], slopes=every[0].slopes * torch.nan)
    assert not kept.refresh(broken)
    assert kept.inverse is inverse


@pytest.mark.parametrize(("exact", "shared"), [(None, [False, False, True]), (True, [False] * 3), (False, [True] * 3)])
def test_wide_layers_share_a_basis_unless_told_otherwise(exact, shared):
    torch.manual_seed(0)
    trainer = ng.NaturalWakeSleep(ng.HelmholtzMachine([130, 6]), samples=2, exact=exact)
    trainer.step(torch.randint(0, 2, (9, 130), generator=torch.Generator().manual_seed(0)).float())
    assert trainer.failures == 0
    layers = ["generation.0", "generation.1", "recognition.0"]
    assert [not trainer._kept[name].exact for name in layers] == shared


@torch.no_grad()
def test_a_step_moves_no_unit_further_than_the_radius():
    """KL of every unit, before and after, in the mean over its rows; units that move less are left alone."""
    torch.manual_seed(0)
    layer = ng.HelmholtzMachine([6, 4]).double().generation[0]
    rows = some_rows(90, 5)
    rows = replace(rows, weights=2 * rows.weights)
    direction = torch.randn(6, 5, dtype=F64) * torch.tensor([100.0, 10, 1, 1e-3, 1e-6, 0], dtype=F64).unsqueeze(1)
    found = within(0.02, direction, rows, rate=0.5)
    old, new = (rows.inputs @ weight.mT for weight in (layer.weight, layer.weight + 0.5 * found))
    up = torch.sigmoid(old)
    kl = up * (old - new) + torch.nn.functional.softplus(new) - torch.nn.functional.softplus(old)
    assert float((rows.weights @ kl).max()) <= 0.02
    assert_close(rows.weights @ (0.5 * rows.inputs @ found.mT).square()[:, :2] / 8, tensor([0.02, 0.02]), rtol=1e-9)
    assert torch.equal(found[3:], direction[3:])
    assert_close(torch.nn.functional.normalize(found[:3]), torch.nn.functional.normalize(direction[:3]))


def test_wide_machines_are_bounded_unless_told_otherwise():
    found = [ng.NaturalWakeSleep(ng.HelmholtzMachine(sizes)).radius for sizes in ([129, 6], [128, 6], [6, 129])]
    assert found == [RADIUS, math.inf, RADIUS]
    assert ng.NaturalWakeSleep(ng.HelmholtzMachine([129, 6]), radius=math.inf).radius == math.inf


def test_an_optimizer_may_have_a_part_of_the_parameters():
    found = ng.HelmholtzMachine([130, 3])
    before = copy.deepcopy(found.state_dict())
    trainer = ng.NaturalWakeSleep(found, optimizer=lambda params: torch.optim.SGD(list(params)[:1], 0.1))
    trainer.step(torch.ones(2, 130))
    moved = [name for name, value in found.state_dict().items() if not torch.equal(value, before[name])]
    assert moved == ["generation.0.weight"]


def test_a_bound_keeps_a_large_rate_from_running_away():
    torch.manual_seed(0)
    x = torch.randint(0, 2, (20, 40), generator=torch.Generator().manual_seed(0)).float()
    lowest = {}
    for radius in (math.inf, 0.01):
        torch.manual_seed(0)
        trainer = ng.NaturalWakeSleep(ng.HelmholtzMachine([40, 5]), 5.0, radius=radius)
        lowest[radius] = min(trainer.step(x) for _ in range(15))
    assert lowest[0.01] > lowest[math.inf] + 20


def test_an_autoregressive_machine_keeps_exact_blocks():
    found = ng.HelmholtzMachine([130, 2], autoregressive=True)
    trainer = ng.NaturalWakeSleep(found, samples=1)
    trainer.step(torch.ones(2, 130))
    assert all(kept.exact for kept in trainer._kept.values())


@torch.no_grad()
@pytest.mark.parametrize("columns", [8, 40])
def test_the_running_average_is_kept_over_batches_of_any_size(columns):
    """Few rows once, as in the last batch of an epoch, are a batch like others; so is what was loaded."""
    every = [some_rows(count, columns) for count in (2, 50, 3, 50, 3)]
    kept = Kept(0.5, 0.1, {})
    for rows in every:
        assert kept.refresh(rows)
    ages = [0.5**age for age in reversed(range(5))]
    blocks = sum(age * fisher(rows).blocks() for age, rows in zip(ages, every, strict=True)) / sum(ages)
    vector = torch.randn(2 * columns, dtype=F64)
    assert kept.inverse is not None
    assert_close(kept.inverse.mv(vector), 1.1 * Units(blocks).inverse(0.1).mv(vector), rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("exact", [True, False])
def test_what_was_kept_is_the_same_under_another_decay(exact):
    kept, other = Kept(0.8, 0.1, {}, exact=exact), Kept(0.2, 0.1, {}, exact=exact)
    for rows in (some_rows(3, 40), some_rows(4, 40)):
        kept.refresh(rows)
    other.load(kept.state, torch.ones(1, dtype=F64))
    vector = torch.randn(80, dtype=F64)
    assert kept.inverse is not None
    assert other.inverse is not None
    assert_close(other.inverse.mv(vector), kept.inverse.mv(vector))


def test_rows_of_a_shared_basis_are_bounded_for_any_decay():
    kept = Kept(0.9999, 0.1, {}, exact=False)
    for _ in range(15):
        kept.refresh(some_rows(256, 5))
    assert len(kept.state["rows"]) == 2560


def test_rows_in_a_period_are_thinned_evenly():
    rows = some_rows(1024, 3)
    phase = (torch.arange(1024) % 4).to(F64).unsqueeze(1)
    rows = replace(rows, residuals=phase, weights=torch.full((1024,), 1 / 1024, dtype=F64))
    counts = torch.bincount(thinned(rows, 256).residuals.flatten().long(), minlength=4)
    assert counts.min() > 40


@pytest.mark.parametrize("exact", [True, False])
def test_a_machine_may_change_its_precision(exact):
    x = torch.randint(0, 2, (9, 6), generator=torch.Generator().manual_seed(0)).float()
    found = ng.HelmholtzMachine([6, 3])
    trainer = ng.NaturalWakeSleep(found, refresh=10, exact=exact)
    trainer.step(x)
    state = trainer.state_dict()
    found.double()
    trainer.step(x)
    assert trainer.failures == 0
    other = ng.NaturalWakeSleep(ng.HelmholtzMachine([6, 3]).double(), refresh=10, exact=exact)
    other.load_state_dict(state)
    other.step(x)
    assert other.failures == 0


def test_layers_may_be_frozen_and_freed():
    x = torch.ones(5, 6)
    found = ng.HelmholtzMachine([6, 3])
    trainer = ng.NaturalWakeSleep(found)
    found.recognition.requires_grad_(False)
    trainer.step(x)
    found.requires_grad_(False)
    before = copy.deepcopy(found.state_dict())
    trainer.step(x)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), found.state_dict().values(), strict=True))
    found.requires_grad_(True)
    trainer.step(x)
    assert not torch.equal(before["recognition.0.weight"], found.state_dict()["recognition.0.weight"])
    assert all(p.grad is None for p in found.parameters())


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


def trainers(found: ng.HelmholtzMachine) -> dict[str, Any]:
    return {
        "plain": ng.WakeSleep(found, 0.1, samples=3, momentum=0.5),
        "Adam": ng.WakeSleep(found, samples=3, optimizer=lambda p: torch.optim.Adam(p, 0.01)),
        "natural": ng.NaturalWakeSleep(found, 0.1, samples=3, refresh=3),
        "natural, wide": ng.NaturalWakeSleep(found, 0.1, samples=1, refresh=2, decay=0.5),
        "natural, shared": ng.NaturalWakeSleep(found, 0.1, samples=2, refresh=2, exact=False),
    }


@pytest.mark.parametrize("name", ["plain", "Adam", "natural", "natural, wide", "natural, shared"])
def test_a_resumed_run_is_the_run_that_never_stopped(name):
    torch.manual_seed(0)
    first = ng.HelmholtzMachine([12, 3, 2])
    second = copy.deepcopy(first)
    x = torch.randint(0, 2, (2, 12), generator=torch.Generator().manual_seed(0)).float()
    whole = trainers(first)[name]
    for _ in range(11):
        whole.step(x)
    part = trainers(second)[name]
    for _ in range(5):
        part.step(x)
    file = io.BytesIO()
    torch.save({"machine": second.state_dict(), "trainer": part.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    third = ng.HelmholtzMachine([12, 3, 2])
    third.load_state_dict(saved["machine"])
    resumed = trainers(third)[name]
    resumed.load_state_dict(saved["trainer"])
    for _ in range(6):
        resumed.step(x)
    for a, b in zip(first.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_approaches_the_data():
    """Four states, each as often: the bound comes near -log 4 for the natural step, nearer than for the plain one."""
    x = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]])
    found = {}
    for kind in (ng.WakeSleep, ng.NaturalWakeSleep):
        torch.manual_seed(0)
        trained = ng.HelmholtzMachine([4, 3, 2])
        trainer = kind(trained, lr=0.2, samples=10)
        for _ in range(150):
            trainer.step(x)
        found[kind] = float(trained.log_likelihood(x, samples=None).mean())
    assert found[ng.NaturalWakeSleep] > -1.7  # -log 4 is -1.39, undecided units are at -2.77
    assert found[ng.NaturalWakeSleep] > found[ng.WakeSleep] + 0.3


@dataclass(frozen=True)
class Broken(Classic):
    """Lessons of which one layer's slopes are NaN."""

    def lesson(self, machine: Any, x: Tensor, samples: int, generator: Any) -> Any:
        found = super().lesson(machine, x, samples, generator)
        rows = found.generation[0]
        if float(x.sum()) == 0:
            found.generation[0] = replace(rows, residuals=rows.residuals * torch.nan, slopes=rows.slopes * torch.nan)
        return found


def test_a_broken_batch_is_skipped_and_counted():
    found = machine()
    trainer = ng.NaturalWakeSleep(found, 0.1, refresh=1, algorithm=Broken())
    trainer.step(data("bits"))
    before, inverse = copy.deepcopy(found.state_dict()), trainer._kept["generation.0"].inverse
    trainer.step(torch.zeros(2, 3, dtype=F64))
    assert trainer.failures == 2  # the inverse, of which the last good one stays, and the step
    assert trainer._kept["generation.0"].inverse is inverse
    assert all(torch.equal(a, b) for a, b in zip(before.values(), found.state_dict().values(), strict=True))
    trainer.step(data("bits"))
    assert trainer.failures == 2
    assert not torch.equal(before["generation.0.weight"], found.state_dict()["generation.0.weight"])


WRONG: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "one layer": (lambda: ng.HelmholtzMachine([3]), ValueError, ("sizes", "at least two")),
    "size 0": (lambda: ng.HelmholtzMachine([3, 0]), ValueError, ("sizes", ">= 1")),
    "units": (lambda: ng.HelmholtzMachine([3, 2], units=(0, 2)), ValueError, ("units", "(0, 1)")),
    "prior": (lambda: ng.HelmholtzMachine([3, 2], prior=1.5), ValueError, ("prior", "between 0 and 1")),
    "prior's shape": (lambda: ng.HelmholtzMachine([3, 2], prior=torch.ones(3) / 2), ValueError, ("prior", "(2,)")),
    "grey": (lambda: machine().log_likelihood(0.5 * data("bits")), ValueError, ("x", "binarise")),
    "signs for bits": (lambda: machine().log_likelihood(data("signs")), ValueError, ("x", "units=(-1, 1)")),
    "images": (lambda: machine().log_likelihood(torch.ones(2, 1, 3)), ValueError, ("x", "(b, 3)", "flatten")),
    "width": (lambda: machine().log_likelihood(torch.ones(2, 4)), ValueError, ("x", "(b, 3)")),
    "no example": (lambda: machine().log_likelihood(torch.ones(0, 3)), ValueError, ("x", "b >= 1")),
    "NaN": (lambda: machine().log_likelihood(data("bits") * float("nan")), ValueError, ("x", "entries")),
    "samples": (lambda: machine().log_likelihood(data("bits"), samples=0), ValueError, ("samples", "None")),
    "too many": (
        lambda: ng.HelmholtzMachine([3, 30]).log_likelihood(BITS, samples=None),
        ValueError,
        ("30 hidden units", "use samples"),
    ),
    "n": (lambda: machine().sample(0), ValueError, ("n is 0", ">= 1")),
    "units of one kind": (lambda: ng.HelmholtzMachine([3, 2], units=2), ValueError, ("units is 2", "(-1, 1)")),  # type: ignore[arg-type]
    "prior's list": (lambda: ng.HelmholtzMachine([3, 2], prior=[0.2] * 3), ValueError, ("prior", "(2,)")),  # type: ignore[arg-type]
    "words": (lambda: machine().log_likelihood(["on"]), ValueError, ("x is list", "(b, 3)")),  # type: ignore[arg-type]
    "lr's kind": (lambda: ng.WakeSleep(machine(), lr="fast"), ValueError, ("lr is 'fast'", "> 0")),  # type: ignore[arg-type]
    "a built optimizer": (
        lambda: ng.WakeSleep(machine(), optimizer=torch.optim.SGD(machine().parameters(), 0.1)),  # type: ignore[arg-type]
        TypeError,
        ("optimizer is SGD", "lambda params"),
    ),
    "all frozen": (lambda: ng.WakeSleep(machine().requires_grad_(False)), ValueError, ("no parameter to train",)),
    "lr": (lambda: ng.WakeSleep(machine(), lr=0.0), ValueError, ("lr", "> 0")),
    "momentum": (lambda: ng.WakeSleep(machine(), momentum=1.0), ValueError, ("momentum", "[0, 1)")),
    "no machine": (lambda: ng.WakeSleep(torch.nn.Linear(2, 2)), TypeError, ("machine", "HelmholtzMachine")),  # type: ignore[arg-type]
    "algorithm": (lambda: ng.WakeSleep(machine(), algorithm=Classic), TypeError, ("algorithm", "Classic()")),  # type: ignore[arg-type]
    "wake_phi": (lambda: Reweighted(wake_phi=2.0), ValueError, ("wake_phi", "between 0 and 1")),
    "damping": (lambda: ng.NaturalWakeSleep(machine(), damping=0.0), ValueError, ("damping", "> 0")),
    "refresh": (lambda: ng.NaturalWakeSleep(machine(), refresh=0), ValueError, ("refresh", ">= 1")),
    "radius": (lambda: ng.NaturalWakeSleep(machine(), radius=0.0), ValueError, ("radius is 0.0", "math.inf")),
    "LBFGS": (lambda: ng.WakeSleep(machine(), optimizer=torch.optim.LBFGS), TypeError, ("LBFGS", "gradients alone")),
    "seed": (lambda: ng.WakeSleep(machine(), seed=None), TypeError, ("seed is None", "integer")),  # type: ignore[arg-type]
    "draws": (lambda: machine().recognise(data("bits"), 0), ValueError, ("samples is 0", ">= 1")),
    "a number for exact": (lambda: ng.NaturalWakeSleep(machine(), exact=0), ValueError, ("exact is 0",)),  # type: ignore[arg-type]
    "exact": (lambda: ng.NaturalWakeSleep(machine(), exact="no"), ValueError, ("exact is 'no'", "None")),  # type: ignore[arg-type]
    "a shared basis for units that see different inputs": (
        lambda: ng.NaturalWakeSleep(machine(autoregressive=True), exact=False),
        ValueError,
        ("exact is False", "exact=None"),
    ),
    "decay": (lambda: ng.NaturalWakeSleep(machine(), decay=1.0), ValueError, ("decay", "[0, 1)")),
    "another state": (
        lambda: ng.NaturalWakeSleep(machine()).load_state_dict(ng.WakeSleep(machine()).state_dict()),
        ValueError,
        ("blocks",),
    ),
}


def test_sets_arrays_and_numpy_s_integers_do_as_well():
    for given in ({0, 1}, {-1, +1}, [-1, 1], (1.0, -1.0)):
        assert ng.HelmholtzMachine([3, 2], units=given).units == tuple(sorted(given))
    assert ng.HelmholtzMachine(np.array([3, 2, 2])).sizes == [3, 2, 2]
    found, x = machine(), data("bits")
    by_tensor = found.log_likelihood(x, samples=None)
    for same in (x.numpy(), x.int().tolist(), x.bool(), x.numpy().astype(np.uint8)):
        assert_close(found.log_likelihood(same, samples=None), by_tensor)
        assert ng.NaturalWakeSleep(machine()).step(same) == ng.NaturalWakeSleep(machine()).step(x)
    assert_close(found.fisher_blocks(x.numpy())["recognition.0"], found.fisher_blocks(x)["recognition.0"])
    assert found.sample(np.int64(2)).shape == (2, 3)
    assert found.log_likelihood(x, samples=np.int64(7)).shape == (4,)


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_what_is_wrong(name):
    call, kind, words = WRONG[name]
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
