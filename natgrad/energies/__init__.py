"""Energy models: densities p(x) known up to a constant that nobody can compute, and what fits them without it.

`score_matching` has the losses; `boltzmann`, `restricted_boltzmann`, `gauss_markov` and `two_layer` are models whose
derivatives are closed forms, each a `ng.Density`. Their metrics are `ng.score_metric` and `ng.ratio_metric`.

Example:
    >>> field = ng.energies.GaussMarkov(3, [(0, 1), (1, 2)])
    >>> loss = ng.energies.score_matching_loss(field, field.parameters(), torch.randn(50, 3))
"""

from natgrad.energies.boltzmann import Boltzmann, PairPreconditioner
from natgrad.energies.gauss_markov import GaussMarkov
from natgrad.energies.restricted_boltzmann import PersistentLikelihood, RestrictedBoltzmann
from natgrad.energies.score_matching import (
    denoising_score_matching_loss,
    ratio_matching_loss,
    score_matching_loss,
    sliced_score_matching_loss,
)
from natgrad.energies.two_layer import TwoLayer
from natgrad.ground.messages import resolve_names

__all__ = [
    "Boltzmann",
    "GaussMarkov",
    "PairPreconditioner",
    "PersistentLikelihood",
    "RestrictedBoltzmann",
    "TwoLayer",
    "denoising_score_matching_loss",
    "ratio_matching_loss",
    "score_matching_loss",
    "sliced_score_matching_loss",
]

resolve_names(__name__)
