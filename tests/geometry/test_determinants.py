"""Families whose log partition has a determinant inside: Fisher matrix and Christoffel symbols of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import assert_close
from torch import Tensor

from natgrad.families import ExponentialFamily
from natgrad.geometry.boundary_mesh import contract_christoffel
from natgrad.ground.linalg import factor_or_nan


class MatrixFamily(ExponentialFamily):
    """psi(theta) = -log det M, with M linear in theta: a Wishart distribution but for constants.

    Args:
        side: Of M.
        measure: M -> log det M.
    """

    def __init__(self, side: int, measure: Callable[[Tensor], Tensor]) -> None:
        rows, columns = torch.triu_indices(side, side)
        self.size, self.side, self.measure = len(rows), side, measure
        self.units = torch.zeros(self.size, side, side, dtype=torch.float64)
        for unit, i, j in zip(self.units, rows, columns, strict=True):
            unit[i, j] = unit[j, i] = 1

    def statistics(self, x: Tensor) -> Tensor:
        return -torch.einsum("...ij,nij->...n", x, self.units)

    def log_partition(self, theta: Tensor) -> Tensor:
        return -self.measure((theta.unsqueeze(-1) * self.units.flatten(1)).sum(-2).unflatten(-1, (self.side,) * 2))

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        raise NotImplementedError

    def points(self) -> Tensor:
        """Three theta of positive definite M."""
        noise = torch.randn(3, self.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return 3 * self.units.diagonal(dim1=1, dim2=2).sum(1) + 0.3 * noise


def by_factor(matrix: Tensor) -> Tensor:
    return 2 * factor_or_nan(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1)


WAYS = {
    "logdet": torch.logdet,
    "slogdet": lambda m: torch.linalg.slogdet(m).logabsdet,
    "det": lambda m: torch.linalg.det(m).log(),
}


@pytest.mark.parametrize("side", [3, 4])
@pytest.mark.parametrize("name", WAYS)
def test_second_and_third_derivatives_are_those_of_a_cholesky_factor(name, side):
    family, expected = MatrixFamily(side, WAYS[name]), MatrixFamily(side, by_factor)
    points = family.points()
    assert_close(family.covariance(points), expected.covariance(points), 1e-9)
    speed, vector = points.sin(), points.cos()
    found = contract_christoffel(family, points, speed, (vector,))[0]
    assert_close(found, contract_christoffel(expected, points, speed, (vector,))[0], 1e-9)
