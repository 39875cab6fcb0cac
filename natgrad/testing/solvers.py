"""Solvers: residual, image, steps and status are what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from natgrad.ground.linalg import pseudo_inverse
from natgrad.operators import (
    BlockOperator,
    DenseOperator,
    DiagonalOperator,
    KroneckerOperator,
    LowRankOperator,
    Operator,
)
from natgrad.solvers import Solution, Solver, Status
from natgrad.testing.requirements import require, require_close, require_raises


def check_solver(
    solver: Solver,
    *,
    operators: Mapping[str, Operator] | None = None,
    damping: float = 0.1,
    rtol: float = 1e-6,
    minimum_norm: bool = False,
) -> None:
    """The solver solves, and its residual, image, steps and status are what they say.

    Args:
        solver: The solver.
        operators: Name -> operator, default a table of small ones that have a root.
        damping: In the operators' units.
        rtol: Allowed |b - A x| / |b| where the status is CONVERGED.
        minimum_norm: Demand G^+ b at damping 0 for b in the range, whether G is singular or not.

    Raises:
        AssertionError: With a sentence, for a property that does not hold.

    Example:
        >>> from natgrad.testing import check_solver
        >>> check_solver(ng.CG(rtol=1e-8))
    """
    for name, operator in (_example_operators() if operators is None else operators).items():
        generator = torch.Generator().manual_seed(0)
        rhs = torch.randn(operator.size, generator=generator, device=generator.device, dtype=operator.dtype).to(
            operator.device
        )
        _require_solution(solver, name, operator, rhs, damping, rtol)
        if minimum_norm:
            least = pseudo_inverse(operator.dense()) @ operator.mv(rhs)
            solution = solver.solve(operator, operator.mv(rhs)).value
            require_close(f"on {name}, the undamped solution (minimum norm, G^+ b)", solution, least, 1e3 * rtol)
        nothing = solver.solve(operator, torch.zeros_like(rhs), damping=damping)
        require(not nothing.value.any(), f"on {name}, the solution for rhs = 0 is not 0")
    _require_errors(solver)
    overflow = DiagonalOperator(torch.tensor([1.0, torch.inf, 1.0], dtype=torch.float64))
    broken = solver.solve(overflow, torch.ones(3, dtype=torch.float64), damping=damping)
    require(broken.status != Status.CONVERGED, "on an operator that overflows, the status is CONVERGED")
    require(
        bool(broken.value.isfinite().all()),
        "on an operator that overflows, the value is not finite; keep the last finite one",
    )


def _example_operators() -> dict[str, Operator]:
    """Small operators, all with a root: what `check_solver` solves with."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float64)

    def spd(n: int) -> Tensor:
        return torch.cov(draw(n, 3 * n)).view(n, n)

    thin = draw(9, 4)
    return {
        "Dense": DenseOperator(spd(8)),
        "Dense of size one": DenseOperator(spd(1)),
        "Dense of rank four": DenseOperator(thin @ thin.mT),
        "Diagonal": DiagonalOperator(draw(7).square()),
        "LowRank": LowRankOperator(draw(10, 3)),
        "LowRank with more columns than rows": LowRankOperator(draw(5, 12)),
        "Kronecker": KroneckerOperator(spd(3), spd(4)),
        "Block": BlockOperator(
            [DenseOperator(spd(3)), DiagonalOperator(draw(4).square()), LowRankOperator(draw(5, 2))]
        ),
        "Scaled sum": 0.5 * (DenseOperator(spd(6)) + LowRankOperator(draw(6, 2))),
    }


def _require_solution(solver: Solver, name: str, operator: Operator, rhs: Tensor, damping: float, rtol: float) -> None:
    copy, on, norm = rhs.clone(), f"on {name},", float(rhs.norm())
    solution = solver.solve(operator, rhs, damping=damping)
    require(isinstance(solution, Solution), f"solve returned {type(solution).__name__}, expected a Solution")
    require(torch.equal(rhs, copy), f"{on} solve changed rhs in place")
    value, kind = solution.value, (solution.value.shape, solution.value.dtype)
    require(kind == (rhs.shape, rhs.dtype), f"{on} the value is {kind}, expected {(rhs.shape, rhs.dtype)}")
    require(bool(value.isfinite().all()), f"{on} the value is not finite")
    require(isinstance(solution.status, Status), f"{on} the status is {solution.status!r}, expected a Status")
    require(isinstance(solution.steps, int) and solution.steps >= 0, f"{on} steps is {solution.steps!r}")
    image = operator.mv(value) + damping * value
    residual, accuracy = (rhs - image).norm(), torch.finfo(rhs.dtype).eps ** 0.5
    require_close(f"{on} the image (G + damping I) x", solution.image, image, accuracy, norm)
    require_close(f"{on} the residual |b - (G + damping I) x|", solution.residual, residual, accuracy, norm)
    ratio = float(residual) / norm
    honest = solution.status != Status.CONVERGED or ratio <= rtol
    require(honest, f"{on} the status is CONVERGED with |r| / |b| = {ratio:.3g}, allowed {rtol:.3g}")
    require(ratio <= 1, f"{on} the value is worse than zero: |r| / |b| = {ratio:.3g}")


def _require_errors(solver: Solver) -> None:
    operator, rhs = DenseOperator(torch.eye(3, dtype=torch.float64)), torch.ones(3, dtype=torch.float64)
    calls: dict[str, Callable[[], Any]] = {
        "rhs with an entry too many": lambda: solver.solve(operator, rhs.new_ones(4)),
        "rhs as a column (n, 1)": lambda: solver.solve(operator, rhs.unsqueeze(1)),
        "a NaN in rhs": lambda: solver.solve(operator, rhs * torch.nan),
        "a negative damping": lambda: solver.solve(operator, rhs, damping=-1.0),
        "a NaN as damping": lambda: solver.solve(operator, rhs, damping=float("nan")),
        "a guess of another shape": lambda: solver.solve(operator, rhs, guess=rhs[:2]),
        "a matrix instead of an operator": lambda: solver.solve(rhs.diag(), rhs),  # pyright: ignore
    }
    for what, call in calls.items():
        require_raises(what, call)
