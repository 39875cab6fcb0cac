"""One file, or folder, per kind of problem."""

from natgrad.applications import flows, helmholtz, policy, residuals, search, variational, vmc
from natgrad.applications.boltzmann import Boltzmann
from natgrad.applications.boltzmann_preconditioner import PairPreconditioner
from natgrad.applications.gauss_markov import GaussMarkov
from natgrad.applications.restricted_boltzmann import PersistentLikelihood, RestrictedBoltzmann
from natgrad.applications.score_matching import (
    denoising_score_matching_loss,
    ratio_matching_loss,
    score_matching_loss,
    sliced_score_matching_loss,
)
from natgrad.applications.two_layer import TwoLayer

__all__ = [
    "Boltzmann",
    "GaussMarkov",
    "PairPreconditioner",
    "PersistentLikelihood",
    "RestrictedBoltzmann",
    "TwoLayer",
    "denoising_score_matching_loss",
    "flows",
    "helmholtz",
    "policy",
    "ratio_matching_loss",
    "residuals",
    "score_matching_loss",
    "search",
    "sliced_score_matching_loss",
    "variational",
    "vmc",
]
