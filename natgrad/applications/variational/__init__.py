"""Natural-gradient variational inference: a Gaussian fitted to a log joint density or to a network's posterior."""

from natgrad.applications.variational.gaussian import Variational, variational
from natgrad.applications.variational.network import NetworkData
from natgrad.applications.variational.projected import Projected, inducing
from natgrad.applications.variational.quadrature import Draws, GaussHermite, Points, Sobol
from natgrad.applications.variational.targets import Moments, Target

__all__ = [
    "Draws",
    "GaussHermite",
    "Moments",
    "NetworkData",
    "Points",
    "Projected",
    "Sobol",
    "Target",
    "Variational",
    "inducing",
    "variational",
]
