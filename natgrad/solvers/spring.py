"""The solve that stays near the last solution in what the data do not determine: SPRING's momentum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from natgrad.operators import Operator
from natgrad.solvers.auto import Auto
from natgrad.solvers.base import Solution, Solver, check_system


@dataclass(frozen=True)
class Spring(Solver):
    """(G + l I) x = b + l x_0: damping pulls to the guess x_0 instead of to zero.

    With G = U U^T and b = U e it is the minimum of |U^T x - e|^2 + l |x - x_0|^2, x = x_0 + (G + l I)^-1 (b - G x_0):
    a projected Kaczmarz step. With the last step times `momentum` as the guess, which is what an optimizer's
    `warm_start=momentum` passes on, it is SPRING. Without a guess it is the solver within. Damping of a block's own,
    which is part of the operator, pulls to zero as ever.

    Args:
        solver: Of the system of x - x_0. Default: by shape and cost, `ng.Auto()`.

    Reference:
        Goldshlager, Abrahamsen & Lin 2024, whose mu is `warm_start`.

    Example:
        >>> G = ng.operators.DenseOperator(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        >>> rhs, guess = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 5.0])
        >>> ng.solvers.Spring().solve(G, rhs, damping=1.0, guess=guess).value  # what G does not see stays
        tensor([1., 5.])
    """

    solver: Solver = Auto()

    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        if guess is None:
            return self.solver.solve(operator, rhs, damping=damping)
        check_system(operator, rhs, damping, guess)
        image = operator.mv(guess)
        solution = self.solver.solve(operator, rhs - image, damping=damping)
        return replace(
            solution,
            value=guess + solution.value,
            image=solution.image + image + damping * guess,
            steps=solution.steps + 1,
            basis=None,
            iterates=(),
        )
