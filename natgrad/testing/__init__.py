"""Checks for your own operators, solvers, metrics, structures and families: each holds a class to its contract.

A check returns nothing, or raises AssertionError with a sentence that names the property that does not hold, and by how
much. They write matrices out: use small models and float64.
"""

from natgrad.testing.families import check_exponential_family, check_family
from natgrad.testing.metrics import check_metric, check_structure
from natgrad.testing.operators import check_operator
from natgrad.testing.solvers import check_solver

__all__ = [
    "check_exponential_family",
    "check_family",
    "check_metric",
    "check_operator",
    "check_solver",
    "check_structure",
]
