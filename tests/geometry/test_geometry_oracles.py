"""Fisher-Rao distances and geodesics beside those of geomstats, where it is installed."""

from __future__ import annotations

import numpy
import pytest
import torch
from models import F64, draw
from torch.testing import assert_close

from natgrad.families import Beta, Categorical, DiagonalNormal, MultivariateNormal, Poisson
from natgrad.geometry import HalfPlane, PositiveDefinite, Simplex, fisher_rao

if not hasattr(numpy, "trapz"):
    vars(numpy)["trapz"] = numpy.trapezoid  # geomstats 2.8 asks for the name that numpy 2.4 dropped


@pytest.fixture(autouse=True)
def _geomstats() -> None:  # a second or two, which processes that run no test of this file need not spend
    pytest.importorskip("geomstats", reason="geomstats is not installed: pip install geomstats")


def spd(*batch, seed=0):
    root = draw(*batch, 3, 3, seed=seed)
    return root @ root.mT + 0.5 * torch.eye(3, dtype=F64)


def theirs(value):
    return torch.as_tensor(value, dtype=F64)


def test_univariate_normals():
    from geomstats.information_geometry.normal import UnivariateNormalDistributions

    metric, plane = UnivariateNormalDistributions().metric, HalfPlane()
    point, other = (torch.stack([draw(4, seed=s), draw(4, seed=s + 1).exp()], -1) for s in (0, 2))
    assert_close(plane.distance(point, other), theirs(metric.dist(point.numpy(), other.numpy())))
    assert_close(plane.log(point, other), theirs(metric.log(other.numpy(), point.numpy())), rtol=1e-6, atol=1e-8)
    velocity = 0.3 * draw(4, 2, seed=5)
    ends = metric.exp(velocity.numpy(), point.numpy())
    assert_close(plane.exp(point, velocity), theirs(ends), rtol=1e-6, atol=1e-8)
    for family in (DiagonalNormal(1), MultivariateNormal(1)):
        ours = [torch.stack([p[:, 0] / p[:, 1] ** 2, -0.5 / p[:, 1] ** 2], -1) for p in (point, other)]
        assert_close(fisher_rao(family).distance(*ours), plane.distance(point, other))


def test_positive_definite_matrices():
    """Its affine-invariant metric is tr(S^-1 U S^-1 V), without the half."""
    from geomstats.geometry.spd_matrices import SPDAffineMetric, SPDMatrices

    space = SPDMatrices(3, equip=False)
    space.equip_with_metric(SPDAffineMetric)
    cone, point, other = PositiveDefinite(scale=1.0), spd(4, seed=1), spd(4, seed=2)
    a, b = point.numpy(), other.numpy()
    assert_close(cone.distance(point, other), theirs(space.metric.dist(a, b)))
    velocity = cone.log(point, other)
    assert_close(velocity, theirs(space.metric.log(b, a)))
    assert_close(cone.exp(point, velocity / 2), theirs(space.metric.exp(velocity.numpy() / 2, a)))
    carried = space.metric.parallel_transport(velocity.numpy(), a, end_point=b)
    assert_close(cone.transport(point, other, velocity), theirs(carried))


def test_categorical_distributions():
    from geomstats.information_geometry.categorical import CategoricalDistributions

    theta, other = draw(4, 3), draw(4, 3, seed=1)
    metric = CategoricalDistributions(2).metric
    p, q = theta.softmax(-1), other.softmax(-1)
    distance = theirs(metric.dist(p.numpy(), q.numpy()))
    assert_close(Simplex().distance(p, q), distance)
    assert_close(fisher_rao(Categorical(3)).distance(theta, other), distance)


def test_poisson_distributions():
    from geomstats.information_geometry.poisson import PoissonDistributions

    theta, other = draw(4, 1), draw(4, 1, seed=1)
    distance = PoissonDistributions().metric.squared_dist(theta.exp().numpy(), other.exp().numpy())
    assert_close(fisher_rao(Poisson(1)).distance(theta, other).square(), theirs(distance).reshape(4))


def test_beta_distributions():
    """Both integrate the geodesic equation; geomstats to fewer digits."""
    from geomstats.information_geometry.beta import BetaDistributions

    start, velocity = torch.tensor([2.0, 3.0]).double(), torch.tensor([0.5, -0.4]).double()
    end = BetaDistributions().metric.exp(velocity.numpy(), start.numpy())
    assert_close(fisher_rao(Beta()).exp(start - 1, velocity) + 1, theirs(end).reshape(2), rtol=1e-3, atol=1e-3)
