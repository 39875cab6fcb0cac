"""Every solver gives the same numbers in every unit of G and of b that float32 can hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.operators import DenseOperator, LowRankOperator
from natgrad.solvers import Nystrom, PseudoInverse

SOLVERS = {
    "Direct": ng.Direct(),
    "CG": ng.CG(rtol=1e-6, max_steps=100),
    "MinresQLP": ng.MinresQLP(rtol=1e-6, max_steps=100),
    "KrylovSubspace": ng.KrylovSubspace(12),
    "SampleSpace": ng.SampleSpace(),
    "LeastSquares": ng.LeastSquares(),
    "Nystrom": Nystrom(4, max_steps=100),
    "PseudoInverse": PseudoInverse(1e-5),
    "Auto": ng.Auto(),
}
UNITS = (1e-25, 1e-15, 1e15, 1e25)
CASES = [(name, damping) for name in SOLVERS for damping in (0.0, 0.01) if damping or name != "Nystrom"]


def root(size: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator))[0][:, :rank]
    return basis * torch.logspace(0, -1, rank)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("name", "damping"), CASES)
@pytest.mark.parametrize("rank", [3, 7])
def test_solutions_do_not_depend_on_the_units(name: str, rank: int, damping: float, unit: float) -> None:
    solver, u = SOLVERS[name], root(7, rank)
    matrix = u.double() @ u.double().mT
    rhs = matrix @ torch.linspace(-1, 1, 7).double()
    damped = matrix + damping * torch.eye(7).double()
    expected = (torch.linalg.pinv(matrix, rtol=1e-6, hermitian=True) @ rhs) if damping == 0 else damped.inverse() @ rhs
    operators = [LowRankOperator(unit**0.5 * u)]
    if name != "LeastSquares":  # a root is what it is for
        operators.append(DenseOperator((unit * matrix).float()))
    for operator in operators:
        for scale in (1.0, unit):
            solution = ng.natural_gradient(operator, scale * rhs.float(), solver=solver, damping=unit * damping)
            value = solution.value.double() * unit / scale
            assert (value - expected).norm() < 1e-3 * expected.norm(), f"{solution.status} for {operator}, b {scale:g}"
