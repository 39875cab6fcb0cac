"""Orthogonal draws of a generation: each row stays a normal vector. And a run that settles above the target."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.search import IPOP
from natgrad.search.gaussian import draw_orthogonal_normals


def draw(count: int, d: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return draw_orthogonal_normals(count, torch.zeros(d, dtype=torch.float64), generator)


def test_rows_are_orthogonal_d_at_a_time():
    rows = draw(8, 3)
    for block in rows.split(3):
        products = block @ block.mT
        assert_close(products, torch.diag(products.diagonal()), atol=1e-12, rtol=0)
    assert float((rows[2] @ rows[3]).abs()) > 1e-3  # of different blocks


def run_above_zero(ftarget: float | None, restarts) -> ng.search.SearchResult:
    return ng.minimize(
        lambda X: 1 + X.square().sum(1), [3.0, -2.0, 1.0], 1.0, ftarget=ftarget, restarts=restarts, seed=0
    )


def best_of_runs(result) -> list[float]:
    return [
        min(b for b, r in zip(*map(result.history.__getitem__, ("best", "run")), strict=True) if r == k)
        for k in (0, 1, 2)
    ]


def test_a_run_that_settles_above_the_target_makes_room_for_the_next():
    """The least value is 1, the target 0: earlier runs end with 1e-5 of the distance, the last one goes on."""
    aimed, free = run_above_zero(0.0, IPOP(2, factor=1)), run_above_zero(None, IPOP(2, factor=1))
    nfev = [
        [n for n, run in zip(result.history["nfev"], result.history["run"], strict=True) if run == 0][-1]
        for result in (aimed, free)
    ]
    assert nfev[0] < 0.8 * nfev[1]
    assert best_of_runs(aimed)[0] - 1 < 1e-5
    assert best_of_runs(aimed)[0] - 1 > best_of_runs(free)[0] - 1
    assert aimed.message.startswith("tolfun")
    assert aimed.fun - 1 < 1e-11
    assert not aimed.success
