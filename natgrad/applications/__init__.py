"""One file, or folder, per kind of problem, each loaded when it is first asked for."""

from typing import TYPE_CHECKING

from natgrad.ground.messages import find_name

if TYPE_CHECKING:
    from natgrad.applications import flows, helmholtz, policy, residuals, search, variational, vmc
    from natgrad.applications.boltzmann import Boltzmann
    from natgrad.applications.boltzmann_preconditioner import PairPreconditioner
    from natgrad.applications.gauss_markov import GaussMarkov
    from natgrad.applications.maximum_likelihood import (
        MaximumLikelihood,
        StandardErrors,
        maximize_likelihood,
        standard_errors,
    )
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
    "MaximumLikelihood",
    "PairPreconditioner",
    "PersistentLikelihood",
    "RestrictedBoltzmann",
    "StandardErrors",
    "TwoLayer",
    "denoising_score_matching_loss",
    "flows",
    "helmholtz",
    "maximize_likelihood",
    "policy",
    "ratio_matching_loss",
    "residuals",
    "score_matching_loss",
    "search",
    "sliced_score_matching_loss",
    "standard_errors",
    "variational",
    "vmc",
]

FIELDS = {
    "natgrad.applications": ("flows", "helmholtz", "policy", "residuals", "search", "variational", "vmc"),
    "natgrad.applications.boltzmann": ("Boltzmann",),
    "natgrad.applications.boltzmann_preconditioner": ("PairPreconditioner",),
    "natgrad.applications.gauss_markov": ("GaussMarkov",),
    "natgrad.applications.maximum_likelihood": (
        "MaximumLikelihood",
        "StandardErrors",
        "maximize_likelihood",
        "standard_errors",
    ),
    "natgrad.applications.restricted_boltzmann": ("PersistentLikelihood", "RestrictedBoltzmann"),
    "natgrad.applications.score_matching": (
        "denoising_score_matching_loss",
        "ratio_matching_loss",
        "score_matching_loss",
        "sliced_score_matching_loss",
    ),
    "natgrad.applications.two_layer": ("TwoLayer",),
}
"""The names of each file or folder."""

globals()["__getattr__"] = find_name(__name__, FIELDS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
