"""Floor 3: distributions as points of a curved space, with geodesics, transport, retractions and the dual geometry."""

from natgrad.geometry.balls import kl_ball, level_set
from natgrad.geometry.base import Manifold
from natgrad.geometry.bures import Wasserstein
from natgrad.geometry.cone import PositiveDefinite
from natgrad.geometry.dual import e_geodesic, e_projection, m_geodesic, m_projection, mirror_step, tilt
from natgrad.geometry.half_plane import HalfPlane
from natgrad.geometry.momentum import Descent
from natgrad.geometry.natural import NaturalParameters, fisher_rao
from natgrad.geometry.normals import Normals
from natgrad.geometry.ode import integrate
from natgrad.geometry.simplex import Simplex
from natgrad.geometry.straight import Bits, Location, Rates, Scales
from natgrad.geometry.together import Together

__all__ = [
    "Bits",
    "Descent",
    "HalfPlane",
    "Location",
    "Manifold",
    "NaturalParameters",
    "Normals",
    "PositiveDefinite",
    "Rates",
    "Scales",
    "Simplex",
    "Together",
    "Wasserstein",
    "e_geodesic",
    "e_projection",
    "fisher_rao",
    "integrate",
    "kl_ball",
    "level_set",
    "m_geodesic",
    "m_projection",
    "mirror_step",
    "tilt",
]
