"""What comes to a family's door: log-partitions outside of the domain, shapes that do not fit, empty batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import natgrad as ng
from natgrad.families import (
    ChiSquare,
    ComplexNormal,
    DiagonalNormal,
    FixedCovarianceNormal,
    FixedMeanNormal,
    Geometric,
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

INSIDE = {
    "bernoulli": (ng.Bernoulli(2), [0.3, -1.0]),
    "categorical": (ng.Categorical(3), [0.3, -1.0, 0.5]),
    "multinomial": (ng.Multinomial(4, 3), [0.3, -1.0, 0.5]),
    "poisson": (ng.Poisson(2), [0.3, -1.0]),
    "exponential": (ng.Exponential(), [-0.7]),
    "gamma": (ng.Gamma(), [0.4, -2.0]),
    "beta": (ng.Beta(), [0.4, -0.5]),
    "dirichlet": (ng.Dirichlet(3), [0.4, -0.5, 2.0]),
    "diagonal normal": (DiagonalNormal(1), [0.4, -0.5]),
    "normal": (ng.MultivariateNormal(2), [0.4, -0.5, -1.0, -0.8, 0.3]),
    "fixed mean": (FixedMeanNormal(torch.zeros(2).double()), [-1.0, -0.8, 0.3]),
    "fixed covariance": (FixedCovarianceNormal(torch.eye(2).double()), [0.4, -0.5]),
    "ising": (ng.Ising(2), [0.4, -0.5, 0.2]),
    "product": (ng.Product((ng.Gamma(), 1), (ng.Poisson(1), 1)), [0.4, -2.0, 0.1]),
    "sub-model": (ng.SubModel(ng.Ising(2), [0, 2]), [0.4, 0.2]),
    "log-normal": (LogNormal(), [0.4, -0.5]),
    "inverse gamma": (InverseGamma(), [0.4, -2.0]),
    "weibull": (Weibull(1.5), [-0.7]),
    "rayleigh": (Rayleigh(), [-0.7]),
    "chi-square": (ChiSquare(), [0.7]),
    "inverse gaussian": (InverseGaussian(), [-0.7, -1.0]),
    "negative binomial": (NegativeBinomial(3), [-0.7]),
    "geometric": (Geometric(), [-0.7]),
    "logarithmic": (Logarithmic(), [-0.7]),
    "sphere": (VonMisesFisher(3), [0.4, -0.5, 2.0]),
    "scatter": (Wishart(2), [0.4, -0.5, -1.0, 0.3]),
    "complex": (ComplexNormal(1), [0.4, -0.5, -1.0]),
}
OUTSIDE = {
    "exponential": (ng.Exponential(), [0.5]),
    "gamma": (ng.Gamma(), [-1.5, -1.0]),
    "gamma's rate": (ng.Gamma(), [0.5, 1.0]),
    "beta": (ng.Beta(), [-1.5, 0.0]),
    "dirichlet": (ng.Dirichlet(3), [0.0, -1.5, 0.0]),  # where lgamma has finite values
    "diagonal normal": (DiagonalNormal(1), [1.0, 0.5]),
    "normal": (ng.MultivariateNormal(2), [0.0, 0.0, -0.5, -0.5, 2.0]),
    "fixed mean": (FixedMeanNormal(torch.zeros(2).double()), [-0.5, -0.5, 2.0]),
    "product": (ng.Product((ng.Gamma(), 1), (ng.Poisson(1), 1)), [0.5, 1.0, 0.0]),
    "log-normal": (LogNormal(), [0.4, 0.5]),
    "inverse gamma": (InverseGamma(), [0.4, 2.0]),
    "weibull": (Weibull(1.5), [0.7]),
    "chi-square": (ChiSquare(), [-1.5]),
    "inverse gaussian": (InverseGaussian(), [0.7, -1.0]),
    "negative binomial": (NegativeBinomial(3), [0.7]),
    "logarithmic": (Logarithmic(), [0.7]),
    "scatter": (Wishart(2), [-1.5, -0.5, -1.0, 0.3]),
    "scatter's scale": (Wishart(2), [0.5, -0.5, -1.0, 2.0]),
    "complex": (ComplexNormal(1), [0.4, -0.5, 1.0]),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_the_log_partition_is_infinite_outside(case):
    family, numbers = OUTSIDE[case]
    theta = torch.tensor(numbers, dtype=torch.float64)
    assert float(family.log_partition(theta)) == torch.inf
    with pytest.raises(ValueError, match="outside"):
        family.expectation(theta)


@pytest.mark.parametrize("case", INSIDE)
def test_theta_that_does_not_fit_is_told_everywhere(case):
    family, numbers = INSIDE[case]
    theta = torch.tensor(numbers, dtype=torch.float64)
    long = torch.cat([theta, theta[:1]])
    for ask in (family.log_partition, family.entropy, family.fisher, lambda t: family.kl(t, t)):
        with pytest.raises(ValueError, match=r"has shape .* expected"):
            ask(long)
        with pytest.raises(TypeError, match="ndarray, expected a floating-point tensor"):
            ask(np.asarray(numbers))
        with pytest.raises(TypeError, match=r"torch.int64, expected a floating-point tensor"):
            ask(torch.zeros(len(theta), dtype=torch.long))
