"""What a model's outputs mean, the losses that say so, and exponential families."""

from typing import TYPE_CHECKING

from natgrad.ground.messages import resolve_names

if TYPE_CHECKING:  # loaded when it is first asked for: see `HOMES`
    from natgrad.families.base import Likelihood as Likelihood
    from natgrad.families.base import LogDensity as LogDensity
    from natgrad.families.coordinates import Concentration as Concentration
    from natgrad.families.coordinates import Coordinates as Coordinates
    from natgrad.families.coordinates import Expectation as Expectation
    from natgrad.families.coordinates import ExponentialRate as ExponentialRate
    from natgrad.families.coordinates import Mapped as Mapped
    from natgrad.families.coordinates import MeanCholesky as MeanCholesky
    from natgrad.families.coordinates import MeanCovariance as MeanCovariance
    from natgrad.families.coordinates import MeanStd as MeanStd
    from natgrad.families.coordinates import Natural as Natural
    from natgrad.families.coordinates import ShapeRate as ShapeRate
    from natgrad.families.coordinates import ShapeScale as ShapeScale
    from natgrad.families.coordinates import convert as convert
    from natgrad.families.coordinates import convert_covector as convert_covector
    from natgrad.families.coordinates import convert_vector as convert_vector
    from natgrad.families.coordinates import fisher_in as fisher_in
    from natgrad.families.criteria import Criterion as Criterion
    from natgrad.families.criteria import Entrywise as Entrywise
    from natgrad.families.discrete import Bernoulli as Bernoulli
    from natgrad.families.discrete import Categorical as Categorical
    from natgrad.families.discrete import Multinomial as Multinomial
    from natgrad.families.discrete import Poisson as Poisson
    from natgrad.families.exponential import ExponentialFamily as ExponentialFamily
    from natgrad.families.gaussian import DiagonalGaussian as DiagonalGaussian
    from natgrad.families.gaussian import Gaussian as Gaussian
    from natgrad.families.gaussian import GaussianPosterior as GaussianPosterior
    from natgrad.families.gaussian import HeteroscedasticGaussian as HeteroscedasticGaussian
    from natgrad.families.gibbs import Gibbs as Gibbs
    from natgrad.families.gibbs import Tempering as Tempering
    from natgrad.families.known_losses import LOSSES as LOSSES
    from natgrad.families.known_losses import TokenCrossEntropy as TokenCrossEntropy
    from natgrad.families.known_losses import as_criterion as as_criterion
    from natgrad.families.known_losses import likelihood as likelihood
    from natgrad.families.markov_field import Ising as Ising
    from natgrad.families.markov_field import LogPartitionEstimate as LogPartitionEstimate
    from natgrad.families.markov_field import MarkovField as MarkovField
    from natgrad.families.markov_field import MomentEstimate as MomentEstimate
    from natgrad.families.markov_field import PseudoLikelihood as PseudoLikelihood
    from natgrad.families.markov_field import RatioMatching as RatioMatching
    from natgrad.families.markov_field import StochasticLikelihood as StochasticLikelihood
    from natgrad.families.mean_gradient import Slope as Slope
    from natgrad.families.mean_gradient import dual_gradient as dual_gradient
    from natgrad.families.mean_gradient import effective_draws as effective_draws
    from natgrad.families.mean_gradient import exact_natural_gradient_of_mean as exact_natural_gradient_of_mean
    from natgrad.families.mean_gradient import gradient_of_mean as gradient_of_mean
    from natgrad.families.mean_gradient import natural_gradient_of_mean as natural_gradient_of_mean
    from natgrad.families.mean_gradient import natural_slope as natural_slope
    from natgrad.families.mean_gradient import regress as regress
    from natgrad.families.normal import ComplexNormal as ComplexNormal
    from natgrad.families.normal import DiagonalNormal as DiagonalNormal
    from natgrad.families.normal import FixedCovarianceNormal as FixedCovarianceNormal
    from natgrad.families.normal import FixedMeanNormal as FixedMeanNormal
    from natgrad.families.normal import MultivariateNormal as MultivariateNormal
    from natgrad.families.normal import Normal as Normal
    from natgrad.families.normal import SparseNormal as SparseNormal
    from natgrad.families.output_heads import Heads as Heads
    from natgrad.families.output_heads import Masked as Masked
    from natgrad.families.positive_families import Beta as Beta
    from natgrad.families.positive_families import ChiSquare as ChiSquare
    from natgrad.families.positive_families import Dirichlet as Dirichlet
    from natgrad.families.positive_families import Exponential as Exponential
    from natgrad.families.positive_families import Gamma as Gamma
    from natgrad.families.positive_families import InverseGamma as InverseGamma
    from natgrad.families.positive_families import InverseGaussian as InverseGaussian
    from natgrad.families.positive_families import LogNormal as LogNormal
    from natgrad.families.positive_families import Rayleigh as Rayleigh
    from natgrad.families.positive_families import Weibull as Weibull
    from natgrad.families.power_series import Geometric as Geometric
    from natgrad.families.power_series import Logarithmic as Logarithmic
    from natgrad.families.power_series import NegativeBinomial as NegativeBinomial
    from natgrad.families.product_families import Product as Product
    from natgrad.families.product_families import SubModel as SubModel
    from natgrad.families.robust_errors import Huber as Huber
    from natgrad.families.robust_errors import Laplace as Laplace
    from natgrad.families.von_mises_fisher import VonMisesFisher as VonMisesFisher
    from natgrad.families.wishart import Wishart as Wishart

HOMES = {
    f"natgrad.families.{module}": names.split()
    for module, names in {
        "base": "Likelihood LogDensity",
        "coordinates": (
            "Concentration Coordinates Expectation ExponentialRate Mapped MeanCholesky MeanCovariance MeanStd "
            "Natural ShapeRate ShapeScale convert convert_covector convert_vector fisher_in"
        ),
        "criteria": "Criterion Entrywise",
        "discrete": "Bernoulli Categorical Multinomial Poisson",
        "exponential": "ExponentialFamily",
        "gaussian": "DiagonalGaussian Gaussian GaussianPosterior HeteroscedasticGaussian",
        "gibbs": "Gibbs Tempering",
        "known_losses": "LOSSES TokenCrossEntropy as_criterion likelihood",
        "markov_field": (
            "Ising LogPartitionEstimate MarkovField MomentEstimate PseudoLikelihood RatioMatching StochasticLikelihood"
        ),
        "mean_gradient": (
            "Slope dual_gradient effective_draws exact_natural_gradient_of_mean gradient_of_mean "
            "natural_gradient_of_mean natural_slope regress"
        ),
        "normal": (
            "ComplexNormal DiagonalNormal FixedCovarianceNormal FixedMeanNormal MultivariateNormal Normal SparseNormal"
        ),
        "output_heads": "Heads Masked",
        "positive_families": (
            "Beta ChiSquare Dirichlet Exponential Gamma InverseGamma InverseGaussian LogNormal Rayleigh Weibull"
        ),
        "power_series": "Geometric Logarithmic NegativeBinomial",
        "product_families": "Product SubModel",
        "robust_errors": "Huber Laplace",
        "von_mises_fisher": "VonMisesFisher",
        "wishart": "Wishart",
    }.items()
}
"""Where each name lies."""

__all__ = sorted(name for names in HOMES.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll]

resolve_names(__name__, HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
