"""Floor 4: how a metric is remembered, and what makes solving with it faster."""

from natgrad.structures.base import Memory, Structure
from natgrad.structures.exact import Dense, Exact
from natgrad.structures.preconditioners import (
    DiagonalPreconditioner,
    EmpiricalPreconditioner,
    Preconditioner,
    StructurePreconditioner,
    as_preconditioner,
)

__all__ = [
    "Dense",
    "DiagonalPreconditioner",
    "EmpiricalPreconditioner",
    "Exact",
    "Memory",
    "Preconditioner",
    "Structure",
    "StructurePreconditioner",
    "as_preconditioner",
]
