"""What comes to a family's door: log-partitions outside of the domain, shapes that do not fit, empty batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from natgrad.families import (
    Bernoulli,
    Beta,
    Categorical,
    ChiSquare,
    ComplexNormal,
    DiagonalNormal,
    Dirichlet,
    Exponential,
    FixedCovarianceNormal,
    FixedMeanNormal,
    Gamma,
    Geometric,
    InverseGamma,
    InverseGaussian,
    Ising,
    Logarithmic,
    LogNormal,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Poisson,
    Product,
    Rayleigh,
    SubModel,
    VonMisesFisher,
    Weibull,
    Wishart,
)

INSIDE = {
    "bernoulli": (Bernoulli(2), [0.3, -1.0]),
    "categorical": (Categorical(3), [0.3, -1.0, 0.5]),
    "multinomial": (Multinomial(4, 3), [0.3, -1.0, 0.5]),
    "poisson": (Poisson(2), [0.3, -1.0]),
    "exponential": (Exponential(), [-0.7]),
    "gamma": (Gamma(), [0.4, -2.0]),
    "beta": (Beta(), [0.4, -0.5]),
    "dirichlet": (Dirichlet(3), [0.4, -0.5, 2.0]),
    "diagonal normal": (DiagonalNormal(1), [0.4, -0.5]),
    "normal": (MultivariateNormal(2), [0.4, -0.5, -1.0, -0.8, 0.3]),
    "fixed mean": (FixedMeanNormal(torch.zeros(2).double()), [-1.0, -0.8, 0.3]),
    "fixed covariance": (FixedCovarianceNormal(torch.eye(2).double()), [0.4, -0.5]),
    "ising": (Ising(2), [0.4, -0.5, 0.2]),
    "product": (Product((Gamma(), 1), (Poisson(1), 1)), [0.4, -2.0, 0.1]),
    "sub-model": (SubModel(Ising(2), [0, 2]), [0.4, 0.2]),
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
    "exponential": (Exponential(), [0.5]),
    "gamma": (Gamma(), [-1.5, -1.0]),
    "gamma's rate": (Gamma(), [0.5, 1.0]),
    "beta": (Beta(), [-1.5, 0.0]),
    "dirichlet": (Dirichlet(3), [0.0, -1.5, 0.0]),  # where lgamma has finite values
    "diagonal normal": (DiagonalNormal(1), [1.0, 0.5]),
    "normal": (MultivariateNormal(2), [0.0, 0.0, -0.5, -0.5, 2.0]),
    "fixed mean": (FixedMeanNormal(torch.zeros(2).double()), [-0.5, -0.5, 2.0]),
    "product": (Product((Gamma(), 1), (Poisson(1), 1)), [0.5, 1.0, 0.0]),
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
