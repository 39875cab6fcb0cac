"""What a model's outputs mean, the losses that say so, and exponential families."""

from typing import TYPE_CHECKING

from natgrad.families.base import Likelihood
from natgrad.families.class_logits import Multinomial
from natgrad.families.criteria import Criterion, Entrywise
from natgrad.families.discrete import Bernoulli, Categorical, Poisson
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.gaussian import DiagonalGaussian, Gaussian, GaussianPosterior, HeteroscedasticGaussian
from natgrad.families.known_losses import LOSSES, TokenCrossEntropy, as_criterion, likelihood
from natgrad.families.log_density import LogDensity
from natgrad.families.masked import Masked
from natgrad.families.output_heads import Heads
from natgrad.families.robust_errors import Huber, Laplace
from natgrad.ground.messages import find_name

if TYPE_CHECKING:  # loaded when it is first asked for: see `HOMES`
    from natgrad.families.changed_variables import InverseGamma, LogNormal, Rayleigh, Weibull
    from natgrad.families.complex_normal import ComplexNormal
    from natgrad.families.coordinates import (
        Concentration,
        Coordinates,
        Expectation,
        ExponentialRate,
        Mapped,
        MeanCholesky,
        MeanCovariance,
        MeanStd,
        Natural,
        ShapeRate,
        ShapeScale,
        convert,
        convert_covector,
        convert_vector,
        fisher_in,
    )
    from natgrad.families.diagonal_normal import DiagonalNormal, FixedCovarianceNormal, Normal
    from natgrad.families.gibbs import Gibbs, Tempering
    from natgrad.families.markov_field import (
        Ising,
        LogPartitionEstimate,
        MarkovField,
        MomentEstimate,
        PseudoLikelihood,
        RatioMatching,
        StochasticLikelihood,
    )
    from natgrad.families.mean_gradient import (
        Slope,
        dual_gradient,
        effective_draws,
        exact_natural_gradient_of_mean,
        gradient_of_mean,
        natural_gradient_of_mean,
        natural_slope,
        regress,
    )
    from natgrad.families.normal import FixedMeanNormal, MultivariateNormal, SparseNormal
    from natgrad.families.positive_families import Beta, ChiSquare, Dirichlet, Exponential, Gamma, InverseGaussian
    from natgrad.families.power_series import Geometric, Logarithmic, NegativeBinomial
    from natgrad.families.product_families import Product, SubModel
    from natgrad.families.von_mises_fisher import VonMisesFisher
    from natgrad.families.wishart import Wishart

__all__ = [
    "LOSSES",
    "Bernoulli",
    "Beta",
    "Categorical",
    "ChiSquare",
    "ComplexNormal",
    "Concentration",
    "Coordinates",
    "Criterion",
    "DiagonalGaussian",
    "DiagonalNormal",
    "Dirichlet",
    "Entrywise",
    "Expectation",
    "Exponential",
    "ExponentialFamily",
    "ExponentialRate",
    "FixedCovarianceNormal",
    "FixedMeanNormal",
    "Gamma",
    "Gaussian",
    "GaussianPosterior",
    "Geometric",
    "Gibbs",
    "Heads",
    "HeteroscedasticGaussian",
    "Huber",
    "InverseGamma",
    "InverseGaussian",
    "Ising",
    "Laplace",
    "Likelihood",
    "LogDensity",
    "LogNormal",
    "LogPartitionEstimate",
    "Logarithmic",
    "Mapped",
    "MarkovField",
    "Masked",
    "MeanCholesky",
    "MeanCovariance",
    "MeanStd",
    "MomentEstimate",
    "Multinomial",
    "MultivariateNormal",
    "Natural",
    "NegativeBinomial",
    "Normal",
    "Poisson",
    "Product",
    "PseudoLikelihood",
    "RatioMatching",
    "Rayleigh",
    "ShapeRate",
    "ShapeScale",
    "Slope",
    "SparseNormal",
    "StochasticLikelihood",
    "SubModel",
    "Tempering",
    "TokenCrossEntropy",
    "VonMisesFisher",
    "Weibull",
    "Wishart",
    "as_criterion",
    "convert",
    "convert_covector",
    "convert_vector",
    "dual_gradient",
    "effective_draws",
    "exact_natural_gradient_of_mean",
    "fisher_in",
    "gradient_of_mean",
    "likelihood",
    "natural_gradient_of_mean",
    "natural_slope",
    "regress",
]

HOMES = {
    "natgrad.families.changed_variables": ("InverseGamma", "LogNormal", "Rayleigh", "Weibull"),
    "natgrad.families.complex_normal": ("ComplexNormal",),
    "natgrad.families.coordinates": (
        "Concentration",
        "Coordinates",
        "Expectation",
        "ExponentialRate",
        "Mapped",
        "MeanCholesky",
        "MeanCovariance",
        "MeanStd",
        "Natural",
        "ShapeRate",
        "ShapeScale",
        "convert",
        "convert_covector",
        "convert_vector",
        "fisher_in",
    ),
    "natgrad.families.diagonal_normal": ("DiagonalNormal", "FixedCovarianceNormal", "Normal"),
    "natgrad.families.gibbs": ("Gibbs", "Tempering"),
    "natgrad.families.markov_field": (
        "Ising",
        "LogPartitionEstimate",
        "MarkovField",
        "MomentEstimate",
        "PseudoLikelihood",
        "RatioMatching",
        "StochasticLikelihood",
    ),
    "natgrad.families.mean_gradient": (
        "Slope",
        "dual_gradient",
        "effective_draws",
        "exact_natural_gradient_of_mean",
        "gradient_of_mean",
        "natural_gradient_of_mean",
        "natural_slope",
        "regress",
    ),
    "natgrad.families.normal": ("FixedMeanNormal", "MultivariateNormal", "SparseNormal"),
    "natgrad.families.positive_families": ("Beta", "ChiSquare", "Dirichlet", "Exponential", "Gamma", "InverseGaussian"),
    "natgrad.families.power_series": ("Geometric", "Logarithmic", "NegativeBinomial"),
    "natgrad.families.product_families": ("Product", "SubModel"),
    "natgrad.families.von_mises_fisher": ("VonMisesFisher",),
    "natgrad.families.wishart": ("Wishart",),
}
"""The rarer families, and where they lie."""

# not by a def: type checkers would then take any name for one that exists
globals()["__getattr__"] = find_name(__name__, HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
