"""Solvers whatever the size of b and of G: the same numbers in every unit, and "converged" only where that is true."""

from __future__ import annotations

import math

import pytest
import torch
from models import F64, draw
from torch import Tensor

from natgrad import natural_gradient
from natgrad.operators import DenseOperator, DiagonalOperator, LowRankOperator, Operator
from natgrad.solvers import (
    CG,
    Auto,
    Direct,
    KrylovSubspace,
    LeastSquares,
    MinresQLP,
    Nystrom,
    PseudoInverse,
    SampleSpace,
    Solver,
    Status,
)
from natgrad.solvers.base import find_power_of_two

SIZE = 12
SOLVERS: dict[str, Solver] = {
    "Auto": Auto(),
    "Direct": Direct(),
    "Direct of absolute values": Direct(absolute=True),
    "SampleSpace": SampleSpace(),
    "CG": CG(max_steps=200),
    "CG at once": CG(max_steps=1),
    "MinresQLP": MinresQLP(max_steps=200),
    "KrylovSubspace": KrylovSubspace(dimension=SIZE),
}
SPECTRA = {
    "well conditioned": torch.linspace(1, 10, SIZE, dtype=F64),
    "condition 1e6": torch.logspace(-6, 0, SIZE, dtype=F64),
    "singular": torch.cat([torch.zeros(4, dtype=F64), torch.linspace(0.1, 10, SIZE - 4, dtype=F64)]),
    "nothing": torch.zeros(SIZE, dtype=F64),
}
ALLOWED = {torch.float32: 1e-3, F64: 1e-4}  # the loosest tolerance of the table


def operators(spectrum: str, scale: float, dtype: torch.dtype) -> dict[str, Operator]:
    turn, values = torch.linalg.qr(draw(SIZE, SIZE))[0], SPECTRA[spectrum] * scale
    root = (turn * values.sqrt()).to(dtype)
    return {
        "Dense": DenseOperator.from_symmetric(((turn * values) @ turn.mT).to(dtype)),
        "LowRank": LowRankOperator(root),
    }


def true_ratio(operator: Operator, value: Tensor, rhs: Tensor, damping: float) -> float:
    """|b - (G + damping I) x| / |b| in float64."""
    x, b = value.double(), rhs.double()
    root = operator.root() if isinstance(operator, LowRankOperator) else None
    image = operator.dense().double() @ x if root is None else root.double() @ (root.double().mT @ x)
    return float(((b - image - damping * x) / b.abs().max()).norm() / (b / b.abs().max()).norm())


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e-38), (torch.float32, 1.0), (F64, 1e200)],
)
@pytest.mark.parametrize("solver", SOLVERS)
def test_converged_means_a_small_residual(solver, dtype, size):
    """In the range of G and outside of it, damped and not, for G of ordinary, tiny and huge entries."""
    inside = draw(SIZE, seed=3)
    for spectrum in SPECTRA:
        for scale in (1.0, 1e-15, 1e15):
            for name, operator in operators(spectrum, scale, dtype).items():
                for rhs in (inside, operators(spectrum, 1.0, F64)["Dense"].mv(inside)):
                    b = (size * rhs / rhs.abs().max().clamp(min=1e-12)).to(dtype)
                    for damping in (0.0, 1e-3 * scale):
                        if (solver == "SampleSpace" and name == "Dense") or not bool(b.any()):
                            continue
                        found = SOLVERS[solver].solve(operator, b, damping=damping)
                        what = f"{spectrum}, {name}, scale {scale}, damping {damping}: {found.status}"
                        assert bool(torch.isfinite(found.value).all()), what
                        if found.status is Status.CONVERGED:
                            assert true_ratio(operator, found.value, b, damping) <= ALLOWED[dtype], what


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solution_too_large_for_its_dtype_is_none_and_says_so(solver):
    found = SOLVERS[solver].solve(DiagonalOperator(torch.full((3,), 1e-30)), torch.full((3,), 1e20))
    assert found.status is Status.NON_FINITE
    assert not found.value.any()
    assert math.isclose(float(found.residual), 1e20 * 3**0.5, rel_tol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solution_too_small_for_its_dtype_is_not_converged(solver):
    found = SOLVERS[solver].solve(DiagonalOperator(torch.full((3,), 1e30)), torch.full((3,), 1e-25))
    assert found.status is not Status.CONVERGED
    assert math.isclose(float(found.residual), 1e-25 * 3**0.5, rel_tol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_the_unit_of_a_vector_is_a_normal_number_of_its_dtype(dtype):
    kind = torch.finfo(dtype)
    for largest in (kind.max, kind.tiny, kind.tiny * kind.eps, 1.0):
        vector = torch.tensor([largest, 0.0], dtype=dtype)
        unit = find_power_of_two(vector)
        assert kind.tiny <= unit <= kind.max
        assert torch.equal(vector / unit * unit, vector)
    assert find_power_of_two(torch.zeros(2, dtype=dtype)) == 1.0


# every solver gives the same numbers in every unit of G and of b that float32 can hold

TIGHT = {
    "Direct": Direct(),
    "CG": CG(rtol=1e-6, max_steps=100),
    "MinresQLP": MinresQLP(rtol=1e-6, max_steps=100),
    "KrylovSubspace": KrylovSubspace(12),
    "SampleSpace": SampleSpace(),
    "LeastSquares": LeastSquares(),
    "Nystrom": Nystrom(4, max_steps=100),
    "PseudoInverse": PseudoInverse(1e-5),
    "Auto": Auto(),
}
UNITS = (1e-25, 1e25)
CASES = [(name, damping) for name in TIGHT for damping in (0.0, 0.01) if damping or name != "Nystrom"]


def root(size: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator))[0][:, :rank]
    return basis * torch.logspace(0, -1, rank)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("name", "damping"), CASES)
@pytest.mark.parametrize("rank", [3, 7])
def test_solutions_do_not_depend_on_the_units(name: str, rank: int, damping: float, unit: float) -> None:
    solver, u = TIGHT[name], root(7, rank)
    matrix = u.double() @ u.double().mT
    rhs = matrix @ torch.linspace(-1, 1, 7).double()
    damped = matrix + damping * torch.eye(7).double()
    expected = (torch.linalg.pinv(matrix, rtol=1e-6, hermitian=True) @ rhs) if damping == 0 else damped.inverse() @ rhs
    operators = [LowRankOperator(unit**0.5 * u)]
    if name != "LeastSquares":  # a root is what it is for
        operators.append(DenseOperator((unit * matrix).float()))
    for operator in operators:
        for scale in (1.0, unit):
            solution = natural_gradient(operator, scale * rhs.float(), solver=solver, damping=unit * damping)
            value = solution.value.double() * unit / scale
            assert (value - expected).norm() < 1e-3 * expected.norm(), f"{solution.status} for {operator}, b {scale:g}"


@pytest.mark.parametrize("solver", [Direct(), Auto()])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("unit", [1e-12, 1e-5, 1e5, 1e12])
def test_a_definite_matrix_is_solved_in_any_units_of_its_entries(solver: Solver, dtype: torch.dtype, unit: float):
    """Parameters of different units have a badly scaled matrix, in which no direction is lost."""
    base = draw(3, 3)
    matrix, rhs = base @ base.mT + torch.eye(3, dtype=F64), draw(3)
    units = torch.tensor([1.0, unit, unit**-0.5], dtype=F64)
    G, b = DenseOperator((units * matrix * units.unsqueeze(1)).to(dtype)), (units * rhs).to(dtype)
    expected = torch.linalg.solve(matrix, rhs)
    for value in (solver.solve(G, b).value, G.inverse(0.0) @ b):
        torch.testing.assert_close(units * value.double(), expected, rtol=1e3 * torch.finfo(dtype).eps, atol=0)
