"""Positive semi-definite linear algebra, where it is well and where it is not."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close, draw

from natgrad.ground.linalg import (
    all_finite,
    cholesky,
    gram,
    psd_root,
    pseudo_solve,
    shift_diagonal,
    solve_psd,
    take_absolute,
    woodbury_solve,
)


def spd(n: int, seed: int = 0) -> torch.Tensor:
    factor = draw(n, n, seed=seed)
    return factor @ factor.mT + torch.eye(n, dtype=F64)


def deficient(n: int = 8, rank: int = 3, seed: int = 1) -> torch.Tensor:
    factor = draw(n, rank, seed=seed)
    return factor @ factor.mT


@pytest.mark.parametrize("n", [1, 2, 9, 260])
def test_cholesky_of_a_definite_matrix_takes_no_jitter(n):
    matrix = spd(n)
    with torch.device("meta"):  # the default device is not that of the matrix
        factor = cholesky(matrix)
    assert (factor.rung, factor.jitter, factor.failed) == (0, 0.0, False)
    assert_close(factor.lower @ factor.lower.mT, matrix)
    for rhs in (draw(n), draw(n, 3)):
        assert_close(matrix @ factor.solve(rhs), rhs, 1e-11)


def test_the_ladder_factors_what_it_says():
    matrix = deficient()
    matrix = matrix - 1e-12 * matrix.trace() * torch.eye(8, dtype=F64)  # slightly indefinite, as round-off makes it
    factor = cholesky(matrix)
    assert not factor.failed
    assert factor.rung > 0
    assert_close(factor.lower @ factor.lower.mT, shift_diagonal(matrix, factor.jitter))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_matrix_fails_without_raising(bad):
    matrix = spd(3)
    matrix[1, 1] = bad
    assert cholesky(matrix).failed
    assert not torch.isfinite(solve_psd(matrix, draw(3))).any()


@pytest.mark.parametrize("shape", [(8,), (8, 2)])
def test_pseudo_solve_is_the_pseudo_inverse(shape):
    rhs = draw(*shape, seed=5)
    assert_close(
        pseudo_solve(deficient(), rhs), torch.linalg.pinv(deficient(), hermitian=True, rtol=1e-12) @ rhs, 1e-10
    )


@pytest.mark.parametrize("damping", [0.0, 1e-6, 0.5])
def test_solve_psd_solves(damping):
    matrix, rhs = spd(7), draw(7, 2)
    assert_close(shift_diagonal(matrix, damping) @ solve_psd(matrix, rhs, damping), rhs, 1e-11)


@pytest.mark.parametrize("seed", range(20))
def test_solve_psd_of_a_singular_matrix_has_minimum_norm(seed):
    matrix = deficient(seed=seed)
    rhs = matrix @ draw(8, seed=seed + 100)
    # the pseudo-inverse loses as many digits as the smallest kept eigenvalue is small
    expected = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-12) @ rhs
    assert_close(solve_psd(matrix, rhs), expected, 1e-9)


def test_a_rank_that_is_lost_behind_small_pivots_is_seen():
    """Of 300 matrices of rank n - 1 some eight have a leading block so nearly singular that no pivot is round-off."""
    for seed in range(300):
        root = draw(10, 9, seed=seed)
        rhs, inverse = root @ draw(9, seed=seed + 1000), torch.linalg.pinv(root)
        assert_close(solve_psd(root @ root.mT, rhs), inverse.mT @ (inverse @ rhs), 1e-5)


@pytest.mark.parametrize(
    "matrix", [spd(5), deficient(), torch.zeros(2, 2, dtype=F64), torch.stack([spd(3), spd(3, 1)])]
)
def test_the_root_multiplies_back(matrix):
    root = psd_root(matrix)
    assert_close(root @ root.mT, matrix, 1e-13)


@pytest.mark.parametrize("shape", [(9, 3), (3, 9), (5, 5)])
@pytest.mark.parametrize("damping", [1e-8, 1e-3, 1.0, 1e4])
def test_woodbury_is_the_damped_solve(shape, damping):
    root, rhs = draw(*shape), draw(shape[0], 2, seed=1)
    vectors, values, _ = torch.linalg.svd(root, full_matrices=True)
    spectrum = torch.zeros(shape[0], 1, dtype=F64)
    spectrum[: len(values), 0] = values.square()
    expected = vectors @ ((vectors.mT @ rhs) / (spectrum + damping))
    assert_close(woodbury_solve(root, rhs, damping), expected, 1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_entry_that_is_not_finite_is_found(bad):
    vector = draw(9).to(torch.float32)
    assert all_finite(vector)
    vector[3] = bad
    assert not all_finite(vector)
    vector[5] = -bad  # inf - inf is no number either
    assert not all_finite(vector)


@pytest.mark.parametrize("columns", [3, 255, 256, 257, 700])
def test_gram_is_the_product_whatever_its_blocks(columns: int):
    rows = draw(9, columns)
    found = gram(rows, 0.3)
    assert_close(found, 0.3 * rows.mT @ rows, 1e-14)
    assert_close(gram(rows[:, ::2]), rows[:, ::2].mT @ rows[:, ::2], 1e-14)


def test_gram_has_a_derivative():
    rows = draw(2, 3)
    assert_close(gram(rows.clone().requires_grad_(), 0.3).detach(), gram(rows, 0.3), 1e-14)
    assert torch.autograd.gradcheck(lambda rows: gram(rows, 0.3), rows.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_absolute_value_of_an_indefinite_matrix_keeps_eigenvectors(dtype: torch.dtype):
    turn, values = torch.linalg.qr(draw(24, 24))[0], torch.linspace(-3, 5, 24, dtype=F64)
    found = take_absolute(((turn * values) @ turn.mT).to(dtype)).double()
    assert float((found - (turn * values.abs()) @ turn.mT).abs().max()) <= 24 * torch.finfo(dtype).eps * 5
