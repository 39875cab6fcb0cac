"""Floor 6: one file per kind of problem."""

from natgrad.applications.helmholtz import (
    Algorithm,
    Bidirectional,
    Classic,
    HelmholtzMachine,
    NaturalWakeSleep,
    Reweighted,
    WakeSleep,
)
from natgrad.applications.boltzmann import Boltzmann
from natgrad.applications.gauss_markov import GaussMarkov
from natgrad.applications.score_matching import (
    denoising_score_matching_loss,
    ratio_matching_loss,
    score_matching_loss,
    sliced_score_matching_loss,
)

__all__ = [
    "Algorithm",
    "Bidirectional",
    "Classic",
    "HelmholtzMachine",
    "NaturalWakeSleep",
    "Reweighted",
    "WakeSleep",
    "Boltzmann",
    "GaussMarkov",
    "denoising_score_matching_loss",
    "ratio_matching_loss",
    "score_matching_loss",
    "sliced_score_matching_loss",
]
