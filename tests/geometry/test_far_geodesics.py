"""Ways between points that are far apart: closed forms, both ends, batches with a hopeless pair, bounded work."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from models import F64
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import Beta, Dirichlet, Gamma, MultivariateNormal, Normal
from natgrad.geometry import HalfPlane, NaturalParameters, Normals, fisher_rao

GENERATOR = torch.Generator().manual_seed(0)


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=F64)


def spread(d: int) -> Tensor:
    root = torch.linalg.qr(torch.randn(d, d, generator=GENERATOR, dtype=F64))[0]
    return root @ torch.diag(torch.randn(d, generator=GENERATOR, dtype=F64).exp()) @ root.mT


@pytest.mark.parametrize("away", [50.0, 1000.0])
def test_normals_beside_one_another_are_those_of_one_variable(away):
    family = MultivariateNormal(2)
    eye = torch.eye(2, dtype=F64)
    direction = tensor(0.6, 0.8)
    found = fisher_rao(family).distance(
        family.from_mean_covariance(0 * direction, eye), family.from_mean_covariance(away * direction, eye)
    )
    assert_close(found, HalfPlane().distance(tensor(0.0, 1.0), tensor(away, 1.0)), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("d", "away"), [(2, 30.0)])
def test_normals_tens_of_deviations_apart(d, away):
    """Never a way to the end that does not come back: the same length from both ends, and exp of log arrives."""
    family = MultivariateNormal(d)
    space = fisher_rao(family)
    points = [
        torch.stack(
            [family.from_mean_covariance(m, spread(d)) for m in far * torch.randn(2, d, generator=GENERATOR, dtype=F64)]
        )
        for far in (1.0, away)
    ]
    there, back = space.distance(*points), space.distance(*points[::-1])
    assert bool(torch.isfinite(there).all())
    assert_close(there, back, rtol=1e-7, atol=0)
    assert_close(space.exp(points[0], space.log(*points)), points[1], rtol=1e-5, atol=1e-7)


def test_a_hopeless_pair_leaves_the_others_of_its_batch_alone():
    space = Normals(2)
    start = space.join(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
    ends = torch.stack([start + tensor(m, 0, 0, 0, 0) for m in (1.0, 1e12, 2.0)])
    with pytest.warns(UserWarning, match="between 1 of 3 pairs"):
        found = space.distance(start, ends)
    alone = torch.stack([space.distance(start, ends[k]) for k in (0, 2)])
    assert torch.isnan(found).tolist() == [False, True, False]
    assert_close(found[[0, 2]], alone, rtol=1e-9, atol=0)
    for ask in (space.distance, space.log):
        with pytest.raises(ValueError, match="between 1 of 1 pairs of points within the work allowed"):
            ask(start, ends[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = space.transport(start.expand_as(ends), ends, 0.1 * ends)
    assert torch.isnan(moved).any(1).tolist() == [False, True, False]


CASES = {
    "gamma, shapes .05 and 50": (Gamma(), [-0.95, -1.0], [49.0, -1.0]),
    "beta, askew": (Beta(), [-0.9, 9.0], [19.0, 1.0]),
    "spins": (ng.Ising(2), [-0.6, 0.4, -0.8], [1.2, -0.8, 1.6]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_way_between_far_points_of_any_family_is_as_long_from_either_end(name):
    family, start, end = CASES[name]
    space = NaturalParameters(family)
    there, back = (space.distance(tensor(*a), tensor(*b)) for a, b in ((start, end), (end, start)))
    assert_close(there, back, rtol=1e-9, atol=0)


@pytest.mark.parametrize("away", [10.0, 50.0])
def test_the_equation_s_way_is_the_closed_one(away):
    """`Normal` by its geodesic equation alone, against the hyperbolic plane."""
    family, space = Normal(), NaturalParameters(Normal())
    points = [
        family.from_mean_std(tensor(0.0, 1.0), tensor(1.0, 2.0)),
        family.from_mean_std(tensor(away, 3.0), tensor(2.0, 0.5)),
    ]
    expected = HalfPlane().distance(tensor([0.0, 1.0], [1.0, 2.0]), tensor([away, 2.0], [3.0, 0.5]))
    assert_close(space.distance(*points), expected, rtol=1e-8, atol=0)


def test_beta_is_dirichlet_of_two():
    points = tensor(0.0, 1.0), tensor(2.0, 0.5)
    assert_close(fisher_rao(Beta()).distance(*points), fisher_rao(Dirichlet(2)).distance(*points), rtol=1e-8, atol=0)


def test_a_pair_beyond_the_edge_of_numbers_leaves_the_others_alone():
    space = NaturalParameters(Gamma())
    with pytest.warns(UserWarning, match="between 1 of 2 pairs of points within the work allowed"):
        found = space.distance(tensor([0.5, -1.0], [-1 + 1e-12, -1e-9]), tensor([1.5, -2.0], [1e12, -1e9]))
    assert_close(found[0], space.distance(tensor(0.5, -1.0), tensor(1.5, -2.0)), rtol=1e-7, atol=0)
    assert math.isnan(found[1])


class Open(ng.ExponentialFamily):
    """A Dirichlet family as a user writes it: its matrix is the default's, from derivatives of psi."""

    def __init__(self, k: int) -> None:
        self.size = k

    def statistics(self, x: Tensor) -> Tensor:
        return x.log()

    def log_partition(self, theta: Tensor) -> Tensor:
        return torch.lgamma(theta + 1).sum(-1) - torch.lgamma((theta + 1).sum(-1))

    def inside(self, theta: Tensor) -> Tensor:
        return (theta > -1).all(-1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("k", [3, 9])  # few statistics, and more
def test_the_equation_is_the_same_from_a_closed_matrix_and_from_derivatives(k: int):
    closed, by_psi = (ng.geometry.fisher_rao(family) for family in (ng.families.Dirichlet(k), Open(k)))
    g = torch.Generator().manual_seed(k)
    point, speed, vector = (torch.randn(k, dtype=F64, generator=g).exp() - 0.9 for _ in range(3))
    leaves, ends = [], []
    for manifold in (closed, by_psi):
        leaves.append(point.clone().requires_grad_())
        ends.append(manifold.carry(leaves[-1], speed / 8, vector))
        ends[-1][0].sum().backward()
    for first, second in zip(*ends, strict=True):  # torch's trigamma, behind the second, has nine digits
        assert_close(second, first, rtol=1e-7, atol=1e-8)
    assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-6, atol=1e-6)
