"""The solver by shape and cost."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from natgrad.operators import Operator
from natgrad.solvers.base import Solution, Solver, check_system
from natgrad.solvers.cg import CG
from natgrad.solvers.direct import Direct
from natgrad.solvers.minres_qlp import MinresQLP
from natgrad.solvers.sample_space import SampleSpace


@dataclass(frozen=True)
class Auto(Solver):
    """Direct, sample space or CG, whichever is cheapest for the operator at hand.

    1. Fewer columns r of the root than parameters, and r <= `gram`: `SampleSpace` (the r x r Gram matrix).
    2. A closed-form inverse: `Direct`.
    3. n <= `dense`: `Direct` (the n x n matrix, one Cholesky).
    4. Otherwise `iterative`.

    A Hessian may be indefinite: then it is `Direct` for blocks and up to `dense`, and `MinresQLP` beyond.

    Args:
        gram: The largest Gram matrix that is still factorised, by its side r. The default takes about a second of
            Cholesky on two cores in float64.
        dense: The largest matrix that is still factorised, by its side n.
        iterative: The solver for everything else.

    Example:
        >>> G = ng.operators.DenseOperator(torch.eye(3))
        >>> ng.Auto().choose(G)
        Direct(absolute=False)
    """

    gram: int = 4000
    dense: int = 2000
    iterative: Solver = CG()

    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        check_system(operator, rhs, damping, guess)
        return self.choose(operator).solve(operator, rhs, damping=damping, guess=guess)

    def choose(self, operator: Operator) -> Solver:
        """The solver that `solve` takes for this operator.

        Args:
            operator: G, of size n.
        """
        if operator.indefinite:
            return Direct() if operator.closed_form or operator.size <= self.dense else MinresQLP()
        rank = operator.sample_rank
        if rank is not None and rank < operator.size and rank <= self.gram:
            return SampleSpace()
        if operator.closed_form:
            return Direct()
        return Direct() if operator.size <= self.dense else self.iterative
