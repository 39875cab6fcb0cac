"""Natural-gradient variational inference: Gaussians and mixtures of them, fitted to a posterior."""

from natgrad.applications.variational.gaussian import Variational, variational
from natgrad.applications.variational.low_rank import LowRankVariational, variational_low_rank
from natgrad.applications.variational.mixture import VariationalMixture, variational_mixture
from natgrad.applications.variational.network import NetworkData
from natgrad.applications.variational.projected import Projected, inducing
from natgrad.applications.variational.quadrature import Draws, GaussHermite, Points, Sobol
from natgrad.applications.variational.targets import Moments, Target

__all__ = [
    "Draws",
    "GaussHermite",
    "LowRankVariational",
    "Moments",
    "NetworkData",
    "Points",
    "Projected",
    "Sobol",
    "Target",
    "Variational",
    "VariationalMixture",
    "inducing",
    "variational",
    "variational_low_rank",
    "variational_mixture",
]
