"""The solve in the space of very many rows: conjugate gradients behind a randomised Nystroem approximation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_positive
from natgrad.ground.linalg import all_finite, factor_or_nan, svd, symmetrise
from natgrad.ground.typed_torch import measure_norm, torch_linalg
from natgrad.operators import Closed, Operator, SampleRows
from natgrad.solvers.base import (
    FactorisedSystem,
    RowSolver,
    Solution,
    Status,
    UnitSolver,
    measure_solution,
    require_rows,
    return_zero,
    write_rows,
)
from natgrad.solvers.cg import CG


@dataclass(frozen=True)
class Nystrom(UnitSolver, RowSolver):
    """(K + l I) y = w for the kernel K = U^T U (r, r) of G = U U^T, without K: for points too many to factorise it.

    K Omega for a drawn Omega (r, rank) gives K ~ V diag(s) V^T, whose damped inverse preconditions conjugate gradients.
    With `max_steps=0` it is the solution itself. A step costs one product with U and one with U^T.

    Args:
        rank: Columns of Omega, at most r of them.
        rtol: CG stops when |w - (K + l I) y| <= rtol |w|.
        max_steps: Of CG, at most; 0 takes the approximation, as Guzman-Cordero et al. do.
        seed: Of Omega, the same for every solve.

    Reference:
        Frangella, Tropp & Udell 2023 (the preconditioner); Guzman-Cordero et al. 2025 (in energy natural gradients).

    Example:
        >>> G = ng.operators.LowRankOperator(torch.eye(4, 3).double())
        >>> solution = ng.solvers.Nystrom(rank=2).solve(G + G, torch.ones(4).double(), damping=1.0)
        >>> solution.value  # 1 / (2 + 1), and 1 / 1 where G is zero
        tensor([0.3333, 0.3333, 0.3333, 1.0000], dtype=torch.float64)
    """

    rank: int = 100
    rtol: float = 1e-8
    max_steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("rank", self.rank)
        check_positive("rtol", self.rtol)
        check_integer("max_steps", self.max_steps, 0)

    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float) -> Solution:
        system = self._approximate(operator, write_rows, damping)
        y, steps, status = system.invert(system.rows.rmv(rhs))
        if status is Status.NON_FINITE:
            return return_zero(rhs, steps)
        return measure_run(operator, rhs, damping, (rhs - system.rows.mv(y)) / damping, steps, status)

    def factorise(self, operator: Operator, damping: float) -> NystromSystem:
        return self._approximate(operator, require_rows, damping)

    def _approximate(
        self, operator: Operator, read_rows: Callable[[Operator], SampleRows], damping: float
    ) -> NystromSystem:
        if not damping > 0:
            raise ValueError(f"damping is {damping}, expected a number > 0: {self} solves (K + damping I) y = w")
        rows = read_rows(operator)
        return NystromSystem(self, operator, rows, approximate_kernel(rows, operator, self.rank, self.seed), damping)


@dataclass(frozen=True, eq=False)
class NystromSystem(FactorisedSystem):
    """(K + l I) y = w for G = U U^T, K = U^T U ~ V diag(s) V^T: kernel is V (r, k) and s (k,), descending."""

    choices: Nystrom
    operator: Operator
    rows: SampleRows
    kernel: tuple[Tensor, Tensor]
    damping: float

    def solve(self, weights: Tensor) -> Solution:
        y, steps, status = self.invert(weights)
        return measure_run(self.operator, self.rows.mv(weights), self.damping, self.rows.mv(y), steps, status)

    def find_value(self, weights: Tensor) -> Tensor:
        y, _, status = self.invert(weights)
        return self.rows.mv(y) if status is not Status.NON_FINITE else self.rows.mv(y) * torch.nan

    def change_damping(self, damping: float) -> NystromSystem:
        return replace(self, damping=damping)

    def invert(self, weights: Tensor) -> tuple[Tensor, int, Status]:
        """y with (K + l I) y = w, the number of products with K, and why it stopped."""
        vectors, sizes = self.kernel
        if not (all_finite(weights) and all_finite(sizes)):
            return torch.zeros_like(weights), 0, Status.NON_FINITE
        if self.choices.max_steps == 0:
            return invert_spectrum(vectors, sizes + self.damping, self.damping, weights), 0, Status.MAX_STEPS
        least = float(sizes[-1]) if len(sizes) < self.rows.rank else 0.0
        inverse = partial(invert_spectrum, vectors, sizes + self.damping, least + self.damping)
        solver = CG(self.choices.rtol, self.choices.max_steps, preconditioner=Closed(weights, inverse))
        kernel = Closed(weights, lambda w: self.rows.rmv(self.rows.mv(w)))
        solution = solver.solve(kernel, weights, damping=self.damping)
        return solution.value, solution.steps, solution.status


def invert_spectrum(vectors: Tensor, sizes: Tensor, rest: float, weights: Tensor) -> Tensor:
    """V diag(1 / s) V^T w + (I - V V^T) w / rest for V (r, k) with V^T V = I, s (k,) and a number, all > 0."""
    inside = vectors.mT @ weights
    return weights / rest + vectors @ (inside / sizes - inside / rest)


def approximate_kernel(rows: SampleRows, operator: Operator, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """V (r, k) and s (k,) with K ~ V diag(s) V^T from K Omega: the stable way of Frangella et al., algorithm 2.1."""
    generator, shape = torch.Generator().manual_seed(seed), (rows.rank, min(rank, rows.rank))
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
    omega = svd(drawn.to(dtype=operator.dtype, device=operator.device))[0]
    if getattr(rows, "is_written", False):  # two products of matrices; else column by column
        columns = rows.dense()
        image = columns.mT @ (columns @ omega)
    else:
        image = torch.stack([rows.rmv(rows.mv(column)) for column in omega.unbind(1)], dim=1)
    if not all_finite(image):
        return omega, torch.full_like(omega[0], torch.nan)
    shift = torch.finfo(image.dtype).eps * float(measure_norm(image))
    image = image + shift * omega
    factor = factor_or_nan(symmetrise(omega.mT @ image))
    if not all_finite(factor):  # K = 0, or nearly so
        return omega, torch.zeros_like(omega[0])
    vectors, sizes, _ = svd(torch_linalg.solve_triangular(factor, image.mT, upper=False).mT)
    return vectors, (sizes.square() - shift).clamp(min=0)


def measure_run(operator: Operator, rhs: Tensor, damping: float, value: Tensor, steps: int, status: Status) -> Solution:
    """The solution with CG's status where that is not its convergence, else with what the whole residual says."""
    solution = measure_solution(operator.mv, rhs, damping, value, steps)
    done = status is Status.CONVERGED or solution.status is Status.NON_FINITE
    return solution if done else replace(solution, status=status)
