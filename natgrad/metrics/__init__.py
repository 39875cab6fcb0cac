"""Floor 3: which G."""

from natgrad.metrics.base import Metric, PullbackMetric
from natgrad.metrics.covariance import Covariance, covariance
from natgrad.metrics.divergence import DivergenceMetric, divergence, kl
from natgrad.metrics.fisher import (
    EmpiricalFisher,
    Fisher,
    SampledFisher,
    empirical_fisher,
    fisher,
    sampled_fisher,
)
from natgrad.metrics.gauss_newton import GaussNewton, LossGaussNewton, gauss_newton
from natgrad.metrics.hessian import Hessian, hessian

__all__ = [
    "Covariance",
    "DivergenceMetric",
    "EmpiricalFisher",
    "Fisher",
    "GaussNewton",
    "Hessian",
    "LossGaussNewton",
    "Metric",
    "PullbackMetric",
    "SampledFisher",
    "covariance",
    "divergence",
    "empirical_fisher",
    "fisher",
    "gauss_newton",
    "hessian",
    "kl",
    "sampled_fisher",
]
