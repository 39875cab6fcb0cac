"""How a metric is remembered, and what makes solving with it faster."""

from natgrad.ground.messages import resolve_names
from natgrad.structures.adaptive_inverse import AdaptiveInverse, Averaged, FirstOrder, Update, Woodbury
from natgrad.structures.base import (
    Memory,
    OperatorStructure,
    Structure,
    accumulate_total,
    accumulate_weight,
)
from natgrad.structures.blocks import Blocks
from natgrad.structures.diagonal import Diagonal, UnitWise
from natgrad.structures.estimates import Empirical, Estimate, ExactLabels, Outputs, Sampled
from natgrad.structures.exact import Dense, Exact
from natgrad.structures.kronecker import EigenKronecker, Kronecker
from natgrad.structures.layerwise import Layerwise, Statistics, accumulate_statistics
from natgrad.structures.low_rank_covariance import LowRankCovariance
from natgrad.structures.metric_pass import hear_metric
from natgrad.structures.online_low_rank import OnlineLowRank
from natgrad.structures.preconditioners import (
    DiagonalPreconditioner,
    EmpiricalPreconditioner,
    Preconditioner,
    StructurePreconditioner,
    as_preconditioner,
)

__all__ = [
    "AdaptiveInverse",
    "Averaged",
    "Blocks",
    "Dense",
    "Diagonal",
    "DiagonalPreconditioner",
    "EigenKronecker",
    "Empirical",
    "EmpiricalPreconditioner",
    "Estimate",
    "Exact",
    "ExactLabels",
    "FirstOrder",
    "Kronecker",
    "Layerwise",
    "LowRankCovariance",
    "Memory",
    "OnlineLowRank",
    "OperatorStructure",
    "Outputs",
    "Preconditioner",
    "Sampled",
    "Statistics",
    "Structure",
    "StructurePreconditioner",
    "UnitWise",
    "Update",
    "Woodbury",
    "accumulate_statistics",
    "accumulate_total",
    "accumulate_weight",
    "as_preconditioner",
    "hear_metric",
]

resolve_names(__name__)
