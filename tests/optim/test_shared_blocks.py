"""Blocks shared out over four processes: the same steps, a part of the inversions and of the state on each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import build_seeded, draw
from optim_models import flat, pass_through_file, train_batches
from process_ranks import assert_joined, catch, count_ranks, needs_gloo, own_rank, run_ranks, take_part, wrap_model
from torch import distributed, nn

import natgrad as ng
from natgrad.optim.processes import Cost, Owners, Processes, balance, check_share, cut_strips, join_strips
from natgrad.rules import MeasuredLength, Momentum, SpectralDescent

pytestmark = needs_gloo

X = draw(64, 12)
Y = X[:, :5].argmax(1)
CE = nn.CrossEntropyLoss()


def build() -> nn.Module:
    """Eight layers of a size, as a transformer has them."""
    sizes = [12, *[14] * 7, 5]
    pairs = pairwise(sizes)
    return nn.Sequential(*[part for i, o in pairs for part in (nn.Linear(i, o), nn.LayerNorm(o), nn.Tanh())]).double()


PARTS = (16, 16, 16, 16)


def train(recipe: Callable[..., Any], steps: int = 6, **options: Any) -> dict[str, Any]:
    model, own = build_seeded(build), take_part(PARTS)
    outer = wrap_model(model)
    opt = recipe(outer, CE, estimate=ng.ExactLabels(), **options)
    train_batches(opt, outer, [(X[own], Y[own])] * steps)
    structures = [row.structure for row in opt.report()]
    told = vars(ng.report_sharing(opt))
    return {"flat": flat(model), "kl": opt.state_report().kl, "report": told, "structures": structures}


def resume(share: str, **options: Any) -> dict[str, Any]:
    """Half of the steps, a checkpoint of each process, and the other half in a fresh optimizer."""
    model, own = build_seeded(build), take_part(PARTS)
    outer = wrap_model(model)
    three = [(X[own], Y[own])] * 3
    opt = ng.kfac(outer, CE, share=share, **options)
    train_batches(opt, outer, three)
    kept, start = pass_through_file(opt.state_dict()), flat(model)
    train_batches(opt, outer, three)
    end = flat(model)
    opt.detach()
    nn.utils.vector_to_parameters(start, model.parameters())
    fresh = ng.kfac(outer, CE, share=share, **options)
    fresh.load_state_dict(kept)
    train_batches(fresh, outer, three)
    return {"flat": end, "resumed": flat(model)}


TRAINED: dict[str, Callable[[], dict[str, Any]]] = {
    f"{name}, {share}": partial(train, recipe, share=share, **options)
    for name, recipe, options in (
        ("kfac", ng.kfac, {"momentum": 0.0, "steps": 14}),
        ("kfac in full", ng.kfac, {"rule": MeasuredLength(), "l2": 1e-3}),
        ("spectral", ng.kfac, {"rule": SpectralDescent()}),
        ("ekfac", ng.ekfac, {}),
        ("unitwise", ng.unitwise, {"rule": Momentum(0.5)}),
    )
    for share in ("speed", "memory")
}
RESUMED = {f"resumed, {share}": partial(resume, share) for share in ("speed", "memory")}


def recalibrate() -> dict[str, Any]:
    """Batch norms over all processes' batches, unequal numbers of them; then a loader that fails on one process."""
    model = build_seeded(lambda: nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)))
    batches = list(X.split(16))
    if count_ranks() == 1:
        return {"flat": flat_buffers(ng.recalibrate(model, batches))}
    outer, own = wrap_model(model), {0: batches[:2], 1: [], 2: batches[2:3], 3: batches[3:]}[own_rank()]
    found = flat_buffers(ng.recalibrate(outer, own))
    bare = ng.recalibrate(model, own, passes=2, group=distributed.group.WORLD)
    bad = [torch.zeros(2, 5)] if own_rank() == 2 else own
    error = catch(RuntimeError, lambda: ng.recalibrate(outer, bad))
    return {"flat": found, "twice": flat_buffers(bare), "error": error}


def flat_buffers(model: nn.Module) -> torch.Tensor:
    return torch.cat([b.double().reshape(-1) for name, b in model.named_buffers() if "running" in name])


SCENES = TRAINED | RESUMED | {"recalibrated": recalibrate}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 4, tmp_path_factory)


@pytest.mark.parametrize("name", sorted({scene.rpartition(", ")[0] for scene in TRAINED}))
def test_the_steps_are_those_of_one_process(four: list[dict[str, Any]], name: str):
    alone = TRAINED[f"{name}, speed"]()
    del alone["report"]
    for share in ("speed", "memory"):
        assert_joined([rank[f"{name}, {share}"] for rank in four], alone)


@pytest.mark.parametrize("scene", TRAINED)
def test_each_process_inverts_its_part_alone(four: list[dict[str, Any]], scene: str):
    reports = [rank[scene]["report"] for rank in four]
    whole = reports[0]["all_inversions"]
    assert sum(report["inversions"] for report in reports) == whole
    assert max(report["inversions"] for report in reports) <= 0.3 * whole
    times = {report["done"] / report["inversions"] for report in reports}
    assert len(times) == 1  # every block was inverted as often, by one process
    assert all(report["sent_bytes"]["statistics"] > 0 for report in reports)


def test_batch_norms_are_recalibrated_over_all_processes(four: list[dict[str, Any]]):
    assert_joined([rank["recalibrated"] for rank in four], recalibrate(), 1e-12)
    for i, rank in enumerate(four):
        assert torch.equal(rank["recalibrated"]["twice"], four[0]["recalibrated"]["twice"])
        assert ("mat1 and mat2" if i == 2 else "process 2 of 4 met an error") in rank["recalibrated"]["error"]


def test_memory_leaves_each_process_its_part_of_the_state(four: list[dict[str, Any]]):
    whole = TRAINED["kfac, speed"]()["report"]["state_bytes"]
    full = TRAINED["kfac in full, memory"]()["report"]["state_bytes"]
    for rank in four:
        assert rank["kfac, speed"]["report"]["state_bytes"] == whole
        assert rank["kfac in full, memory"]["report"]["state_bytes"] <= 0.3 * full


@pytest.mark.parametrize("scene", RESUMED)
def test_a_checkpoint_of_each_process_goes_on_bit_for_bit(four: list[dict[str, Any]], scene: str):
    for rank in four:
        assert torch.equal(rank[scene]["resumed"], rank[scene]["flat"])


@pytest.mark.parametrize(("n", "share"), [(1, 1.0), (63, 1.0), (64, 0.625), (101, 0.62)])
def test_strips_of_a_symmetric_matrix_are_all_of_it(n: int, share: float):
    matrices = draw(2, n, n)
    matrices = matrices + matrices.mT
    for matrix in (matrices, matrices[0]):
        flat = torch.cat([strip.reshape(-1) for strip in cut_strips(matrix)])
        assert torch.equal(join_strips(flat, matrix.shape), matrix)
        assert flat.numel() / matrix.numel() == pytest.approx(share, abs=0.01)


def test_the_dearest_block_goes_first_to_whoever_has_least():
    costs = {name: Cost(work, 1.0) for name, work in zip("abcdef", (9.0, 7.0, 4.0, 4.0, 3.0, 1.0), strict=True)}
    owners = balance(costs, costs, {}, 3, False)
    assert owners == {"a": 0, "b": 1, "c": 2, "d": 2, "e": 1, "f": 2}


@pytest.mark.parametrize("share", ["all", 0, True, None])
def test_another_way_to_share_is_refused(share: Any):
    with pytest.raises(ValueError, match=r'share is .*"speed".*"memory"'):
        ng.kfac(build(), CE, share=share)


def test_a_budget_decides_between_speed_and_memory():
    costs = {"a": Cost(8.0, 100.0), "b": Cost(8.0, 100.0)}
    for share, found in (("auto", "speed"), (1000, "memory"), (1600, "speed"), ("memory", "memory")):
        owners = Owners(Processes(size=2), *check_share(share))
        owners.assign(costs, 8)
        assert owners.share == found
