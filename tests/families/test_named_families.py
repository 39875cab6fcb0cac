"""What textbooks say of single families: special cases of one another, far parameters, coordinates by name."""

from __future__ import annotations

import pytest
import torch
from models import F64, draw, tensor
from torch.testing import assert_close

from natgrad.families import (
    ChiSquare,
    ComplexNormal,
    InverseGamma,
    InverseGaussian,
    Logarithmic,
    LogNormal,
    NegativeBinomial,
    Rayleigh,
    VonMisesFisher,
    Weibull,
    Wishart,
)

GENERATOR = torch.Generator().manual_seed(0)


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Weibull(0.0), ("shape is 0",)),
        (lambda: NegativeBinomial(-1), ("failures is -1",)),
        (lambda: VonMisesFisher(1), ("d is 1", ">= 2")),
        (lambda: Wishart(0), ("d is 0",)),
        (lambda: ComplexNormal(0), ("d is 0",)),
        (lambda: LogNormal().statistics(tensor([0.0])), ("x > 0",)),
        (lambda: InverseGaussian().log_prob(tensor([-1.0, -1.0]), tensor([-1.0])), ("x > 0",)),
        (lambda: InverseGaussian().natural(tensor([2.0, 0.5])), ("1 / shape",)),
        (lambda: InverseGaussian().from_mean_shape(tensor(-1.0), tensor(1.0)), ("mean is -1",)),
        (lambda: NegativeBinomial(2).statistics(tensor([1.5])), ("whole numbers >= 0",)),
        (lambda: Logarithmic().statistics(tensor([0.0])), ("whole numbers >= 1",)),
        (lambda: NegativeBinomial(2).natural(tensor([0.0])), ("above 0",)),
        (lambda: VonMisesFisher(3).statistics(tensor([1.0, 1.0, 0.0])), ("length one",)),
        (lambda: VonMisesFisher(2).natural(tensor([0.6, 0.8])), ("shorter than one",)),
        (lambda: Wishart(2).statistics(tensor([[1.0, 0.5], [0.2, 1.0]])), ("symmetric",)),
        (lambda: Wishart(2).statistics(tensor([[1.0, 2.0], [2.0, 1.0]])), ("positive definite",)),
        (lambda: Wishart(2).natural(tensor([0.1, 1.0, 1.0, 0.0])), ("E[log det x]",)),
        (lambda: Wishart(2).from_degrees_scale(tensor(1.0), torch.eye(2)), ("degrees is 1", "above d - 1 = 1")),
        (lambda: ComplexNormal(2).statistics(tensor([1.0, 2.0])), ("torch.float64", "complex")),
        (lambda: ComplexNormal(1).natural(tensor([1.0, 0.0, 0.5])), ("positive definite",)),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_real_moments_are_not_those_of_a_complex_normal():
    with pytest.raises(TypeError, match="complex tensor"):
        ComplexNormal(1).from_mean_covariance(tensor([0.0]), tensor([[1.0]]))
