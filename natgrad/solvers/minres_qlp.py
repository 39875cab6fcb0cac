"""MINRES-QLP: symmetric systems, indefinite, singular and inconsistent ones too, to their minimum-length solution."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.checks import check_integer, check_number
from natgrad.operators import Operator
from natgrad.solvers.base import Solution, Solver, Status, check_system, find_power_of_two, restore_units
from natgrad.solvers.qlp import Factors, OrthonormalSum, ShortSum
from natgrad.typed_torch import measure_norm

GROWTH = 0.01  # of |r|, allowed where a direction is taken from x


@dataclass(frozen=True)
class MinresQLP(Solver):
    """min |b - A x| over growing Krylov spaces of A = G + damping I, and of all minimisers the shortest.

    A may be indefinite or singular, and b may lie outside its range: then the run ends with LEAST_SQUARES, at A^+ b.
    |r| falls with every step, so a run that is cut short returns its best vector.

    A guess x_0 is improved by the shortest solution of A e = b - A x_0. A guess that is worse than zero is first scaled
    to its best length. At the end one product measures r = b - A x, so `residual` and `image` carry no drift. Where the
    recurrence had promised more, the run goes on from the measured r (iterative refinement) until the promise is kept,
    or until nothing more is gained: ROUND_OFF.

    `Solution.extra` holds operator_norm and condition (lower bounds on |A| and cond(A), the latter without what was
    left out), value_norm and residual_norm (|x| and |r| by recurrence) and normal_residual (|A r| of the last iterate
    but one; with LEAST_SQUARES it was measured before x lost its part along r). With a preconditioner they refer to
    P^1/2 A P^1/2, and value_norm is |e| of the last correction if there was a guess or a refinement.

    Args:
        rtol: Stop when |r| <= rtol |b|.
        max_steps: Lanczos steps, at most. Each costs one product with G.
        null_rtol: Stop when |A r| <= null_rtol |A| |r|: the rest of b counts as outside the range of A, and x loses its
            part along r, which is numerically in the null space. None: 2 sqrt(eps). On inconsistent systems round-off
            stops the ratio |A r| / (|A| |r|) somewhere below sqrt(eps) (measured), and the vectors grow without bound
            from there, so smaller values do harm. With cond(A) > 1e8 (float32: 1e4) they may be needed where b is known
            to be in the range.
        max_norm: Stop before |x| exceeds it (maxxnorm in the paper).
        max_condition: Stop when cond(A) is estimated above it, and leave out the direction that raised it (Acondlim in
            the paper). None: 1 / (4 eps).
        transfer: The estimate of cond(A) from which x is summed over orthonormal directions, the QLP phase (TranCond in
            the paper). None: 0.1 / sqrt(eps). 1: from the first step. inf: never.
        backward_error: Use the paper's weaker |r| <= rtol (|A| |x| + |b|) in place of the first test.
        preconditioner: A positive definite operator P ~ A^-1, applied once per step. Where A is singular the result
            then is the least-squares solution in the norm r^T P r, shortest in x^T P^-1 x.

    Raises:
        ValueError: For a number out of range.

    Reference:
        Choi, Paige & Saunders 2011, SIAM J. Sci. Comput. 33(4).

    Example:
        >>> G = ng.operators.DiagonalOperator(torch.tensor([2.0, 1.0, 0.0]))  # singular, and b lies outside its range
        >>> solution = ng.MinresQLP().solve(G, torch.tensor([2.0, 1.0, 1.0]))
        >>> [round(x, 3) for x in solution.value.tolist()], solution.status.name
        ([1.0, 1.0, 0.0], 'LEAST_SQUARES')
    """

    rtol: float = 1e-5
    max_steps: int = 100
    null_rtol: float | None = None
    max_norm: float = math.inf
    max_condition: float | None = None
    transfer: float | None = None
    backward_error: bool = False
    preconditioner: Operator | None = None

    def __post_init__(self) -> None:
        check_integer("max_steps", self.max_steps)
        if not self.max_norm > 0:
            raise ValueError(f"max_norm is {self.max_norm}, expected a number > 0")
        for name, least in (("rtol", 0), ("null_rtol", 0), ("max_condition", 1), ("transfer", 1)):
            came = getattr(self, name)
            if came is not None:
                check_number(name, came, least)

    def solve(self, operator: Operator, rhs: Tensor, *, damping: float = 0.0, guess: Tensor | None = None) -> Solution:
        check_system(operator, rhs, damping, guess)
        scale = find_power_of_two(rhs)
        scaled = replace(self, max_norm=self.max_norm / scale)
        found = scaled._solve(operator, rhs / scale, float(damping), None if guess is None else guess / scale)
        extra = {name: scale * size if name in SIZES else size for name, size in found.extra.items()}
        return restore_units(replace(found, extra=extra), scale, operator, rhs, damping)

    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None) -> Solution:
        system = _System(operator, rhs.detach(), damping)
        point = system.start(guess)
        run = _LanczosRun(self, system, point)
        left, status = self.max_steps, None
        while status is None:
            claim = run.run_until_stop(left)
            left -= run.step
            reached = system.move_by(point, run.sum.total(run.factors)) if run.step else point
            status = run.check_claim(claim, point, reached, left)
            if reached.norm <= point.norm:
                point = reached
            if status is None:
                run = _LanczosRun(self, system, point, run.factors)
        extra = run.estimates(status)
        if status is Status.LEAST_SQUARES:
            point, extra["normal_residual"] = system.shorten(point, self.preconditioner)
        return Solution(point.value, point.residual, system.products, status, point.image, extra)


SIZES = ("value_norm", "residual_norm", "normal_residual")  # estimates that grow with b


class _Point(NamedTuple):
    """x and what was measured there."""

    value: Tensor  # x
    image: Tensor  # A x
    r: Tensor  # b - A x
    residual: Tensor  # |r|, a scalar tensor
    norm: float  # |r|


class _System:
    """A = G + damping I and b, and a count of the products."""

    def __init__(self, operator: Operator, rhs: Tensor, damping: float) -> None:
        self.operator, self.rhs, self.damping = operator, rhs, damping
        self.scale = float(measure_norm(rhs))
        self.products = 0

    def product(self, vector: Tensor) -> Tensor:
        """G v. May be v itself, or memory of the operator's: not to be written to."""
        self.products += 1
        return self.operator.mv(vector).detach()

    def image(self, vector: Tensor) -> Tensor:
        """A v, in memory of its own."""
        return torch.add(self.product(vector), vector, alpha=self.damping)

    def at(self, value: Tensor, image: Tensor) -> _Point:
        """The point x, its A x being known."""
        r = self.rhs - image
        residual = measure_norm(r)
        return _Point(value, image, r, residual, float(residual))

    def start(self, guess: Tensor | None) -> _Point:
        """The guess x_0; where zero is better, x_0 b^T A x_0 / |A x_0|^2; zero where even that overflows."""
        zero = torch.zeros_like(self.rhs)
        if guess is None:
            return self.at(zero, zero.clone())
        image = self.image(guess.detach())
        point = self.at(guess.detach().clone(), image)
        if point.norm <= self.scale:
            return point
        length = float(self.rhs @ image) / float(image @ image) if math.isfinite(point.norm) else 0.0
        return self.at(length * point.value, length * image) if length else self.at(zero, zero.clone())

    def move_by(self, point: _Point, correction: Tensor) -> _Point:
        """x + correction, measured by one product."""
        value = correction.add_(point.value)
        return self.at(value, self.image(value))

    def shorten(self, point: _Point, preconditioner: Operator | None) -> tuple[_Point, float]:
        """x - d r^T x / r^T d for d = P r, and |A d|: where A d = 0, this is the shortest x with the same A x.

        Of all null vectors only d has entered the Krylov space, so one subtraction is enough. To leave out the last
        column of W_k instead gives an x as good (errors within a factor 2), but A r a hundred times larger (measured).
        Not done where |r| would grow by more than `GROWTH`: then A d is small only because A is ill-conditioned.
        """
        d = point.r if preconditioner is None else preconditioner.mv(point.r).detach()
        image = self.image(d)
        along = float(point.r @ point.value) / float(point.r @ d)
        shorter = self.at(point.value - along * d, point.image - along * image)
        return shorter if shorter.norm <= (1 + GROWTH) * point.norm else point, float(measure_norm(image))


class _LanczosRun:
    """One Lanczos process, from a measured r on. It minimises |r - A e| over e."""

    def __init__(self, choices: MinresQLP, system: _System, start: _Point, known: Factors | None = None) -> None:
        eps = torch.finfo(system.rhs.dtype).eps
        self.choices, self.system, self.eps, self.step = choices, system, eps, 0
        self.null_rtol = 2 * eps**0.5 if choices.null_rtol is None else choices.null_rtol
        self.max_condition = 0.25 / eps if choices.max_condition is None else choices.max_condition
        self.transfer = 0.1 / eps**0.5 if choices.transfer is None else choices.transfer
        self.lanczos = _Lanczos(system, start.r, choices.preconditioner)
        self.refining, self.first_phi, self.first_normal = known is not None, self.lanczos.beta, math.inf
        self.factors = Factors(phi=self.lanczos.beta)
        if known is not None:
            self.factors = Factors(phi=self.lanczos.beta, norm=known.norm, least=known.smallest)
        self.sum: ShortSum | OrthonormalSum = ShortSum(system.rhs)
        self.r = None if choices.preconditioner is None else start.r.clone()
        self.norm, self.start_norm = start.norm, float(measure_norm(start.value))

    @property
    def round_off(self) -> float:
        """eps (|A| |x| + |b|): the measured residual is known no better. With a guess, |x| is bounded from below."""
        return self.eps * (self.factors.norm * abs(self.start_norm - self.factors.length) + self.system.scale)

    @property
    def tolerance(self) -> float:
        """What |r| has to meet."""
        scale = self.round_off / self.eps if self.choices.backward_error else self.system.scale
        return self.choices.rtol * scale

    def run_until_stop(self, budget: int) -> Status:
        """Steps until a test is met, at most `budget`. The status is what the recurrences say."""
        status = self._residual_test()
        while status is None:
            if self.step >= budget:
                return Status.MAX_STEPS
            status = self._advance() or self._residual_test()
        return status

    def check_claim(self, claim: Status, before: _Point, after: _Point, left: int) -> Status | None:
        """What the measured residual makes of the claim; None: go on from there."""
        if not math.isfinite(after.norm):
            return Status.NON_FINITE
        if after.norm <= self.tolerance:
            return Status.CONVERGED
        if self.refining and claim is Status.LEAST_SQUARES:
            return Status.ROUND_OFF
        if claim not in (Status.CONVERGED, Status.ROUND_OFF):
            return claim
        if after.norm <= self.round_off or after.norm > 0.5 * before.norm:
            return Status.ROUND_OFF
        return None if left > 0 else Status.MAX_STEPS

    def estimates(self, status: Status) -> dict[str, float]:
        """`extra` of the solution."""
        f = self.factors
        return {
            "operator_norm": f.norm,
            "condition": f.drop_last().condition if status is Status.LEAST_SQUARES else f.condition,
            "value_norm": f.length,
            "residual_norm": f.phi,
            "normal_residual": f.normal,
        }

    def _advance(self) -> Status | None:
        """Step k, or the reason why it was not taken."""
        if self.lanczos.beta <= 0:
            return Status.INDEFINITE_PRECONDITIONER
        alpha, beta = self.lanczos.extend()
        self.step += 1
        if not math.isfinite(alpha + beta):
            return Status.NON_FINITE
        factors = self.factors.extend(alpha, abs(beta))
        status = self._limit_test(factors)
        if status is not None and status is not Status.ILL_CONDITIONED:
            return status
        if status is not None:
            factors = factors.drop_last()
            if factors.phi > (1 + GROWTH) * self.factors.phi:
                return status
        if status is not None or factors.condition > self.transfer:
            self.sum = self.sum.orthonormal(self.factors)
        self.sum.add(factors, self.lanczos.v)
        self.factors = factors
        self.lanczos.turn()
        self._measure()
        return status

    def _limit_test(self, factors: Factors) -> Status | None:
        """The tests on |A r_{k-1}|, cond(A) and |x_k|, which decide how step k is taken, or that it is not."""
        if factors.normal <= self.null_rtol * factors.norm * self.factors.phi:
            return Status.LEAST_SQUARES
        if self.step == 1:
            self.first_normal = factors.normal
        elif self.first_normal <= self.null_rtol * factors.norm * self.first_phi:
            self._forget(factors)
            return Status.LEAST_SQUARES
        if factors.condition > self.max_condition:
            return Status.ILL_CONDITIONED
        return Status.NORM_LIMIT if self.start_norm + factors.length > self.choices.max_norm else None

    def _forget(self, factors: Factors) -> None:
        """Back to r_0: it was in the null space, which step 1 could not know, with |A| as yet unseen."""
        self.sum = ShortSum(self.system.rhs)
        self.factors = Factors(phi=self.first_phi, norm=factors.norm, normal=self.first_normal)

    def _measure(self) -> None:
        """|r|. phi is |P^1/2 r|, so with a preconditioner r is recurred: r_k = s^2 r_{k-1} - phi_k c M v_{k+1}."""
        self.norm = self.factors.phi
        if self.r is not None:
            _, last = self.factors.left
            self.r.mul_(last.s**2).sub_(self.lanczos.m, alpha=self.norm * last.c)
            self.norm = float(measure_norm(self.r))

    def _residual_test(self) -> Status | None:
        """One per cent is kept in hand for the difference between the recurrence and the measurement."""
        if self.norm <= 0.99 * self.tolerance:
            return Status.CONVERGED
        exhausted = self.step > 0 and self.lanczos.beta == 0
        return Status.ROUND_OFF if exhausted or self.norm <= self.round_off else None


class _Lanczos:
    """A v_k = beta_k m_{k-1} + alpha_k m_k + beta_{k+1} m_{k+1}, m_k = M v_k with M = P^-1, v_i^T M v_j = [i = j].

    Holds v_k, m_k (the same vector without a preconditioner), m_{k-1} and beta_k, at first for k = 1 with beta_1 = |r|.
    """

    def __init__(self, system: _System, r: Tensor, preconditioner: Operator | None) -> None:
        self.system, self.preconditioner = system, preconditioner
        self.m, self.other, self.first = torch.zeros_like(r), r.clone(), True
        self.next_beta = self._length()
        self.turn()

    def extend(self) -> tuple[float, float]:
        """alpha_k and beta_{k+1}. beta_{k+1} m_{k+1} takes the memory of m_{k-1}; the damping costs nothing here."""
        damping = self.system.damping
        z = torch.add(self.system.product(self.v), self.other, alpha=0.0 if self.first else -self.beta, out=self.other)
        if self.preconditioner is not None and damping:
            z.add_(self.v, alpha=damping)
        alpha = float(self.v @ z)  # after beta_k m_{k-1} is out: the more stable of the two orders
        z.sub_(self.m, alpha=alpha)
        self.next_beta, self.first = self._length(), False
        return alpha + (damping if self.preconditioner is None else 0.0), self.next_beta

    def turn(self) -> None:
        """k <- k + 1. A beta of 0 leaves v at 0."""
        self.beta = self.next_beta
        scale = 1 / self.beta if self.beta else 0.0
        self.m, self.other = self.other.mul_(scale), self.m
        self.v = self.m if self.preconditioner is None else self.q * scale

    def _length(self) -> float:
        """sqrt(z^T P z), and q = P z kept; negative where P is indefinite beyond round-off."""
        z = self.other
        if self.preconditioner is None:
            return float(measure_norm(z))
        self.q = self.preconditioner.mv(z).detach()
        square = float(z @ self.q)
        if square > 0 or not math.isfinite(square):
            return square**0.5
        noise = 10 * torch.finfo(z.dtype).eps * float(measure_norm(z)) * float(measure_norm(self.q))
        return 0.0 if -square <= noise else -math.sqrt(-square)
