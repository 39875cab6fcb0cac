"""Distributions as points of a curved space, with geodesics, transport, retractions and the dual geometry."""

from natgrad.geometry.base import Manifold
from natgrad.geometry.boundary_mesh import NaturalParameters
from natgrad.geometry.bures import Wasserstein
from natgrad.geometry.divergence_balls import kl_ball, level_set
from natgrad.geometry.dual_geometry import e_geodesic, e_projection, m_geodesic, m_projection, mirror_step, tilt
from natgrad.geometry.fisher_rao import HalfPlane, ProductManifold, fisher_rao
from natgrad.geometry.flat_manifold import Bits, Location, Rates, Scales
from natgrad.geometry.momentum import Descent
from natgrad.geometry.normal_manifold import Normals
from natgrad.geometry.ode import integrate
from natgrad.geometry.positive_definite import PositiveDefinite
from natgrad.geometry.potentials import (
    Ball,
    Box,
    LogPartition,
    NegativeEntropy,
    PNorm,
    Potential,
    ProbabilitySimplex,
    Region,
    SquaredNorm,
    check_potential,
)
from natgrad.geometry.simplex import Simplex
from natgrad.ground.messages import resolve_names

Together = ProductManifold  # its former name

__all__ = [
    "Ball",
    "Bits",
    "Box",
    "Descent",
    "HalfPlane",
    "Location",
    "LogPartition",
    "Manifold",
    "NaturalParameters",
    "NegativeEntropy",
    "Normals",
    "PNorm",
    "PositiveDefinite",
    "Potential",
    "ProbabilitySimplex",
    "ProductManifold",
    "Rates",
    "Region",
    "Scales",
    "Simplex",
    "SquaredNorm",
    "Wasserstein",
    "check_potential",
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

resolve_names(__name__)
