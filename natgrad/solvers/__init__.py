"""Solvers of (G + damping I) x = b behind one face."""

from natgrad.ground.messages import find_name
from natgrad.solvers.auto import Auto
from natgrad.solvers.base import FactorisedSystem, Iterate, RowSolver, Solution, Solver, Status, Subspace
from natgrad.solvers.cg import CG
from natgrad.solvers.direct import Direct
from natgrad.solvers.least_squares import Factorised, LeastSquares
from natgrad.solvers.minres_qlp import MinresQLP
from natgrad.solvers.nystrom import Nystrom
from natgrad.solvers.pseudo_inverse import PseudoInverse
from natgrad.solvers.sample_space import SampleSpace
from natgrad.solvers.spring import Spring
from natgrad.solvers.subspace import KrylovSubspace

__all__ = [
    "CG",
    "Auto",
    "Direct",
    "Factorised",
    "FactorisedSystem",
    "Iterate",
    "KrylovSubspace",
    "LeastSquares",
    "MinresQLP",
    "Nystrom",
    "PseudoInverse",
    "RowSolver",
    "SampleSpace",
    "Solution",
    "Solver",
    "Spring",
    "Status",
    "Subspace",
]

# not by a def: type checkers would then take any name for one that exists
globals()["__getattr__"] = find_name(__name__, {})
