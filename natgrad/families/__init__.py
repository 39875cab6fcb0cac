"""Floor 2: what a model's outputs mean, and the losses that say so."""

from natgrad.families.base import Likelihood
from natgrad.families.criteria import Criterion, as_criterion
from natgrad.families.discrete import Bernoulli, Categorical, Poisson
from natgrad.families.gaussian import Gaussian, HeteroscedasticGaussian
from natgrad.families.heads import Heads

__all__ = [
    "Bernoulli",
    "Categorical",
    "Criterion",
    "Gaussian",
    "Heads",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "as_criterion",
]
