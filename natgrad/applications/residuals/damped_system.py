"""(G + level D) x = U w, in the coordinates in which D is the identity, by any solver."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from natgrad.applications.residuals.stacked_rows import RowsOperator
from natgrad.operators import Operator
from natgrad.solvers import FactorisedSystem, RowSolver, Solution, Solver


@dataclass(frozen=True, eq=False)
class DampedSystem:
    """(G + level D) x = U w with G = U U^T.

    Args:
        solver: The solver.
        operator: S G S, S = D^(-1/2).
        units: The diagonal of D, shape (n,), or None for the identity.
        scale: The diagonal of S.
        level: The damping.
        factorised: Where the solver keeps its factors for several right-hand sides.
    """

    solver: Solver
    operator: Operator
    units: Tensor | None
    scale: Tensor | None
    level: float
    factorised: FactorisedSystem | None

    @staticmethod
    def of(solver: Solver, operator: Operator, units: Tensor | None, level: float) -> DampedSystem:
        """The system, factorised where its solver does that.

        Args:
            solver: The solver.
            operator: G.
            units: D, shape (n,), or None for the identity.
            level: The damping.
        """
        scale = None
        if units is not None and isinstance(operator, RowsOperator):
            scale = units.rsqrt()
            operator = RowsOperator(operator.rows.rescale(scale))
        factorised = None
        if isinstance(solver, RowSolver) and operator.sample_rows is not None:
            factorised = solver.factorise(operator, level)
        return DampedSystem(solver, operator, units, scale, level, factorised)

    def change_damping(self, level: float) -> DampedSystem:
        """The same system at another level.

        Args:
            level: The damping.
        """
        factorised = None if self.factorised is None else self.factorised.change_damping(level)
        return replace(self, level=level, factorised=factorised)

    def solve(self, weights: Tensor, before: Tensor | None = None) -> Solution:
        """x, or with x_0 given the solution of (G + level D) x = U w + level D x_0.

        That minimises |w - U^T x|^2 + level |x - x_0|^2 in D's norm: the momentum of SPRING (Goldshlager et al. 2024).

        Args:
            weights: w, shape (r,).
            before: x_0, shape (n,), or None.
        """
        if before is None or not bool(before.any()):
            return self._restore(self._solve(weights))
        start = before if self.scale is None else before / self.scale
        rows = self.operator.sample_rows
        assert rows is not None
        seen = rows.rmv(start)
        found = self._solve(weights - seen)
        image = found.image + rows.mv(seen) + self.level * start
        return self._restore(replace(found, value=found.value + start, image=image))

    def accelerate(self, found: Solution, bend: Tensor, limit: float) -> Solution:
        """x with the bend a / 2, (G + level D) a = U r'', unless a is longer than `limit` times x in D's norm.

        Args:
            found: The solution x.
            bend: r'', the second derivative of the residuals along x, shape (r,).
            limit: A number.
        """
        more = self._solve(bend).value if self.factorised is None else self.factorised.find_value(bend)
        length = found.value if self.scale is None else found.value / self.scale
        if not bool(more.norm() <= limit * length.norm()):  # False for a NaN
            return found
        return replace(found, bend=more / 2 if self.scale is None else more * self.scale / 2)

    def _solve(self, weights: Tensor) -> Solution:
        if self.factorised is not None:
            return self.factorised.solve(weights)
        rows = self.operator.sample_rows
        assert rows is not None
        return self.solver.solve(self.operator, rows.mv(weights), damping=self.level)

    def _restore(self, found: Solution) -> Solution:
        if self.scale is None:
            return found
        return replace(found, value=found.value * self.scale, image=found.image / self.scale, basis=None, iterates=())
