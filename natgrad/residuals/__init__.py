"""Physics-informed networks: nonlinear least squares over named residuals, and derivatives of networks in a point.

`optimizer` has the optimiser and its step, `differential` the operators to write residuals with. Below them: `system`
and `terms` (rows of the Jacobian). `natgrad.ground.jets` has the derivatives.
"""

from natgrad.ground.messages import make_callable, resolve_names
from natgrad.residuals.constrained import HardConstraint, Periodic
from natgrad.residuals.differential import (
    Field,
    biharmonic,
    divergence_of,
    grad,
    jacobian,
    laplacian,
    time_derivative,
)
from natgrad.residuals.optimizer import ResidualHistory, ResidualOptimizer, residuals
from natgrad.residuals.point_weights import Causal, PointWeights, WhereLarge, draw_where_large
from natgrad.residuals.system import ResidualMetric

__all__ = [
    "Causal",
    "Field",
    "HardConstraint",
    "Periodic",
    "PointWeights",
    "ResidualHistory",
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

resolve_names(__name__)
make_callable(__name__, residuals)  # ng.residuals(...)
