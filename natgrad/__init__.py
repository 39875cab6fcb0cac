"""natgrad: the natural gradient for PyTorch.

metric x structure x solver x damping x rule in any combination: from `fisher(model, family).at(params, x)`, an
operator to multiply and solve with, to `NaturalGradient`, a `torch.optim.Optimizer`.
"""

from natgrad import families, metrics, operators, optim, solvers, structures
from natgrad.damping import Constant, Damping, LevenbergMarquardt, Relative
from natgrad.families import Bernoulli, Categorical, Gaussian, Heads, HeteroscedasticGaussian, Likelihood, Poisson
from natgrad.metrics import (
    Metric,
    covariance,
    divergence,
    empirical_fisher,
    fisher,
    gauss_newton,
    hessian,
    kl,
    sampled_fisher,
)
from natgrad.operators import Operator
from natgrad.optim import NaturalGradient, hessian_free, krylov_subspace, natgrad_cg, natural_gradient, tonga
from natgrad.rules import LineSearch, Momentum, Rate, Rule, SubspaceSearch, TrustRegion
from natgrad.solvers import CG, Auto, Direct, KrylovSubspace, MinresQLP, SampleSpace, Solution, Solver, Status
from natgrad.spaces import Space, trainable
from natgrad.structures import (
    Dense,
    Diagonal,
    DiagonalPreconditioner,
    EigenKronecker,
    EmpiricalPreconditioner,
    Exact,
    ExactLabels,
    Kronecker,
    Preconditioner,
    Sampled,
    Structure,
    UnitWise,
)

__version__ = "0.1.0"

__all__ = [
    "CG",
    "Auto",
    "Bernoulli",
    "Categorical",
    "Constant",
    "Damping",
    "Dense",
    "Diagonal",
    "DiagonalPreconditioner",
    "Direct",
    "EigenKronecker",
    "EmpiricalPreconditioner",
    "Exact",
    "ExactLabels",
    "Gaussian",
    "Heads",
    "HeteroscedasticGaussian",
    "Kronecker",
    "KrylovSubspace",
    "LevenbergMarquardt",
    "Likelihood",
    "LineSearch",
    "Metric",
    "MinresQLP",
    "Momentum",
    "NaturalGradient",
    "Operator",
    "Poisson",
    "Preconditioner",
    "Rate",
    "Relative",
    "Rule",
    "SampleSpace",
    "Sampled",
    "Solution",
    "Solver",
    "Space",
    "Status",
    "Structure",
    "SubspaceSearch",
    "TrustRegion",
    "UnitWise",
    "covariance",
    "divergence",
    "empirical_fisher",
    "families",
    "fisher",
    "gauss_newton",
    "hessian",
    "hessian_free",
    "kl",
    "krylov_subspace",
    "metrics",
    "natgrad_cg",
    "natural_gradient",
    "operators",
    "optim",
    "sampled_fisher",
    "solvers",
    "structures",
    "tonga",
    "trainable",
]
