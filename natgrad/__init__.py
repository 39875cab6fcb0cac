"""natgrad: the natural gradient for PyTorch.

metric x structure x solver x damping x rule in any combination: from `fisher(model, family).at(params, x)`, an
operator to multiply and solve with, to `NaturalGradient`, a `torch.optim.Optimizer`.
"""

from typing import TYPE_CHECKING

from natgrad import callbacks, families, geometry, layers, metrics, operators, optim, solvers, structures
from natgrad.families import (
    Bernoulli,
    Categorical,
    Gaussian,
    Heads,
    HeteroscedasticGaussian,
    Ising,
    LogDensity,
    MultivariateNormal,
    Normal,
    Poisson,
    likelihood,
    natural_gradient_of_mean,
)
from natgrad.families import Beta as Beta
from natgrad.families import DiagonalGaussian as DiagonalGaussian
from natgrad.families import Dirichlet as Dirichlet
from natgrad.families import Exponential as Exponential
from natgrad.families import ExponentialFamily as ExponentialFamily
from natgrad.families import Gamma as Gamma
from natgrad.families import GaussianPosterior as GaussianPosterior
from natgrad.families import Likelihood as Likelihood
from natgrad.families import MarkovField as MarkovField
from natgrad.families import Multinomial as Multinomial
from natgrad.families import Product as Product
from natgrad.families import SubModel as SubModel
from natgrad.families import exact_natural_gradient_of_mean as exact_natural_gradient_of_mean
from natgrad.ground.densities import Density as Density
from natgrad.ground.densities import Score
from natgrad.ground.derivatives import exact_derivatives as exact_derivatives
from natgrad.ground.messages import find_name
from natgrad.ground.spaces import Space, positive, trainable
from natgrad.layers import recalibrate as recalibrate
from natgrad.metrics import Langevin as Langevin
from natgrad.metrics import Metric as Metric
from natgrad.metrics import (
    covariance,
    empirical_fisher,
    fisher,
    gauss_newton,
    hessian,
    observed_fisher,
    ratio_metric,
    sampled_fisher,
    score_metric,
    transport_metric,
)
from natgrad.metrics import divergence as divergence
from natgrad.metrics import kl as kl
from natgrad.operators import Operator as Operator
from natgrad.optim import MirrorDescent as MirrorDescent
from natgrad.optim import (
    NaturalGradient,
    ang,
    diagonal,
    ekfac,
    hessian_free,
    kfac,
    krylov_subspace,
    natural_gradient,
    online_ng,
    tonga,
    unitwise,
)
from natgrad.optim import StructuredNaturalGradient as StructuredNaturalGradient
from natgrad.optim import load_checkpoint as load_checkpoint
from natgrad.optim import natgrad_cg as natgrad_cg
from natgrad.optim import report_sharing as report_sharing
from natgrad.optim import save_checkpoint as save_checkpoint
from natgrad.rules import Constant, LevenbergMarquardt, LineSearch, Momentum, Rate, Relative, TrustRegion
from natgrad.rules import Damping as Damping
from natgrad.rules import MeasuredLength as MeasuredLength
from natgrad.rules import OnlineRadius as OnlineRadius
from natgrad.rules import Rule as Rule
from natgrad.rules import SubspaceSearch as SubspaceSearch
from natgrad.solvers import CG, Auto, Direct, KrylovSubspace, MinresQLP, SampleSpace
from natgrad.solvers import LeastSquares as LeastSquares
from natgrad.solvers import Solution as Solution
from natgrad.solvers import Solver as Solver
from natgrad.solvers import Status as Status
from natgrad.structures import AdaptiveInverse, Dense, Diagonal, EigenKronecker, Exact, Kronecker, UnitWise
from natgrad.structures import Averaged as Averaged
from natgrad.structures import Blocks as Blocks
from natgrad.structures import DiagonalPreconditioner as DiagonalPreconditioner
from natgrad.structures import Empirical as Empirical
from natgrad.structures import EmpiricalPreconditioner as EmpiricalPreconditioner
from natgrad.structures import ExactLabels as ExactLabels
from natgrad.structures import FirstOrder as FirstOrder
from natgrad.structures import LowRankCovariance as LowRankCovariance
from natgrad.structures import OnlineLowRank as OnlineLowRank
from natgrad.structures import Preconditioner as Preconditioner
from natgrad.structures import Sampled as Sampled
from natgrad.structures import Structure as Structure
from natgrad.structures import Update as Update
from natgrad.structures import Woodbury as Woodbury

if TYPE_CHECKING:  # a field is loaded when its name is first asked for: see `FIELDS`
    from natgrad import applications
    from natgrad.applications import Boltzmann as Boltzmann
    from natgrad.applications import GaussMarkov as GaussMarkov
    from natgrad.applications import denoising_score_matching_loss as denoising_score_matching_loss
    from natgrad.applications import maximize_likelihood, score_matching_loss, standard_errors
    from natgrad.applications import ratio_matching_loss as ratio_matching_loss
    from natgrad.applications import sliced_score_matching_loss as sliced_score_matching_loss
    from natgrad.applications import vmc as vmc
    from natgrad.applications.flows import show_descent as show_descent
    from natgrad.applications.helmholtz import HelmholtzMachine, NaturalWakeSleep
    from natgrad.applications.helmholtz import WakeSleep as WakeSleep
    from natgrad.applications.policy import TRPO, NaturalPolicyGradient
    from natgrad.applications.residuals import biharmonic as biharmonic
    from natgrad.applications.residuals import divergence_of as divergence_of
    from natgrad.applications.residuals import grad as grad
    from natgrad.applications.residuals import jacobian as jacobian
    from natgrad.applications.residuals import laplacian as laplacian
    from natgrad.applications.residuals import residuals
    from natgrad.applications.residuals import time_derivative as time_derivative
    from natgrad.applications.search import BernoulliSearch as BernoulliSearch
    from natgrad.applications.search import GaussianSearch, minimize
    from natgrad.applications.search import MarkovSearch as MarkovSearch
    from natgrad.applications.variational import variational, variational_low_rank, variational_mixture
    from natgrad.applications.vmc import LogAmplitude as LogAmplitude
    from natgrad.applications.vmc import stochastic_reconfiguration as stochastic_reconfiguration

# `Beta as Beta`: importable from here, but its home and its page are its folder's, `ng.families.Beta`.

__version__ = "0.1.0"

__all__ = [
    "CG",
    "TRPO",
    "AdaptiveInverse",
    "Auto",
    "Bernoulli",
    "Categorical",
    "Constant",
    "Dense",
    "Diagonal",
    "Direct",
    "EigenKronecker",
    "Exact",
    "Gaussian",
    "GaussianSearch",
    "Heads",
    "HelmholtzMachine",
    "HeteroscedasticGaussian",
    "Ising",
    "Kronecker",
    "KrylovSubspace",
    "LevenbergMarquardt",
    "LineSearch",
    "LogDensity",
    "MinresQLP",
    "Momentum",
    "MultivariateNormal",
    "NaturalGradient",
    "NaturalPolicyGradient",
    "NaturalWakeSleep",
    "Normal",
    "Poisson",
    "Rate",
    "Relative",
    "SampleSpace",
    "Score",
    "Space",
    "TrustRegion",
    "UnitWise",
    "ang",
    "applications",
    "callbacks",
    "covariance",
    "diagonal",
    "ekfac",
    "empirical_fisher",
    "families",
    "fisher",
    "gauss_newton",
    "geometry",
    "hessian",
    "hessian_free",
    "kfac",
    "krylov_subspace",
    "layers",
    "likelihood",
    "maximize_likelihood",
    "metrics",
    "minimize",
    "natural_gradient",
    "natural_gradient_of_mean",
    "observed_fisher",
    "online_ng",
    "operators",
    "optim",
    "positive",
    "ratio_metric",
    "residuals",
    "sampled_fisher",
    "score_matching_loss",
    "score_metric",
    "solvers",
    "standard_errors",
    "structures",
    "tonga",
    "trainable",
    "transport_metric",
    "unitwise",
    "variational",
    "variational_low_rank",
    "variational_mixture",
]

FIELDS = {
    "natgrad": ("applications",),
    "natgrad.applications": (
        "Boltzmann",
        "GaussMarkov",
        "denoising_score_matching_loss",
        "maximize_likelihood",
        "ratio_matching_loss",
        "score_matching_loss",
        "sliced_score_matching_loss",
        "standard_errors",
        "vmc",
    ),
    "natgrad.applications.flows": ("show_descent",),
    "natgrad.applications.helmholtz": ("HelmholtzMachine", "NaturalWakeSleep", "WakeSleep"),
    "natgrad.applications.policy": ("NaturalPolicyGradient", "TRPO"),
    "natgrad.applications.residuals": (
        "biharmonic",
        "divergence_of",
        "grad",
        "jacobian",
        "laplacian",
        "residuals",
        "time_derivative",
    ),
    "natgrad.applications.search": ("BernoulliSearch", "GaussianSearch", "MarkovSearch", "minimize"),
    "natgrad.applications.variational": ("variational", "variational_low_rank", "variational_mixture"),
    "natgrad.applications.vmc": ("LogAmplitude", "stochastic_reconfiguration"),
}
"""The names that a problem's own folder supplies, by folder."""

# not by a def: type checkers would then take any name for one that exists
globals()["__getattr__"] = find_name(__name__, FIELDS)


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in FIELDS.values() for name in names)})
