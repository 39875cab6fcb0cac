"""Positive semi-definite linear algebra, where it is well and where it is not."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close, draw

from natgrad.ground.linalg import (
    KroneckerEigen,
    all_finite,
    cholesky,
    eigh,
    gram,
    inverse_psd,
    psd_root,
    pseudo_solve,
    shift_diagonal,
    solve_psd,
    symmetrise,
    take_absolute,
    woodbury_solve,
)


def spd(n: int, seed: int = 0) -> torch.Tensor:
    factor = draw(n, n, seed=seed)
    return factor @ factor.mT + torch.eye(n, dtype=F64)


def deficient(n: int = 8, rank: int = 3, seed: int = 1) -> torch.Tensor:
    factor = draw(n, rank, seed=seed)
    return factor @ factor.mT


def hilbert(n: int) -> torch.Tensor:
    """Entries 1 / (i + j + 1): condition number about 10^(1.5 n)."""
    index = torch.arange(n, dtype=F64)
    return 1 / (index.unsqueeze(0) + index.unsqueeze(1) + 1)


def test_symmetrise_is_the_symmetric_part():
    matrix = draw(2, 3, 3)
    assert torch.equal(symmetrise(matrix), (matrix + matrix.transpose(1, 2)) / 2)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_cholesky_of_a_definite_matrix_takes_no_jitter(n):
    matrix = spd(n)
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


def test_float32_climbs_by_jitter_and_answers_in_float32():
    matrix = hilbert(12).float()
    factor = cholesky(matrix)
    assert not factor.failed
    assert factor.rung > 0
    assert factor.solve(torch.ones(12)).dtype == torch.float32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_matrix_fails_without_raising(bad):
    matrix = spd(3)
    matrix[1, 1] = bad
    assert cholesky(matrix).failed
    assert not torch.isfinite(solve_psd(matrix, draw(3))).any()


def test_an_indefinite_matrix_fails_without_raising():
    assert cholesky(-torch.eye(3, dtype=F64)).failed


@pytest.mark.parametrize("shape", [(8,), (8, 2)])
def test_pseudo_solve_is_the_pseudo_inverse(shape):
    rhs = draw(*shape, seed=5)
    assert_close(
        pseudo_solve(deficient(), rhs), torch.linalg.pinv(deficient(), hermitian=True, rtol=1e-12) @ rhs, 1e-10
    )


def test_pseudo_solve_of_zero_is_zero():
    assert not pseudo_solve(torch.zeros(3, 3, dtype=F64), draw(3)).any()


@pytest.mark.parametrize("damping", [0.0, 1e-6, 0.5])
def test_solve_psd_solves(damping):
    matrix, rhs = spd(7), draw(7, 2)
    assert_close(shift_diagonal(matrix, damping) @ solve_psd(matrix, rhs, damping), rhs, 1e-11)


def test_solve_psd_of_zero_is_zero():
    assert not solve_psd(torch.zeros(3, 3, dtype=F64), torch.ones(3, dtype=F64)).any()
    assert solve_psd(torch.zeros(2, 2), torch.tensor([1.0, torch.nan])).isnan().any()


@pytest.mark.parametrize("seed", range(20))
def test_solve_psd_of_a_singular_matrix_has_minimum_norm(seed):
    matrix = deficient(seed=seed)
    rhs = matrix @ draw(8, seed=seed + 100)
    # the pseudo-inverse loses as many digits as the smallest kept eigenvalue is small
    expected = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-12) @ rhs
    assert_close(solve_psd(matrix, rhs), expected, 1e-9)


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


def test_the_kronecker_eigenbasis_applies_functions_of_the_product():
    left, right, block = spd(3), spd(4, 1), draw(3, 4)
    eigen = KroneckerEigen.of(left, right)
    assert_close(eigen.apply(eigen.values(), block), left @ block @ right)
    dense = torch.kron(left, right)
    assert_close(
        eigen.apply(1 / eigen.values(), block).reshape(-1), torch.linalg.solve(dense, block.reshape(-1)), 1e-11
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_entry_that_is_not_finite_is_found(bad):
    vector = draw(9).to(torch.float32)
    assert all_finite(vector)
    vector[3] = bad
    assert not all_finite(vector)
    vector[5] = -bad  # inf - inf is no number either
    assert not all_finite(vector)


def test_a_sum_that_overflows_is_not_taken_for_an_entry_that_does():
    assert all_finite(torch.full((9,), torch.finfo(torch.float32).max))


@pytest.mark.parametrize("columns", [3, 255, 256, 257, 700])
def test_gram_is_the_product_whatever_its_blocks(columns: int):
    rows = draw(9, columns)
    found = gram(rows, 0.3)
    assert_close(found, 0.3 * rows.mT @ rows, 1e-14)
    assert_close(gram(rows[:, ::2]), rows[:, ::2].mT @ rows[:, ::2], 1e-14)


def test_gram_has_a_derivative():
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gram(x, 0.3), (rows,))


@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6)])
def test_a_damped_inverse_leaves_the_matrix_alone(shape: tuple[int, ...]):
    factor = draw(*shape)
    matrix = factor @ factor.mT
    before = matrix.clone()
    found = inverse_psd(matrix, 0.1)
    assert torch.equal(matrix, before)
    assert_close(found @ (matrix + 0.1 * torch.eye(6, dtype=F64)), torch.eye(6, dtype=F64).expand(shape), 1e-10)


@pytest.mark.parametrize("broken", ["raises", "not finite"])
def test_eigenvectors_come_in_double_precision_where_single_fails(monkeypatch: pytest.MonkeyPatch, broken: str):
    plain, matrix = torch.linalg.eigh, torch.eye(3).addr(torch.ones(3), torch.ones(3))

    def fails_in_single(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if matrix.dtype == torch.float64:
            return plain(matrix)
        if broken == "raises":
            raise torch.linalg.LinAlgError("no convergence")
        return torch.zeros(3), torch.full((3, 3), torch.nan)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_single)
    values, vectors = eigh(matrix)
    assert values.dtype == vectors.dtype == torch.float32
    assert torch.allclose(vectors * values @ vectors.mT, matrix, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_absolute_value_of_a_semi_definite_matrix_is_the_matrix(dtype: torch.dtype):
    root = draw(40, 12)
    matrix = symmetrise(root @ root.mT).to(dtype)
    assert torch.equal(take_absolute(matrix), symmetrise(matrix))
    assert torch.equal(take_absolute(torch.zeros(3, 3, dtype=dtype)), torch.zeros(3, 3, dtype=dtype))
    assert take_absolute(torch.zeros(0, 0, dtype=dtype)).shape == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_absolute_value_of_an_indefinite_matrix_keeps_eigenvectors(dtype: torch.dtype):
    turn, values = torch.linalg.qr(draw(24, 24))[0], torch.linspace(-3, 5, 24, dtype=F64)
    found = take_absolute(((turn * values) @ turn.mT).to(dtype)).double()
    assert float((found - (turn * values.abs()) @ turn.mT).abs().max()) <= 24 * torch.finfo(dtype).eps * 5
