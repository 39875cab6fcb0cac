"""Floor 4: how a metric is remembered."""

from natgrad.structures.base import Memory, Structure
from natgrad.structures.exact import Dense, Exact

__all__ = ["Dense", "Exact", "Memory", "Structure"]
