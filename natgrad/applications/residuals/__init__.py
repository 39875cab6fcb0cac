"""Physics-informed networks: nonlinear least squares over named residuals, and derivatives of networks in a point."""

from natgrad.applications.residuals.adaptive_points import draw_where_large
from natgrad.applications.residuals.differential import (
    biharmonic,
    divergence_of,
    grad,
    jacobian,
    laplacian,
    time_derivative,
)
from natgrad.applications.residuals.fields import Field
from natgrad.applications.residuals.jets import HardConstraint, Periodic
from natgrad.applications.residuals.optimizer import ResidualOptimizer
from natgrad.applications.residuals.point_weights import Causal, PointWeights, WhereLarge
from natgrad.applications.residuals.residual_terms import residuals
from natgrad.applications.residuals.system import ResidualMetric

__all__ = [
    "Causal",
    "Field",
    "HardConstraint",
    "Periodic",
    "PointWeights",
    "ResidualMetric",
    "ResidualOptimizer",
    "WhereLarge",
    "biharmonic",
    "divergence_of",
    "draw_where_large",
    "grad",
    "jacobian",
    "laplacian",
    "residuals",
    "time_derivative",
]
