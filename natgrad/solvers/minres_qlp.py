"""MINRES-QLP: symmetric systems, indefinite, singular and inconsistent ones too, to their minimum-length solution."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.ground.checks import check_integer, check_number
from natgrad.ground.typed_torch import measure_norm as measure_in_dtype
from natgrad.operators import Operator
from natgrad.solvers.base import Solution, Status, UnitSolver


def measure_norm(x: Tensor) -> Tensor:
    """|x| with squares in float64: those of A v overflow float32 where |A| is beyond 1e19, and vanish below 1e-23."""
    return measure_in_dtype(x, dtype=torch.float64)


class Reflection(NamedTuple):
    """[[c, s], [s, -c]] with c a + s b = rho >= 0 and s a - c b = 0."""

    c: float = -1.0
    s: float = 0.0
    rho: float = 0.0

    @classmethod
    def onto(cls, a: float, b: float) -> Reflection:
        """The one that takes (a, b) to (rho, 0); (0, 0) to itself."""
        rho = math.hypot(a, b)
        return cls(a / rho, b / rho, rho) if rho else cls()

    def __call__(self, a: float, b: float) -> tuple[float, float]:
        return self.c * a + self.s * b, self.s * a - self.c * b


class BandRow(NamedTuple):
    """Row j of L u = t: eta, theta, gamma in columns j - 2, j - 1, j, and tau on the right. Zeros: no such row."""

    eta: float = 0.0
    theta: float = 0.0
    gamma: float = 0.0
    tau: float = 0.0

    def find_shortfall(self, mu2: float, mu1: float) -> float:
        """What mu_j has to make up for."""
        return self.tau - self.eta * mu2 - self.theta * mu1

    def solve(self, mu2: float, mu1: float) -> float:
        """mu_j from mu_{j-2} and mu_{j-1}."""
        return divide_or_zero(self.find_shortfall(mu2, mu1), self.gamma)


@dataclass(frozen=True)
class Factors:
    """Q_k T_k = R_k and R_k P_k = L_k after k Lanczos steps: the scalars from which step k + 1 and the vectors follow.

    T_k (k + 1, k) is the tridiagonal Lanczos matrix, Q_k and P_k are products of reflections, L_k is lower triangular
    with three diagonals: its last ones, gamma, find the small singular values that R_k's hide. L_k u_k = t_k is what
    |beta_1 e_1 - T_k y| is minimised by, y = P_k u_k. Choi, Paige & Saunders 2011, sections 2 and 5.
    """

    phi: float  # phi_k = |r_k|
    beta: float = 0.0  # beta_{k+1}; 0 for k = 0
    left: tuple[Reflection, Reflection] = (Reflection(), Reflection())  # of Q_k: steps k - 1 and k
    right: tuple[Reflection, Reflection] = (Reflection(), Reflection())  # of P_k: P_{k-2,k} and P_{k-1,k}
    epsilon: float = 0.0  # column k of R_k is epsilon, delta, and the rho of the left reflection
    delta: float = 0.0
    rho2: float = 0.0  # rho_{k-2}
    rows: tuple[BandRow, BandRow] = (BandRow(), BandRow())  # k - 1 and k of L_k
    mu: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # mu_{k-3} to mu_k; the last two will still change
    settled: float = 0.0  # |(mu_1 .. mu_{k-2})|
    norm: float = 0.0  # lower bound on |A|
    least: float = math.inf  # the smallest of gamma_1 .. gamma_{k-2}
    normal: float = math.nan  # |A r_{k-1}|; after `drop_last`, a bound on |A r_k|

    @property
    def length(self) -> float:
        """|x_k| = |u_k|."""
        return math.hypot(self.settled, self.mu[2], self.mu[3])

    @property
    def smallest(self) -> float:
        """The smallest |gamma|, an upper bound on the smallest singular value; a dropped one does not count."""
        return min([self.least, *(abs(row.gamma) for row in self.rows if row.gamma)])

    @property
    def condition(self) -> float:
        """|A| over the smallest |gamma|: a lower bound on cond(A)."""
        return max(1.0, divide_or_zero(self.norm, self.smallest))

    def extend(self, alpha: float, beta: float) -> Factors:
        """Step k, by alpha_k and beta_{k+1}."""
        before, last = self.left
        epsilon, delta_bar = before(0.0, self.beta)
        delta, gamma_bar = last(delta_bar, alpha)
        reflection = Reflection.onto(gamma_bar, beta)
        tau, phi = reflection(self.phi, 0.0)
        return replace(
            self._reflect(epsilon, delta, reflection.rho, tau),
            phi=phi,
            beta=beta,
            left=(last, reflection),
            epsilon=epsilon,
            delta=delta,
            rho2=before.rho,
            norm=max(self.norm, math.hypot(self.beta, alpha, beta), reflection.rho),
            normal=self.phi * math.hypot(gamma_bar, last.c * beta),
        )

    def _reflect(self, epsilon: float, delta: float, rho: float, tau: float) -> Factors:
        """P_{k-2,k} takes epsilon out of row k - 2, then P_{k-1,k} what has become of delta out of row k - 1."""
        row2, row1 = self.rows
        outer = Reflection.onto(row2.gamma, epsilon)
        row2 = row2._replace(gamma=outer.rho)
        theta, delta = outer(row1.theta, delta)
        eta, gamma = outer(0.0, rho)
        inner = Reflection.onto(row1.gamma, delta)
        row1 = row1._replace(theta=theta, gamma=inner.rho)
        row0 = BandRow(eta, *inner(0.0, gamma), tau)
        mu4, mu3 = self.mu[:2]
        mu2 = row2.solve(mu4, mu3)
        mu1 = row1.solve(mu3, mu2)
        return replace(
            self,
            right=(outer, inner),
            rows=(row1, row0),
            mu=(mu3, mu2, mu1, row0.solve(mu2, mu1)),
            settled=math.hypot(self.settled, mu2),
            least=min(self.least, row2.gamma or math.inf),
        )

    def drop_last(self) -> Factors:
        """mu_k = 0: the shortest solution where gamma_k is numerically zero, or at least without that direction."""
        row = self.rows[1]
        missed = row.find_shortfall(self.mu[1], self.mu[2])
        return replace(
            self,
            rows=(self.rows[0], row._replace(gamma=0.0)),
            mu=(*self.mu[:3], 0.0),
            phi=math.hypot(self.phi, missed),
            normal=self.normal + self.norm * min(abs(missed), abs(row.tau - missed)),  # by way of r_k or r_{k-1}
        )


class ShortSum:
    """MINRES: x_k = x_{k-1} + tau_k d_k with D_k R_k = V_k. Three passes over vectors; errors up to eps cond(A)^2."""

    def __init__(self, like: Tensor) -> None:
        self.x, self.d2, self.d1 = (torch.zeros_like(like) for _ in range(3))  # d_j is kept as rho_j d_j

    def add(self, f: Factors, v: Tensor) -> None:
        """Step k with its Lanczos vector v_k."""
        before, last = f.left
        d = torch.add(v, self.d2, alpha=-divide_or_zero(f.epsilon, f.rho2), out=self.d2)
        d.sub_(self.d1, alpha=divide_or_zero(f.delta, before.rho))
        self.x.add_(d, alpha=divide_or_zero(f.rows[1].tau, last.rho))
        self.d2, self.d1 = self.d1, d

    def orthonormal(self, f: Factors) -> OrthonormalSum:
        """The same x_k as a sum over W_k = V_k P_k = D_k L_k, of which the last two columns are formed."""
        (row2, row1), (before, last) = f.rows, f.left
        w2 = self.d2.mul_(divide_or_zero(row2.gamma, before.rho)).add_(
            self.d1, alpha=divide_or_zero(row1.theta, last.rho)
        )
        w1 = self.d1.mul_(divide_or_zero(row1.gamma, last.rho))
        return OrthonormalSum(self.x.sub_(w2, alpha=f.mu[2]).sub_(w1, alpha=f.mu[3]), w2, w1)

    def total(self, f: Factors) -> Tensor:
        """x_k."""
        return self.x


class OrthonormalSum:
    """QLP: x_k = W_k u_k, W_k = V_k P_k orthonormal, a column added when no reflection will change it. Eight passes."""

    def __init__(self, settled: Tensor, w2: Tensor, w1: Tensor) -> None:
        self.x, self.w2, self.w1 = settled, w2, w1
        self.spare = torch.empty_like(w1)

    def add(self, f: Factors, v: Tensor) -> None:
        """Step k with its Lanczos vector v_k."""
        outer, inner = f.right
        self.x.add_(self.w2, alpha=f.mu[1] * outer.c).add_(v, alpha=f.mu[1] * outer.s)
        w = self.w2.mul_(outer.s).sub_(v, alpha=outer.c)
        w1 = torch.mul(self.w1, inner.s, out=self.spare).sub_(w, alpha=inner.c)
        self.w2, self.w1, self.spare = self.w1.mul_(inner.c).add_(w, alpha=inner.s), w1, w

    def orthonormal(self, f: Factors) -> OrthonormalSum:
        """Itself."""
        return self

    def total(self, f: Factors) -> Tensor:
        """x_k. Ends the sum: the vectors are used up."""
        return self.x.add_(self.w2, alpha=f.mu[2]).add_(self.w1, alpha=f.mu[3])


def divide_or_zero(a: float, b: float) -> float:
    """a / b, 0 where there is nothing yet to divide by."""
    return a / b if b else 0.0


GROWTH = 0.01  # of |r|, allowed where a direction is taken from x


@dataclass(frozen=True)
class MinresQLP(UnitSolver):
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

    def _solve(self, operator: Operator, rhs: Tensor, damping: float, guess: Tensor | None, scale: float) -> Solution:
        choices, system = replace(self, max_norm=self.max_norm / scale), _System(operator, rhs, float(damping))
        point = system.start(guess)
        run = _LanczosRun(choices, system, point)
        left, status = self.max_steps, None
        while status is None:
            claim = run.run_until_stop(left)
            left -= run.step
            reached = system.move_by(point, run.sum.total(run.factors)) if run.step else point
            status = run.check_claim(claim, point, reached, left)
            if reached.norm <= point.norm:
                point = reached
            if status is None:
                run = _LanczosRun(choices, system, point, run.factors)
        extra = run.estimates(status)
        if status is Status.LEAST_SQUARES:
            point, extra["normal_residual"] = system.shorten(point, self.preconditioner)
        extra |= {name: scale * extra[name] for name in ("value_norm", "residual_norm", "normal_residual")}
        return Solution(point.value, point.residual, system.products, status, point.image, extra)


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
        residual = measure_norm(r).to(r.dtype)
        return _Point(value, image, r, residual, float(residual))

    def start(self, guess: Tensor | None) -> _Point:
        """The guess x_0; where zero is better, x_0 b^T A x_0 / |A x_0|^2; zero where even that overflows."""
        zero = torch.zeros_like(self.rhs)
        if guess is None:
            return self.at(zero, zero.clone())
        image = self.image(guess)
        point = self.at(guess.clone(), image)
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
