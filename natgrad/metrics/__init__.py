"""Which G."""

from natgrad.ground.messages import resolve_names
from natgrad.metrics.base import Diagonals, Metric, PullbackMetric
from natgrad.metrics.divergence import DivergenceMetric, divergence, kl
from natgrad.metrics.fisher import (
    Covariance,
    EmpiricalFisher,
    Fisher,
    SampledFisher,
    covariance,
    empirical_fisher,
    fisher,
    observed_fisher,
    sampled_fisher,
)
from natgrad.metrics.gauss_newton import GaussNewton, Hessian, LossGaussNewton, gauss_newton, hessian
from natgrad.metrics.geometric_tensor import GeometricTensor, geometric_tensor, lay_out_amplitudes
from natgrad.metrics.information import (
    EmpiricalInformation,
    ExpectedInformation,
    Information,
    ObservedInformation,
    SampledInformation,
)
from natgrad.metrics.metric_sum import MetricSum, sum_metrics
from natgrad.metrics.score import Langevin, RatioMetric, ScoreMetric, ratio_metric, score_metric
from natgrad.metrics.transport import RBF, TransportMetric, transport_metric

__all__ = [
    "RBF",
    "Covariance",
    "Diagonals",
    "DivergenceMetric",
    "EmpiricalFisher",
    "EmpiricalInformation",
    "ExpectedInformation",
    "Fisher",
    "GaussNewton",
    "GeometricTensor",
    "Hessian",
    "Information",
    "Langevin",
    "LossGaussNewton",
    "Metric",
    "MetricSum",
    "ObservedInformation",
    "PullbackMetric",
    "RatioMetric",
    "SampledFisher",
    "SampledInformation",
    "ScoreMetric",
    "TransportMetric",
    "covariance",
    "divergence",
    "empirical_fisher",
    "fisher",
    "gauss_newton",
    "geometric_tensor",
    "hessian",
    "kl",
    "lay_out_amplitudes",
    "observed_fisher",
    "ratio_metric",
    "sampled_fisher",
    "score_metric",
    "sum_metrics",
    "transport_metric",
]

resolve_names(__name__)
