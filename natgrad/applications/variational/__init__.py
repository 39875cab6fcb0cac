"""Natural-gradient variational inference: a Gaussian fitted to a log joint density or to a network's posterior."""

from natgrad.applications.variational.gaussian import Variational, variational
from natgrad.applications.variational.quadrature import Draws, GaussHermite, Points, Sobol
from natgrad.applications.variational.targets import Moments, Projected, Target, inducing

__all__ = [
    "Draws",
    "GaussHermite",
    "Moments",
    "Points",
    "Projected",
    "Sobol",
    "Target",
    "Variational",
    "inducing",
    "variational",
]
