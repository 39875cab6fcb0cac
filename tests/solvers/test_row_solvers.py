"""Solvers in the space of rows: by the Gram matrix, the pseudo-inverse with a cut, a Nystroem sketch; and SPRING."""

from __future__ import annotations

import pytest
import torch
from models import assert_close, draw, mlp

import natgrad as ng
from natgrad.solvers import Nystrom, PseudoInverse, RowSolver

WEIGHTS = draw(9, seed=3)
MANY = ng.LeastSquares(largest=2, beyond=Nystrom(rank=20, rtol=1e-12))
"""What the least squares solver is beyond its largest matrix."""


def rows_operator(rows: int = 9) -> ng.Operator:
    model = mlp(3, 5, 1)
    return ng.fisher(model, ng.Gaussian()).at(ng.trainable(model), draw(rows, 3))


def decaying(n: int, r: int, rate: float) -> ng.Operator:
    """A metric whose kernel has eigenvalues that fall fast, as those of smooth functions do."""
    left, right = torch.linalg.qr(draw(n, r))[0], torch.linalg.qr(draw(r, r, seed=1))[0]
    root = left * rate ** torch.arange(r).double() @ right.mT
    return ng.operators.LowRankOperator(root)


@pytest.mark.parametrize("cut", [0.0, 0.2])
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_it_is_the_inverse_on_the_singular_values_above_the_cut(cut: float, damping: float):
    operator = rows_operator()
    root = operator.root()
    left, sizes, right = torch.linalg.svd(root, full_matrices=False)
    kept = sizes > max(cut, 1e-13) * sizes[0]
    assert bool(kept.all()) is (cut == 0)
    shares = torch.where(kept, 1 / (sizes.square() + damping), 0)
    found = PseudoInverse(cut).solve(operator, root @ WEIGHTS, damping=damping)
    assert_close(found.value, left @ (shares * (left.mT @ (root @ WEIGHTS))), 1e-8)
    factorised = PseudoInverse(cut).factorise(operator, damping).solve(WEIGHTS)
    assert_close(factorised.value, left @ (shares * sizes * (right @ WEIGHTS)), 1e-8)
    assert found.status is (ng.Status.CONVERGED if cut == 0 else ng.Status.LEAST_SQUARES)
    if damping:
        dense = PseudoInverse(cut).solve(ng.operators.DenseOperator(root @ root.mT), root @ WEIGHTS, damping=damping)
        assert_close(dense.value, found.value, 1e-6)


@pytest.mark.parametrize("rank", [1, 4, 9, 100])
def test_nystroem_solves_for_any_right_hand_side_and_for_weights(rank: int):
    operator, solver = rows_operator(), Nystrom(rank, rtol=1e-13)
    root, eye = operator.root(), torch.eye(operator.size).double()
    for damping in (1e-4, 1.0):
        matrix = root @ root.mT + damping * eye
        rhs = draw(operator.size, seed=5)
        assert_close(solver.solve(operator, rhs, damping=damping).value, torch.linalg.solve(matrix, rhs), 1e-7)
        found = solver.factorise(operator, damping).solve(WEIGHTS)
        assert_close(found.value, torch.linalg.solve(matrix, root @ WEIGHTS), 1e-7)
        assert found.status is ng.Status.CONVERGED


def test_the_sketch_saves_products_where_the_kernel_decays():
    operator, weights = decaying(120, 80, 0.8), draw(80)
    plain, sketched = (
        Nystrom(rank, rtol=1e-10, max_steps=500).factorise(NamedRows(operator), 1e-8).solve(weights) for rank in (1, 60)
    )
    assert sketched.status is ng.Status.CONVERGED
    assert sketched.steps < plain.steps / 4


class NamedRows(ng.Operator):
    """An operator of low rank with its root as rows."""

    def __init__(self, operator: ng.Operator) -> None:
        self.matrix = operator.root()
        self.size, self.dtype, self.device = operator.size, operator.dtype, operator.device

    @property
    def sample_rows(self):
        return ng.operators.WrittenColumns(self.matrix)

    def mv(self, vector: torch.Tensor) -> torch.Tensor:
        return self.matrix @ (self.matrix.mT @ vector)


def test_least_squares_takes_products_beyond_its_largest_matrix():
    operator = rows_operator(9)
    assert isinstance(ng.LeastSquares(largest=9).choose(operator), ng.SampleSpace)
    assert ng.LeastSquares(largest=8).choose(operator) == Nystrom()
    found = MANY.solve(operator, operator.sample_rows.mv(WEIGHTS), damping=0.1)
    assert_close(found.value, ng.LeastSquares().factorise(operator, 0.1).solve(WEIGHTS).value)


@pytest.mark.parametrize("shape", [(20, 6), (6, 9)])
def test_without_damping_a_row_that_comes_twice_gives_the_minimum_norm(shape: tuple[int, int]):
    for seed in range(20):
        root = draw(*shape, seed=seed)
        root[-1] = root[0]
        operator = NamedRows(ng.operators.LowRankOperator(torch.cat([root, root[:, :1]], dim=1)))
        weights = draw(shape[1] + 1, seed=seed + 100)
        solved = ng.LeastSquares().factorise(operator, 0.0).solve(weights)
        assert_close(solved.value, torch.linalg.pinv(operator.matrix).mT @ weights, 1e-6)


@pytest.mark.parametrize("solver", [ng.LeastSquares(), Nystrom(rank=20, rtol=1e-12), PseudoInverse(1e-3), MANY])
@pytest.mark.parametrize("rows", [9, 60])
def test_another_damping_is_another_system_with_the_same_rows(solver: RowSolver, rows: int):
    operator, weights = rows_operator(rows), draw(rows, seed=4)
    changed = solver.factorise(operator, 0.1).change_damping(2.0)
    fresh = solver.factorise(operator, 2.0).solve(weights)
    assert_close(changed.solve(weights).value, fresh.value)
    assert_close(changed.find_value(weights), fresh.value)


@pytest.mark.parametrize("solver", [Nystrom(rank=20, rtol=1e-12), PseudoInverse(0.0), MANY])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_residuals_take_the_same_steps_by_each(solver: RowSolver, momentum: float):
    net, other = mlp(1, 4, 1), mlp(1, 4, 1)
    terms = {"inside": lambda u, x: ng.laplacian(u, x) + 1, "ends": lambda u, x: u(x)}
    points = {"inside": torch.rand(6, 1, generator=torch.Generator().manual_seed(0)).double(), "ends": draw(2, 1)}
    opts = [
        ng.residuals(n, terms, solver=s, damping=1e-3, momentum=momentum) for n, s in ((net, solver), (other, None))
    ]
    for _ in range(3):
        for opt in opts:
            opt.step(**points)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), 1e-6)


# the solve in the space of outputs, where its formula cancels digits


def system(rows: int, dtype: torch.dtype = torch.float64) -> tuple[ng.Operator, torch.Tensor]:
    """A scalar net on more or fewer rows than its 36 parameters, and a gradient in the range of its metric."""
    model, x = mlp(4, 6, 1).to(dtype), draw(rows, 4).to(dtype)
    params = ng.trainable(model)
    gradients = torch.autograd.grad((model(x) - draw(rows, 1, seed=2).to(dtype)).square().mean(), list(params.values()))
    rhs = ng.Space(params).flatten(dict(zip(params, gradients, strict=True)))
    return ng.fisher(model, ng.Gaussian()).at(params, x), rhs


@pytest.mark.parametrize("rows", [12, 60])
@pytest.mark.parametrize("damping", [0.0, 1e-6, 1e-2])
def test_it_agrees_with_parameter_space_on_either_side(rows, damping):
    operator, rhs = system(rows)
    found = ng.natural_gradient(operator, rhs, solver=ng.SampleSpace(), damping=damping)
    expected = ng.natural_gradient(operator, rhs, solver=ng.Direct(), damping=damping)
    assert_close(found.value, expected.value, 1e-8)
    assert found.status is ng.Status.CONVERGED


@pytest.mark.parametrize("damping", [1e-10, 1e-8, 1e-6])
def test_single_precision_with_damping_below_round_off_stays_bounded(damping):
    operator, rhs = system(12, torch.float32)
    found = ng.natural_gradient(operator, rhs, solver=ng.SampleSpace(), damping=damping)
    assert found.residual <= rhs.norm()
    reference, exact = system(12)
    longest = ng.natural_gradient(reference, exact, solver=ng.Direct(), damping=damping).value.norm()
    assert found.value.norm() <= 2 * longest


def test_a_low_rank_pseudo_inverse_keeps_its_digits():
    root = draw(8, 3)
    rhs = root @ draw(3, seed=1)
    found = ng.operators.LowRankOperator(root).inverse(0.0).mv(rhs)
    assert_close(found, torch.linalg.pinv(root @ root.mT) @ rhs, 1e-11)


# the solve whose damping pulls to the guess


@pytest.mark.parametrize("solver", [ng.SampleSpace(), ng.Direct(), ng.CG(rtol=1e-12, max_steps=100)])
def test_damping_pulls_to_the_guess(solver):
    operator, rhs, guess, damping = ng.operators.LowRankOperator(draw(8, 3)), draw(8, seed=1), draw(8, seed=2), 0.1
    found = ng.solvers.Spring(solver).solve(operator, rhs, damping=damping, guess=guess)
    expected = ng.Direct().solve(operator, rhs + damping * guess, damping=damping)
    assert_close(found.value, expected.value, rtol=1e-8)
    assert_close(found.image, expected.image, rtol=1e-8)
    assert found.residual < 1e-8
