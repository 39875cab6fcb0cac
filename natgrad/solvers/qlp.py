"""The QLP factors of a Lanczos matrix, one column at a time, and the two ways to sum the solution they define."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


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
