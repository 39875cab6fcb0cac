"""natgrad: the natural gradient for PyTorch.

metric x structure x solver x damping x rule in any combination: from `fisher(model, family).at(params, x)`, an
operator to multiply and solve with, to `NaturalGradient`, a `torch.optim.Optimizer`.
"""

from typing import TYPE_CHECKING

from natgrad.ground.messages import make_callable, resolve_names

if TYPE_CHECKING:  # what a name stands for is loaded when it is first asked for: see `HOMES`
    from natgrad import (
        callbacks,
        energies,
        estimation,
        families,
        flows,
        geometry,
        helmholtz,
        layers,
        metrics,
        operators,
        optim,
        policy,
        search,
        solvers,
        structures,
        vmc,
    )
    from natgrad import ground as ground
    from natgrad import rules as rules
    from natgrad.energies import Boltzmann as Boltzmann
    from natgrad.energies import GaussMarkov as GaussMarkov
    from natgrad.energies import denoising_score_matching_loss as denoising_score_matching_loss
    from natgrad.energies import ratio_matching_loss as ratio_matching_loss
    from natgrad.energies import score_matching_loss
    from natgrad.energies import sliced_score_matching_loss as sliced_score_matching_loss
    from natgrad.estimation import maximize_likelihood, standard_errors
    from natgrad.families import (
        Bernoulli,
        Categorical,
        Gaussian,
        Heads,
        HeteroscedasticGaussian,
        Ising,
        LogDensity,
        Masked,
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
    from natgrad.flows import show_descent as show_descent
    from natgrad.ground.densities import Density as Density
    from natgrad.ground.densities import Score
    from natgrad.ground.derivatives import exact_derivatives as exact_derivatives
    from natgrad.ground.spaces import Space, positive, trainable
    from natgrad.helmholtz import HelmholtzMachine, NaturalWakeSleep
    from natgrad.helmholtz import WakeSleep as WakeSleep
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
    from natgrad.policy import TRPO, NaturalPolicyGradient
    from natgrad.residuals import biharmonic as biharmonic
    from natgrad.residuals import divergence_of as divergence_of
    from natgrad.residuals import grad as grad
    from natgrad.residuals import jacobian as jacobian
    from natgrad.residuals import laplacian as laplacian
    from natgrad.residuals import residuals as call_residuals
    from natgrad.residuals import time_derivative as time_derivative
    from natgrad.rules import Constant, LevenbergMarquardt, LineSearch, Momentum, Rate, Relative, TrustRegion
    from natgrad.rules import Damping as Damping
    from natgrad.rules import MeasuredLength as MeasuredLength
    from natgrad.rules import OnlineRadius as OnlineRadius
    from natgrad.rules import Rule as Rule
    from natgrad.rules import SubspaceSearch as SubspaceSearch
    from natgrad.search import BernoulliSearch as BernoulliSearch
    from natgrad.search import GaussianSearch, minimize
    from natgrad.search import MarkovSearch as MarkovSearch
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
    from natgrad.variational import variational as call_variational
    from natgrad.variational import variational_low_rank, variational_mixture
    from natgrad.vmc import LogAmplitude as LogAmplitude
    from natgrad.vmc import stochastic_reconfiguration as stochastic_reconfiguration

    residuals = make_callable("natgrad.residuals", call_residuals)
    variational = make_callable("natgrad.variational", call_variational)

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
    "Masked",
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
    "callbacks",
    "covariance",
    "diagonal",
    "ekfac",
    "empirical_fisher",
    "energies",
    "estimation",
    "families",
    "fisher",
    "flows",
    "gauss_newton",
    "geometry",
    "helmholtz",
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
    "policy",
    "positive",
    "ratio_metric",
    "residuals",
    "sampled_fisher",
    "score_matching_loss",
    "score_metric",
    "search",
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
    "vmc",
]

HOMES = {
    home: names.split()
    for home, names in {
        "natgrad": (
            "callbacks energies estimation families flows geometry ground helmholtz layers metrics operators optim "
            "policy residuals rules search solvers structures variational vmc"
        ),
        "natgrad.energies": (
            "Boltzmann GaussMarkov denoising_score_matching_loss ratio_matching_loss score_matching_loss "
            "sliced_score_matching_loss"
        ),
        "natgrad.estimation": "maximize_likelihood standard_errors",
        "natgrad.families": (
            "Bernoulli Beta Categorical DiagonalGaussian Dirichlet Exponential ExponentialFamily Gamma Gaussian "
            "GaussianPosterior Heads HeteroscedasticGaussian Ising Likelihood LogDensity MarkovField Masked "
            "Multinomial MultivariateNormal Normal Poisson Product SubModel exact_natural_gradient_of_mean likelihood "
            "natural_gradient_of_mean"
        ),
        "natgrad.flows": "show_descent",
        "natgrad.ground.densities": "Density Score",
        "natgrad.ground.derivatives": "exact_derivatives",
        "natgrad.ground.spaces": "Space positive trainable",
        "natgrad.helmholtz": "HelmholtzMachine NaturalWakeSleep WakeSleep",
        "natgrad.layers": "recalibrate",
        "natgrad.metrics": (
            "Langevin Metric covariance divergence empirical_fisher fisher gauss_newton hessian kl observed_fisher "
            "ratio_metric sampled_fisher score_metric transport_metric"
        ),
        "natgrad.operators": "Operator",
        "natgrad.optim": (
            "MirrorDescent NaturalGradient StructuredNaturalGradient ang diagonal ekfac hessian_free kfac "
            "krylov_subspace load_checkpoint natgrad_cg natural_gradient online_ng report_sharing save_checkpoint "
            "tonga unitwise"
        ),
        "natgrad.policy": "NaturalPolicyGradient TRPO",
        "natgrad.residuals": "biharmonic divergence_of grad jacobian laplacian time_derivative",
        "natgrad.rules": (
            "Constant Damping LevenbergMarquardt LineSearch MeasuredLength Momentum OnlineRadius Rate Relative Rule "
            "SubspaceSearch TrustRegion"
        ),
        "natgrad.search": "BernoulliSearch GaussianSearch MarkovSearch minimize",
        "natgrad.solvers": "Auto CG Direct KrylovSubspace LeastSquares MinresQLP SampleSpace Solution Solver Status",
        "natgrad.structures": (
            "AdaptiveInverse Averaged Blocks Dense Diagonal DiagonalPreconditioner EigenKronecker Empirical "
            "EmpiricalPreconditioner Exact ExactLabels FirstOrder Kronecker LowRankCovariance OnlineLowRank "
            "Preconditioner Sampled Structure UnitWise Update Woodbury"
        ),
        "natgrad.variational": "variational_low_rank variational_mixture",
        "natgrad.vmc": "LogAmplitude stochastic_reconfiguration",
    }.items()
}
"""Where names that are asked for here lie: the folders, and what each supplies."""
EARLIER = {"natgrad": (*HOMES["natgrad"], "applications")}  # not in dir(): who asks for it is warned

resolve_names(__name__, HOMES | EARLIER)


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in HOMES.values() for name in names)})
