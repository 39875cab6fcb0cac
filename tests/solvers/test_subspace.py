"""The Krylov subspace as a solver: CG's iterate, an orthonormal basis, singular and indefinite operators."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor

import natgrad as ng
from natgrad.operators import DenseOperator, DiagonalOperator


def spd(n: int, condition: float = 100.0, seed: int = 0) -> Tensor:
    q, _ = torch.linalg.qr(draw(n, n, seed=seed))
    return (q * torch.logspace(0, torch.log10(torch.tensor(condition)), n, dtype=F64)) @ q.mT


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_size_k_gives_the_kth_cg_iterate(size, damping):
    G, b = DenseOperator(spd(12)), draw(12, seed=2)
    ours = ng.KrylovSubspace(size).solve(G, b, damping=damping)
    cg = ng.CG(rtol=0, max_steps=size).solve(G, b, damping=damping)
    assert_close(ours.value, cg.value, 1e-9)
    assert ours.steps == size
    assert ours.status is ng.Status.MAX_STEPS


@pytest.mark.parametrize("size", [1, 3, 6])
def test_with_a_preconditioner_it_is_the_preconditioned_iterate(size):
    matrix, b = spd(12), draw(12, seed=2)
    P = DiagonalOperator(1 / (matrix.diagonal() + 0.1))
    ours = ng.KrylovSubspace(size, preconditioner=P).solve(DenseOperator(matrix), b, damping=0.1)
    cg = ng.CG(rtol=0, max_steps=size, preconditioner=P).solve(DenseOperator(matrix), b, damping=0.1)
    assert_close(ours.value, cg.value, 1e-9)


def test_the_basis_is_orthonormal_in_float32_and_its_images_are_images():
    matrix = spd(200, 1e6).float()
    basis = ng.KrylovSubspace(60).solve(DenseOperator(matrix), draw(200).float()).basis
    assert basis is not None
    assert basis.vectors.shape == (60, 200)
    eye = torch.eye(60)
    assert float((basis.vectors @ basis.vectors.mT - eye).abs().max()) < 1e-5
    assert_close(basis.images, basis.vectors @ matrix, 1e-5)
    weights = draw(60).float()
    assert_close(basis.image_at(weights), matrix @ basis.at(weights), 1e-4)


def test_the_image_is_that_of_the_value():
    G = DenseOperator(spd(30))
    b = draw(30, seed=1)
    solution = ng.KrylovSubspace(7).solve(G, b, damping=0.5, guess=draw(30, seed=4))
    assert_close(solution.image, G.matrix @ solution.value + 0.5 * solution.value, 1e-12)
    assert float(solution.residual) == pytest.approx(float((b - solution.image).norm()), rel=1e-12)


def test_a_guess_is_never_lost():
    G, b = spd(30, 1e4), draw(30, seed=1)

    def phi(x: Tensor) -> float:
        return float(0.5 * x @ G @ x - b @ x)

    guess = torch.linalg.solve(G, b) + 1e-3 * draw(30, seed=7)
    cold, warm = (ng.KrylovSubspace(4).solve(DenseOperator(G), b, guess=g).value for g in (None, guess))
    assert phi(warm) <= min(phi(cold), phi(guess)) + 1e-12
    assert phi(warm) < phi(cold)
    useless = ng.KrylovSubspace(4).solve(DenseOperator(G), b, guess=torch.zeros(30, dtype=F64))
    assert_close(useless.value, cold, 1e-12)


def test_a_guess_without_anything_new_does_not_make_the_space_complete():
    G, b = DenseOperator(spd(30)), draw(30, seed=1)
    for guess in (torch.zeros(30, dtype=F64), b, G @ b - 3 * b):
        solution = ng.KrylovSubspace(4).solve(G, b, guess=guess)
        assert solution.status is ng.Status.MAX_STEPS
        assert solution.steps == 4


def test_a_singular_inconsistent_system_gets_the_minimum_length_solution():
    values = torch.tensor([0.0, 0.0, 0.5, 1.0, 2.0, 4.0], dtype=F64)
    b = draw(6, seed=3)
    solution = ng.KrylovSubspace(6).solve(DenseOperator(torch.diag(values)), b)
    assert_close(solution.value, torch.where(values > 0, b / values.clamp(min=1e-9), 0), 1e-10)
    assert solution.status is ng.Status.LEAST_SQUARES


def test_negative_curvature_is_left_out_or_taken_absolutely():
    values = torch.tensor([-2.0, -0.5, 1.0, 3.0], dtype=F64)
    b = draw(4, seed=5)
    G = DenseOperator(torch.diag(values))
    left_out = ng.KrylovSubspace(4).solve(G, b, damping=0.1)
    assert left_out.status is ng.Status.NEGATIVE_CURVATURE
    assert_close(left_out.value, torch.where(values > 0, b / (values + 0.1), 0), 1e-12)
    safe = ng.KrylovSubspace(4, absolute=True).solve(G, b, damping=0.1)
    assert_close(safe.value, b / (values.abs() + 0.1), 1e-12)
    assert_close(safe.value, ng.Direct(absolute=True).solve(G, b, damping=0.1).value, 1e-12)


def test_the_absolute_step_reports_the_system_that_it_solves():
    matrix = torch.diag(torch.tensor([-2.0, -0.5, 1.0, 3.0, 5.0], dtype=F64))
    b = draw(5, seed=5)
    whole = ng.KrylovSubspace(5, absolute=True).solve(DenseOperator(matrix), b, damping=0.1)
    assert whole.status is ng.Status.CONVERGED
    assert_close(whole.image, matrix.abs() @ whole.value + 0.1 * whole.value, 1e-11)
    part = ng.KrylovSubspace(2, absolute=True).solve(DenseOperator(matrix), b, damping=0.1)
    assert part.status is ng.Status.MAX_STEPS
    assert float(part.value @ part.image) > 0
