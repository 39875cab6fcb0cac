"""What textbooks say of single families: special cases of one another, far parameters, coordinates by name."""

from __future__ import annotations

import pytest
import torch
from models import F64, draw, tensor
from torch import Tensor
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import (
    ChiSquare,
    ComplexNormal,
    DiagonalNormal,
    FixedMeanNormal,
    Geometric,
    InverseGamma,
    InverseGaussian,
    Logarithmic,
    LogNormal,
    NegativeBinomial,
    Rayleigh,
    SparseNormal,
    VonMisesFisher,
    Weibull,
    Wishart,
)
from natgrad.families.power_series import PowerSeries

GENERATOR = torch.Generator().manual_seed(0)


def test_the_logarithmic_series_is_summed_where_p_is_small_too():
    theta = tensor([-30.0, -12.0, -8.0, -7.0, -6.9, -1.0, -1e-3]).unsqueeze(1)
    expected = (-torch.log1p(-theta.exp())).log().squeeze(1)
    assert_close(Logarithmic().log_partition(theta), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("family", [NegativeBinomial(3), Geometric(), Logarithmic()], ids=repr)
def test_counts_whose_p_underflows_are_the_smallest_ones(family: PowerSeries, dtype: torch.dtype):
    """Of x above it log p(x) is x log p and what does not depend on p."""
    theta = torch.tensor([-90.0, -104.0, -746.0, -1e4], dtype=dtype).unsqueeze(1).requires_grad_()
    for count in (1.0, 5.0):
        logs = family.log_prob(theta, torch.tensor([count], dtype=dtype))
        expected = (count - family.least) * theta.squeeze(1) + family.log_base(torch.tensor([count], dtype=dtype))
        assert_close(logs, expected, rtol=10 * torch.finfo(dtype).eps, atol=0)
        slopes = torch.autograd.grad(logs.sum(), theta)[0]
        assert_close(slopes, torch.full_like(slopes, count - family.least), rtol=10 * torch.finfo(dtype).eps, atol=0)
    assert_close(family.expectation(theta), torch.full_like(theta, family.least), rtol=1e-6, atol=1e-30)
    assert_close(family.entropy(theta), torch.zeros_like(theta[:, 0]), rtol=0, atol=1e-14)
    assert_close(family.mean_log_base(theta), torch.zeros_like(theta[:, 0]), rtol=0, atol=1e-5)


def test_the_scatter_operator_has_its_inverse():
    family = Wishart(12)
    root = torch.eye(12, dtype=F64) + 0.1 * draw(12, 12)
    theta = family.from_degrees_scale(tensor(14.5), root @ root.mT)
    operator, vector = family.fisher(theta), draw(family.size)
    inverse = operator.inverse(0.0)
    assert inverse is not None
    assert_close(inverse @ (operator @ vector), vector, rtol=1e-8, atol=1e-9)
    assert_close(family.natural(family.expectation(theta)), theta, rtol=1e-9, atol=1e-9)


def test_degrees_and_scale_come_back():
    root = torch.eye(3, dtype=F64) + 0.2 * draw(2, 3, 3)
    scale, degrees = root @ root.mT, tensor([2.5, 40.0])
    for found, given in zip(
        Wishart(3).degrees_scale(Wishart(3).from_degrees_scale(degrees, scale)), (degrees, scale), strict=True
    ):
        assert_close(found, given)


@pytest.mark.parametrize("family", [Rayleigh(), Weibull(0.7)])
def test_a_scale_may_be_a_number(family):
    theta = family.from_scale(tensor(3.0))
    assert_close(family.scale(theta), tensor([3.0]))
    assert_close(family.from_scale(tensor([3.0])), theta)
    with pytest.raises(ValueError, match="scale is -1"):
        family.from_scale(tensor(-1.0))


def test_the_scale_of_a_rayleigh_is_the_deviation_of_one_coordinate():
    theta = Rayleigh().from_scale(tensor(3.0))
    assert_close(theta, tensor([-1 / (2 * 3.0**2)]))
    assert_close(Rayleigh().expectation(theta), tensor([2 * 3.0**2]))  # of the squared length


def test_complex_moments_come_back():
    covariance = torch.tensor([[2.0, 0.5 - 0.8j], [0.5 + 0.8j, 1.5]], dtype=torch.complex128)
    mean = torch.tensor([1.0 + 2.0j, -0.5j], dtype=torch.complex128)
    theta = ComplexNormal(2).from_mean_covariance(mean, covariance)
    for found, given in zip(ComplexNormal(2).mean_covariance(theta), (mean, covariance), strict=True):
        assert_close(found, given)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_draws_of_extreme_parameters_lie_in_the_support(dtype):
    cases = [
        (LogNormal(), LogNormal().from_mean_std(tensor(0.0), tensor(300.0))),
        (InverseGamma(), tensor([-0.99, -1.0])),
        (Weibull(0.01), tensor([-1.0])),
        (InverseGaussian(), InverseGaussian().from_mean_shape(tensor(1e6), tensor(1e-6))),
        (ChiSquare(), tensor([-0.999])),
        (VonMisesFisher(3), tensor([1e6, 0.0, 0.0])),
        (Wishart(3), Wishart(3).from_degrees_scale(tensor(2.01), torch.eye(3, dtype=F64))),
        (NegativeBinomial(0.01), tensor([-1e-4])),
        (Logarithmic(), tensor([-1e-6])),
    ]
    for family, theta in cases:
        x = family.sample(theta.to(dtype), 200, generator=GENERATOR)
        assert bool(torch.isfinite(family.statistics(x)).all()), repr(family)
        assert bool(torch.isfinite(family.log_prob(theta.to(dtype), x)).all()), repr(family)


def test_real_moments_are_not_those_of_a_complex_normal():
    with pytest.raises(TypeError, match="complex tensor"):
        ComplexNormal(1).from_mean_covariance(tensor([0.0]), tensor([[1.0]]))


# Normals


def graph(d: int) -> list[tuple[int, int]]:
    """A cycle with a few chords, beyond what elimination gives for nothing."""
    pairs = [*((i, (i + 1) % d) for i in range(d)), *((i, (i + d // 2) % d) for i in range(0, d // 2, 2))]
    return sorted({(min(e), max(e)) for e in pairs if e[0] != e[1]})


def sparse_theta(family: SparseNormal) -> Tensor:
    d = family.d
    off = 0.3 * draw(len(family.pairs.edges), seed=2)
    precision = family.pairs.unpack(torch.cat([torch.zeros(d, dtype=F64), off]))
    precision = precision + torch.diag(precision.abs().sum(1) + 0.1 + draw(d).abs())
    return family.from_mean_precision(draw(d), precision)


def test_the_diagonal_family_is_the_full_one_without_pairs():
    full, diagonal = ng.MultivariateNormal(3), DiagonalNormal(3)
    theta = diagonal.from_mean_std(draw(3), draw(3, seed=4).exp())
    whole = torch.cat([theta, torch.zeros(3, dtype=F64)])
    part = ng.SubModel(full, range(6), base=tensor([0, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0]))
    assert_close(diagonal.log_partition(theta), full.log_partition(whole))
    assert_close(diagonal.expectation(theta), full.expectation(whole)[:6])
    assert_close(diagonal.fisher(theta).dense(), part.covariance(theta))
    operator = diagonal.fisher(theta)
    inverse = operator.inverse(0.0)
    assert inverse is not None
    assert_close(inverse.dense(), torch.linalg.inv(operator.dense()), rtol=1e-9, atol=1e-9)
    for found, given in zip(diagonal.mean_std(theta), (draw(3), draw(3, seed=4).exp()), strict=True):
        assert_close(found, given)


@pytest.mark.parametrize("d", [2, 5, 12, 30])
def test_a_sparse_precision_comes_back(d):
    family = SparseNormal(d, graph(d))
    theta = sparse_theta(family)
    found = family.natural(family.expectation(theta))
    assert_close(found, theta, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "family",
    [ng.MultivariateNormal(2), DiagonalNormal(2), SparseNormal(2, []), FixedMeanNormal(torch.zeros(2)), ng.Normal()],
    ids=repr,
)
def test_single_precision_stays_single(family):
    x = torch.randn(200, family.d, generator=GENERATOR)
    theta = family.mle(x)
    found = [
        theta,
        family.expectation(theta),
        family.entropy(theta),
        family.log_prob(theta, x),
        family.covariance(theta),
    ]
    assert all(value.dtype == torch.float32 for value in found)
    assert family.fisher(theta).dtype == torch.float32
    assert_close(family.expectation(theta), family.statistics(x).mean(0), rtol=1e-4, atol=1e-4)


def test_a_covariance_off_the_graph_is_completed():
    """theta of Sigma: its entries on the graph are kept, the precision is zero off it."""
    family = FixedMeanNormal(torch.zeros(3, dtype=F64), [(0, 1), (1, 2)])
    given = tensor([[2.0, 0.5, 0.1], [0.5, 1.5, -0.4], [0.1, -0.4, 1.0]])
    theta = family.from_covariance(given)
    found = family.mean_covariance(theta)[1]
    kept = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])
    assert_close(found[kept], given[kept])
    assert_close(family.precision(theta)[0, 2], tensor(0.0))
    assert abs(float(found[0, 2]) - 0.5 * -0.4 / 1.5) < 1e-12  # conditional independence given the middle


CHAIN_FREE = [0, 1, 2, 3, 4, 5, 6, 8]
CHAIN = ng.SubModel(ng.MultivariateNormal(3), CHAIN_FREE, base=tensor([0, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0]))


def test_newton_refuses_moments_on_the_edge_and_beyond():
    x = 30 * draw(3)
    edge = CHAIN.statistics(x)  # one point: no spread
    for eta in (edge, edge - 1e-6 * tensor([0.0, 0, 0, 1, 1, 1, 0, 0])):
        with pytest.raises(ValueError, match="not reached"):
            CHAIN.natural(eta)
