"""Natural-gradient variational inference: Gaussians and mixtures of them, fitted to a posterior.

`gaussian`, `low_rank` and `mixture` have the three kinds of q, and `fitting` the loop that they share. `targets`,
`projected` and `network` say what q is fitted to, `quadrature` how expectations under q are taken.
"""

from natgrad.ground.messages import make_callable, resolve_names
from natgrad.variational.gaussian import Variational, variational
from natgrad.variational.low_rank import LowRankVariational, variational_low_rank
from natgrad.variational.mixture import VariationalMixture, variational_mixture
from natgrad.variational.network import NetworkData
from natgrad.variational.projected import Projected, inducing
from natgrad.variational.quadrature import Draws, GaussHermite, Points, Sobol
from natgrad.variational.targets import Moments, Target

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

resolve_names(__name__)
make_callable(__name__, variational)  # ng.variational(...)
