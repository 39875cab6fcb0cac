"""Conjugate gradients as truncated Newton methods use them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_number
from natgrad.ground.typed_torch import measure_norm
from natgrad.operators import Operator
from natgrad.solvers.base import Iterate, Solution, Status, UnitSolver

Callback = Callable[[int, Tensor, float], None]


@dataclass(frozen=True)
class CG(UnitSolver):
    """Preconditioned conjugate gradients on A x = b with A = G + damping I.

    A direction without curvature, d^T A d <= 0 up to round-off, ends the run with NEGATIVE_CURVATURE and the iterate of
    smallest residual. An overflow ends it with NON_FINITE. On a singular consistent system, started at zero, the result
    is the minimum-norm solution. On an inconsistent one the method breaks down: use `ng.MinresQLP` there.

    Args:
        rtol: Stop when |r| <= rtol |b|.
        max_steps: Products with G, at most.
        progress: Martens' stop (he takes 5e-4), checked from step 10 on: stop when over the last k = max(10, step / 10)
            steps the quadratic model phi(x) = x^T A x / 2 - b^T x fell by less than k * progress * |phi|. None: no such
            stop.
        preconditioner: An operator P ~ A^-1, applied once per step.
        callback: Called as callback(step, x, residual) after every step.
        refresh: Every so many steps r = b - A x is computed afresh, because in float32 the recurrence drifts from it.
            It is computed once more at the end where round-off may have moved it by a tenth, so that the reported
            residual is true.
        keep: Store iterates at steps that grow by this factor (Martens: 1.3) as `Solution.iterates`, for rules that go
            back over them (`ng.LineSearch(iterates=True)`). Each takes 2 vectors of memory. None: store none.

    Raises:
        ValueError: For a number out of range.

    Reference:
        Hestenes & Stiefel 1952. The stops: Martens 2010, section 4.4.

    Example:
        >>> G = ng.operators.DiagonalOperator(torch.tensor([1.0, 2.0]))
        >>> ng.CG(rtol=1e-6).solve(G, torch.ones(2)).value
        tensor([1.0000, 0.5000])
    """

    rtol: float = 1e-5
    max_steps: int = 100
    progress: float | None = None
    preconditioner: Operator | None = None
    callback: Callback | None = None
    refresh: int = 50
    keep: float | None = None

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol)
        if self.keep is not None and not self.keep > 1:
            raise ValueError(
                f"keep is {self.keep}, expected a factor > 1 between steps whose iterates are stored, or None"
            )
        for name in ("max_steps", "refresh"):
            check_integer(name, getattr(self, name))

    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float) -> Solution:
        run = _CGRun(self, operator, rhs, damping, guess, scale)
        while run.status is None:
            run.advance()
        return run.solution()


class _CGRun:
    """One solve: x iterate, r residual, z = P r, d direction, A = G + damping I."""

    def __init__(
        self, choices: CG, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float
    ) -> None:
        # vectors are written over: a fresh one of 11 MB costs twice its arithmetic, for the pages that it touches first
        self.choices, self.operator, self.damping, self.rhs, self.scale = choices, operator, damping, rhs, scale
        self.x, self.r = torch.zeros_like(rhs), rhs.clone()
        self.spare = torch.empty_like(rhs)
        self.pairs: list[tuple[Tensor, Tensor]] = []  # memory for (x, r): the current one, the best, the next
        self.products = 0
        if guess is not None:
            self.start_at(guess)
        self.step = 0
        self.status: Status | None = None
        self.tolerance = choices.rtol * float(measure_norm(self.rhs))
        self.norm = float(measure_norm(self.r))
        self.best = (self.norm, self.x, self.r)
        self.curvature = 0.0  # largest d^T A d / d^T d so far, a lower bound on the largest eigenvalue
        self.measured = math.inf  # the residual that the last restart began with
        self.iterates: list[tuple[int, Iterate]] = []  # by step
        self.models = [-0.5 * float(self.x @ (self.r + self.rhs))]  # phi, which falls by alpha r^T z / 2 per step
        z, self.rz = self.precondition()
        self.d = z.clone()
        if self.norm <= self.tolerance:
            self.status = Status.CONVERGED

    def start_at(self, guess: Tensor) -> None:
        """Start warm, unless zero is nearer in the energy norm: a guess from another batch can be far worse than it."""
        residual = self.rhs - self.image(guess)
        if bool(guess @ (residual + self.rhs) > 0):  # phi(guess) < phi(0); its residual may be larger all the same
            self.x, self.r = guess.clone(), residual

    def image(self, vector: Tensor) -> Tensor:
        """A v, in memory of its own: an operator may return its argument, or what it keeps."""
        self.products += 1
        return torch.add(self.operator.mv(vector).detach(), vector, alpha=self.damping, out=self.spare)

    def precondition(self) -> tuple[Tensor, float]:
        """z = P r and r^T z."""
        if self.choices.preconditioner is None:
            return self.r, self.norm * self.norm
        z = self.choices.preconditioner.mv(self.r).detach()
        return z, float(self.r @ z)

    def advance(self) -> None:
        """One step, or a status."""
        ad = self.image(self.d)
        dad, length = float(self.d @ ad), float(measure_norm(self.d))
        dd = length * length
        if not dad < float("inf") or abs(self.rz) > abs(dad) * torch.finfo(self.rhs.dtype).max:
            self.status = Status.NON_FINITE
            return
        self.curvature = max(self.curvature, dad / dd if dd > 0 else 0.0)
        if dad <= torch.finfo(self.rhs.dtype).eps * self.curvature * dd:
            self.status = Status.NEGATIVE_CURVATURE
            return
        self._move(self.rz / dad, ad)
        self._compare_with_best()
        z, rz = self.precondition()
        torch.add(z, self.d, alpha=rz / self.rz if self.rz else 0.0, out=self.d)
        self.rz = rz

    def _move(self, alpha: float, ad: Tensor) -> None:
        """x + alpha d and its residual, in memory that neither the current pair nor the best one holds."""
        held = {id(self.x), id(self.best[1])}
        free = next((pair for pair in self.pairs if id(pair[0]) not in held), None)
        if free is None:
            free = torch.empty_like(self.x), torch.empty_like(self.x)
            self.pairs.append(free)
        x, r = free
        torch.add(self.x, self.d, alpha=alpha, out=x)
        self.step += 1
        if self.step % self.choices.refresh:
            torch.add(self.r, ad, alpha=-alpha, out=r)
        else:
            torch.sub(self.rhs, self.image(x), out=r)
        self.x, self.r = x, r
        self.models.append(self.models[-1] - 0.5 * alpha * self.rz)

    def _compare_with_best(self) -> None:
        self.norm = float(measure_norm(self.r))
        if self.choices.callback is not None:
            self.choices.callback(self.step, self.scale * self.x, self.scale * self.norm)
        if not self.norm < float("inf"):
            self.status = Status.NON_FINITE
            return
        if self.norm <= self.best[0]:
            self.best = (self.norm, self.x, self.r)
        if self.choices.keep is not None and (
            not self.iterates or self.step >= self.choices.keep * self.iterates[-1][0]
        ):
            # copies, in the units of b: the pair's memory is written over
            self.iterates.append((self.step, Iterate(self.scale * self.x, self.scale * (self.rhs - self.r))))
        if self.norm <= self.tolerance:
            self.status = Status.CONVERGED
        elif self._has_stalled():
            self.status = Status.STALLED
        elif self.step >= self.choices.max_steps:
            self.status = Status.MAX_STEPS
        if self.status is not None and self._has_drifted():
            self._recompute()

    def _has_drifted(self) -> bool:
        """Whether round-off in the recurrence since the last fresh residual may exceed a tenth of it."""
        steps = self.step % self.choices.refresh
        eps = torch.finfo(self.rhs.dtype).eps
        drift = steps * eps * (self.curvature * float(measure_norm(self.x)) + float(measure_norm(self.rhs)))
        return drift > 0.1 * self.norm

    def _recompute(self) -> None:
        """r = b - A x afresh; on with the iteration if it does not meet the tolerance that the recurrence met."""
        self.r = self.rhs - self.image(self.x)
        self.norm = float(measure_norm(self.r))
        if self.status is not Status.CONVERGED or self.norm <= self.tolerance:
            return
        if self.norm > 0.5 * self.measured:  # the last restart gained nothing: this is what the dtype allows
            self.status = Status.ROUND_OFF
            return
        self.measured = self.norm
        self.status = None if self.step < self.choices.max_steps else Status.MAX_STEPS
        self.rz = 0.0  # conjugacy is lost: restart from the residual

    def _has_stalled(self) -> bool:
        """Martens' stop: phi < 0 and (phi - phi_k steps ago) / phi < k * progress."""
        window = max(10, self.step // 10)
        if self.choices.progress is None or self.step <= window or self.models[-1] >= 0:
            return False
        return (self.models[-1] - self.models[-1 - window]) / self.models[-1] < window * self.choices.progress

    def solution(self) -> Solution:
        """The last iterate, of lowest phi; after a breakdown the one of smallest residual."""
        broken = self.status in (Status.NEGATIVE_CURVATURE, Status.NON_FINITE)
        _, x, r = self.best if broken else (self.norm, self.x, self.r)
        assert self.status is not None
        iterates = () if broken else tuple(iterate for step, iterate in self.iterates if step < self.step)
        return Solution(x, measure_norm(r), self.products, self.status, self.rhs - r, iterates=iterates)
