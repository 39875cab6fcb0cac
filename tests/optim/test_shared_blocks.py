"""Blocks shared out over four processes: the same steps, a part of the inversions and of the state on each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import assert_close, build_seeded, draw
from optim_models import flat
from process_ranks import count_ranks, own_rank, run_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from natgrad.optim.processes import Cost, balance, cut_strips, join_strips
from natgrad.rules import MeasuredLength, Momentum, SpectralDescent

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
)

X = draw(64, 12)
Y = X[:, :5].argmax(1)
CE = nn.CrossEntropyLoss()


def build() -> nn.Module:
    """Eight layers of a size, as a transformer has them."""
    sizes = [12, *[14] * 7, 5]
    pairs = pairwise(sizes)
    return nn.Sequential(*[part for i, o in pairs for part in (nn.Linear(i, o), nn.LayerNorm(o), nn.Tanh())]).double()


def train(recipe: Callable[..., Any], steps: int = 6, **options: Any) -> dict[str, Any]:
    model = build_seeded(build)
    outer = DistributedDataParallel(model) if count_ranks() > 1 else model
    opt = recipe(outer, CE, estimate=ng.ExactLabels(), **options)
    own = slice(None) if count_ranks() == 1 else slice(16 * own_rank(), 16 * own_rank() + 16)
    updates, sent = [], []
    for _ in range(steps):
        opt.zero_grad()
        opt.loss(outer(X[own]), Y[own]).backward()
        opt.step()
        updates.append(opt._live.state.pace.updated == opt._live.state.step - 1)
        sent.append(dict(ng.report_sharing(opt).sent_bytes))
    found = ng.report_sharing(opt)
    return {
        "flat": flat(model),
        "kl": opt.state_report().kl,
        "report": vars(found),
        "updates": updates,
        "sent": sent,
        "structures": [row.structure for row in opt.report()],
    }


def resume(share: str, **options: Any) -> dict[str, Any]:
    """Half of the steps, a checkpoint of each process, and the other half in a fresh optimizer."""
    model = build_seeded(build)
    outer = DistributedDataParallel(model)
    own = slice(16 * own_rank(), 16 * own_rank() + 16)

    def go(opt: Any, steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            opt.loss(outer(X[own]), Y[own]).backward()
            opt.step()

    opt = ng.kfac(outer, CE, share=share, **options)
    go(opt, 3)
    kept, start = opt.state_dict(), flat(model)
    kept = torch.load(save(kept), weights_only=True)
    go(opt, 3)
    end = flat(model)
    opt.detach()
    nn.utils.vector_to_parameters(start, model.parameters())
    fresh = ng.kfac(outer, CE, share=share, **options)
    fresh.load_state_dict(kept)
    go(fresh, 3)
    return {"flat": end, "resumed": flat(model)}


def save(state: Any) -> Any:
    """In memory."""
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


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
WIDTHS = [12, 14, 14, 5]


def count(share: str) -> dict[str, Any]:
    """The messages of one step with an update, of linear layers alone."""
    model = nn.Sequential(*[nn.Linear(i, o) for i, o in pairwise(WIDTHS)])
    outer = DistributedDataParallel(model)
    opt = ng.kfac(outer, CE, share=share, update_every=1, invert_every=1)
    own, sent = slice(16 * own_rank(), 16 * own_rank() + 16), []
    for _ in range(2):
        opt.zero_grad()
        opt.loss(outer(X[own].float()), Y[own]).backward()
        opt.step()
        sent.append(dict(ng.report_sharing(opt).sent_bytes))
    grown = {kind: size - sent[0].get(kind, 0) for kind, size in sent[1].items()}
    opt.loss(outer(X[own].float()), Y[own])
    kept = opt.report()  # statistics are on their way, and each process may wait for them alone
    return {"report": vars(ng.report_sharing(opt)), "grown": grown, "rows": len(kept)}


def recalibrate() -> dict[str, Any]:
    """Batch norms over all processes' batches, unequal numbers of them; then a loader that fails on one process."""
    model = build_seeded(lambda: nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)))
    batches = list(X.split(16))
    if count_ranks() == 1:
        return {"norms": flat_buffers(ng.recalibrate(model, batches))}
    outer, own = DistributedDataParallel(model), {0: batches[:2], 1: [], 2: batches[2:3], 3: batches[3:]}[own_rank()]
    found = flat_buffers(ng.recalibrate(outer, own))
    bare = ng.recalibrate(model, own, passes=2, group=distributed.group.WORLD)
    bad = [torch.zeros(2, 5)] if own_rank() == 2 else own
    try:
        ng.recalibrate(outer, bad)
        error = ""
    except RuntimeError as trouble:
        error = str(trouble)
    return {"norms": found, "twice": flat_buffers(bare), "error": error}


def flat_buffers(model: nn.Module) -> torch.Tensor:
    return torch.cat([b.double().reshape(-1) for name, b in model.named_buffers() if "running" in name])


COUNTED = {f"counted, {share}": partial(count, share) for share in ("speed", "memory")}
SCENES = TRAINED | RESUMED | COUNTED | {"recalibrated": recalibrate}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(__name__, 4, tmp_path_factory)


@pytest.mark.parametrize("scene", TRAINED)
def test_the_steps_are_those_of_one_process(four: list[dict[str, Any]], scene: str):
    alone = TRAINED[scene]()
    for rank in four:
        assert torch.equal(rank[scene]["flat"], four[0][scene]["flat"])
        assert rank[scene]["structures"] == alone["structures"]
    assert_close(four[0][scene]["flat"], alone["flat"], 1e-9)
    assert four[0][scene]["kl"] == pytest.approx(alone["kl"], rel=1e-8, nan_ok=True)


@pytest.mark.parametrize("scene", TRAINED)
def test_each_process_inverts_its_part_alone(four: list[dict[str, Any]], scene: str):
    reports = [rank[scene]["report"] for rank in four]
    whole = reports[0]["all_inversions"]
    assert sum(report["inversions"] for report in reports) == whole
    assert max(report["inversions"] for report in reports) <= 0.3 * whole
    times = {report["done"] / report["inversions"] for report in reports}
    assert len(times) == 1  # every block was inverted as often, by one process


def test_batch_norms_are_recalibrated_over_all_processes(four: list[dict[str, Any]]):
    alone = recalibrate()["norms"]
    for i, rank in enumerate(four):
        assert_close(rank["recalibrated"]["norms"], alone, 1e-12)
        assert torch.equal(rank["recalibrated"]["norms"], four[0]["recalibrated"]["norms"])
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
    matrix = draw(2, n, n)
    matrix = matrix + matrix.mT
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
    from natgrad.optim.processes import Owners, Processes, check_share

    costs = {"a": Cost(8.0, 100.0), "b": Cost(8.0, 100.0)}
    for share, found in (("auto", "speed"), (1000, "memory"), (1600, "speed"), ("memory", "memory")):
        owners = Owners(Processes(size=2), *check_share(share))
        owners.assign(costs, 8)
        assert owners.share == found
