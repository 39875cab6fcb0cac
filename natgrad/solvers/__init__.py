"""Floor 2: solvers of (G + damping I) x = b behind one face."""

from natgrad.solvers.auto import Auto
from natgrad.solvers.base import Solution, Solver, Status
from natgrad.solvers.cg import CG
from natgrad.solvers.direct import Direct
from natgrad.solvers.minres_qlp import MinresQLP
from natgrad.solvers.sample_space import SampleSpace

__all__ = ["CG", "Auto", "Direct", "MinresQLP", "SampleSpace", "Solution", "Solver", "Status"]
