"""Floor 2: what a model's outputs mean, the losses that say so, and exponential families."""

from natgrad.families.base import Likelihood
from natgrad.families.composed import Product, SubModel
from natgrad.families.criteria import Criterion, as_criterion
from natgrad.families.discrete import Bernoulli, Categorical, Poisson
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.gaussian import DiagonalGaussian, Gaussian, HeteroscedasticGaussian
from natgrad.families.heads import Heads
from natgrad.families.ising import Ising
from natgrad.families.normal import MultivariateNormal
from natgrad.families.positive import Beta, Dirichlet, Exponential, Gamma

__all__ = [
    "Bernoulli",
    "Beta",
    "Categorical",
    "Criterion",
    "DiagonalGaussian",
    "Dirichlet",
    "Exponential",
    "ExponentialFamily",
    "Gamma",
    "Gaussian",
    "Heads",
    "HeteroscedasticGaussian",
    "Ising",
    "Likelihood",
    "MultivariateNormal",
    "Poisson",
    "Product",
    "SubModel",
    "as_criterion",
]
