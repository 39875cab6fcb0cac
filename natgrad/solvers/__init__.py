"""Solvers of (G + damping I) x = b behind one face."""

from natgrad.ground.messages import resolve_names
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

resolve_names(__name__)
