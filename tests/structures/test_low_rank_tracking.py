"""The online natural gradient's algebra against dense matrices, and against the published formulas."""

from __future__ import annotations

import math

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor

from natgrad.structures.online_low_rank import FLOOR, Tracked, first, orthonormal, start, track_rows


def state(size: int = 9, rank: int = 3, seed: int = 5) -> Tracked:
    """F with eigenvalues of different sizes, in directions of no special place."""
    basis = orthonormal(draw(rank, size, seed=seed))
    return Tracked(basis, torch.linspace(3.0, 0.5, rank, dtype=F64), torch.tensor(0.2, dtype=F64))


def eigenvalues(found: Tracked) -> Tensor:
    return torch.linalg.eigvalsh(found.dense())


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_an_update_within_the_span_is_exact(decay: float):
    known = state()
    rows = draw(6, 3) @ known.basis
    found = track_rows(known, rows, decay)
    assert_close(found.dense(), decay * known.dense() + rows.mT @ rows, 1e-12)


def publish_update(known: Tracked, rows: Tensor, eta: float, alpha: float) -> Tensor:
    """F' by the formulas as published, in W = E^1/2 R, with H, J, K, L and Z."""
    d, rho, n, size = known.values, known.rest, len(rows), rows.shape[1]
    rank = len(d)
    beta = rho * (1 + alpha) + alpha * d.sum() / size
    e = 1 / (beta / d + 1)
    w = e.sqrt().unsqueeze(1) * known.basis
    h = rows @ w.mT
    j, scale, level = h.mT @ rows, (1 / e.sqrt()).unsqueeze(1), torch.diag(d + rho)
    cross = (scale * (h.mT @ h) * scale.mT) @ level
    z = (eta / n) ** 2 * scale * (j @ j.mT) * scale.mT + eta / n * (1 - eta) * (cross + cross.mT)
    c, u = torch.linalg.eigh(z + (1 - eta) ** 2 * level @ level)
    c = c.clamp(min=float((rho * (1 - eta)) ** 2))
    rest = (eta / n * rows.square().sum() + (1 - eta) * (size * rho + d.sum()) - c.sqrt().sum()) / (size - rank)
    values = (c.sqrt() - rest).clamp(min=max(1e-10, FLOOR * float(c.sqrt().max())))
    beta = rest * (1 + alpha) + alpha * values.sum() / size
    grown = j + (1 - eta) * n / eta * (d + rho).unsqueeze(1) * w
    e_new = 1 / (beta / values + 1)
    w = eta / n * (e_new.sqrt() / c.sqrt()).unsqueeze(1) * (u.mT @ (scale * grown))
    basis = w / e_new.sqrt().unsqueeze(1)
    return basis.mT @ torch.diag(values) @ basis + rest * torch.eye(size, dtype=F64)


@pytest.mark.parametrize("eta", [0.05, 0.5, 0.9])
def test_the_update_is_the_published_one(eta: float):
    known, rows = state(), draw(30, 9) * torch.linspace(2, 0.3, 9, dtype=F64)
    found = track_rows(known, (eta / 30) ** 0.5 * rows, 1 - eta)
    assert_close(found.dense(), publish_update(known, rows, eta, 4.0), 1e-12)


def test_at_rest_it_is_the_leading_eigenvectors_and_the_mean_of_the_rest():
    rows = draw(50, 9) * torch.tensor([9.0, 7.0, 5.0, *[1.0] * 6], dtype=F64)  # a gap, for speed
    moment, found = rows.mT @ rows / 50, state()
    for _ in range(200):
        found = track_rows(found, (0.5 / 50) ** 0.5 * rows, 0.5)
    values, vectors = torch.linalg.eigh(moment)
    rest = values[:-3].mean()
    top = vectors[:, -3:]
    expected = top @ torch.diag(values[-3:] - rest) @ top.mT + rest * torch.eye(9, dtype=F64)
    assert_close(found.dense(), expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_directions_stay_orthonormal_through_hard_spectra(dtype: torch.dtype):
    known = start(40, 10, draw(1, 40).to(dtype))
    for seed in range(30):
        rows = draw(100, 40, seed=seed) * torch.logspace(0, -6, 40, dtype=F64)
        known = track_rows(known, rows.to(dtype), 0.9)
        assert_close(known.basis @ known.basis.mT, torch.eye(10, dtype=dtype), 50 * torch.finfo(dtype).eps)


def test_rows_without_length_and_sides_of_one_entry():
    nothing = first(torch.zeros(5, 9, dtype=F64), 3)
    assert not eigenvalues(nothing).any()
    again = track_rows(nothing, draw(5, 9), 0.9)
    assert bool(again.dense().isfinite().all())
    rows = draw(5, 1)
    single = first(rows, 20)
    assert single.basis.shape == (0, 1)
    assert_close(single.dense(), rows.mT @ rows, 1e-15)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_batch_is_not_finite_in_the_algebra(bad: float):
    rows = draw(5, 9)
    rows[2, 3] = bad
    assert not bool(track_rows(state(), rows, 0.9).dense().isfinite().any())
