"""Floor 4: how a metric is remembered."""

from natgrad.structures.base import Memory, Structure
from natgrad.structures.diagonal import Diagonal, UnitWise
from natgrad.structures.estimates import Estimate, ExactLabels, Sampled
from natgrad.structures.exact import Dense, Exact
from natgrad.structures.kronecker import EigenKronecker, Kronecker
from natgrad.structures.layerwise import Layerwise

__all__ = [
    "Dense",
    "Diagonal",
    "EigenKronecker",
    "Estimate",
    "Exact",
    "ExactLabels",
    "Kronecker",
    "Layerwise",
    "Memory",
    "Sampled",
    "Structure",
    "UnitWise",
]
