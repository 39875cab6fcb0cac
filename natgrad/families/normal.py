"""Normal distributions: independent ones, with a full, a sparse or a known covariance, with a known mean, complex."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from natgrad.families.event_checks import (
    as_tensors,
    centre,
    centre_varying,
    check_moments,
    check_rest,
    check_spreads,
    check_varies,
    check_width,
    floating_dtype,
    root_mean_square,
    widen,
)
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.product_families import Embedded
from natgrad.families.special_functions import in_double, ratio_gap
from natgrad.families.symmetric_matrices import (
    Pairs,
    factor_covariance,
    half_log_det,
    inverse_from,
    precision_gap,
    safe_factor,
    solve_factor,
)
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import is_concrete, is_positive_definite
from natgrad.ground.messages import show_dtype, show_shape
from natgrad.ground.pure import compute_exactly
from natgrad.ground.typed_torch import Map


class NormalFamily(ExponentialFamily):
    """Normal distributions of d variables: what all kinds of them tell."""

    shown = ("d",)
    d: int

    @abstractmethod
    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """mu (..., d) and Sigma (..., d, d).

        Args:
            theta: Natural parameters, shape (..., n).
        """


class DiagonalNormal(NormalFamily):
    """Independent normals in d dimensions: n = 2 d parameters, everything closed and linear in d.

    T = (x_i; x_i^2), theta = (mu_i / s_i^2; -1 / (2 s_i^2)), eta = (mu_i; s_i^2 + mu_i^2), s_i the standard deviations.

    Far off the origin theta holds the mean to |mu| eps, which are |mu| / s * eps deviations (.006 in float32 at |mu| /
    s = 1e5), and eta loses the variance where |mu| / s passes eps^-1/2 (3000 in float32). Nothing more is lost:
    log_prob, entropy and kl work on deviations from the mean, and mle does not go through eta.

    Args:
        d: Number of variables.

    Example:
        >>> normal = ng.families.DiagonalNormal(2)
        >>> theta = normal.from_mean_std(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
        >>> normal.mean_std(theta)
        (tensor([0., 1.]), tensor([1., 2.]))
    """

    domain = "theta = (mean / variance; -1 / (2 variance)): the second half must be negative"

    def __init__(self, d: int) -> None:
        check_integer("d", d, of="the number of dimensions")
        self.d, self.size = d, 2 * d

    def statistics(self, x: Tensor) -> Tensor:
        x = check_width(self.as_numbers(x, torch.get_default_dtype()), self.d)
        return torch.cat([x, x.square()], dim=-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        linear, half = self.check_shape(theta, "theta").split(self.d, dim=-1)
        parts = -linear.square() / (4 * half) - 0.5 * (-2 * half).log() + 0.5 * LOG_2PI
        return torch.where(self.inside(theta), parts.sum(-1), torch.inf)

    def inside(self, theta: Tensor) -> Tensor:
        return torch.isfinite(theta).all(-1) & (theta[..., self.d :] < 0).all(-1)

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        linear, half = self.check(theta).split(self.d, dim=-1)
        x = check_width(self.as_numbers(x, theta.dtype), self.d)
        squares = (x + linear / (2 * half)).square() * half
        return (squares + 0.5 * ((-2 * half).log() - LOG_2PI)).sum(-1)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        return 0.5 * (1 + LOG_2PI - (-2 * self.check(theta)[..., self.d :]).log()).sum(-1)

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """1/2 sum_i [v / w - 1 - log(v / w) + (mu - nu)^2 / w], the gaps computed from the differences of theta."""
        (linear, half), (_, goal) = (self.check(each).split(self.d, dim=-1) for each in (theta, other))
        moved, turned = (other - theta).split(self.d, dim=-1)
        away = moved - turned * (linear / half)  # (nu - mu) / w
        # no product of more than two powers of a deviation: of 1e110, a third one would be lost to underflow
        return (0.5 * ratio_gap(-goal, -half, -turned) - 0.25 * away * (away / goal)).sum(-1)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        mean, centred = centre_varying(x)
        return self._from_moments(mean, centred.square().mean(0))

    def _from_moments(self, mean: Tensor, variance: Tensor) -> Tensor:
        """theta of means and variances, (..., d) each."""
        return torch.cat([mean / variance, -0.5 / variance], dim=-1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        mean, variance = self._moments(theta)
        z = torch.randn(count, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + variance.sqrt() * z

    def from_mean_std(self, mean: Tensor, std: Tensor) -> Tensor:
        """theta of means and standard deviations, shape (..., 2 d).

        Args:
            mean: Shape (..., d).
            std: Positive, shape (..., d).
        """
        mean, std = torch.broadcast_tensors(check_width(mean, self.d), check_width(std, self.d))
        if is_concrete(std) and not bool(((std > 0) & torch.isfinite(std) & torch.isfinite(mean)).all()):
            raise ValueError("mean and std must be finite numbers, std > 0: a distribution with a density")
        return self._from_moments(mean, std.square())

    def mean_std(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, (..., d) each.

        Args:
            theta: Natural parameters, shape (..., 2 d).
        """
        mean, variance = self._moments(self.check(theta))
        return mean, variance.sqrt()

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self._moments(self.check(theta))
        return mean, torch.diag_embed(variance)

    def expectation(self, theta: Tensor) -> Tensor:
        mean, variance = self._moments(self.check(theta))
        return torch.cat([mean, variance + mean.square()], dim=-1)

    def natural(self, eta: Tensor) -> Tensor:
        mean, second = widen(self.check_finite(eta, "eta")).split(self.d, dim=-1)
        variance = second - mean.square()
        check_rest(variance, second, eta.dtype, "eta has variances <= 0", "E[x_i^2] > E[x_i]^2")
        return self._from_moments(mean, variance).to(eta.dtype)

    def covariance(self, theta: Tensor) -> Tensor:
        mean, v = self._moments(self.check(theta))
        cross = torch.diag_embed(2 * mean * v)
        second = torch.diag_embed(2 * v.square() + 4 * mean.square() * v)
        return torch.cat([torch.cat([torch.diag_embed(v), cross], -1), torch.cat([cross, second], -1)], -2)

    def find_products(self, theta: Tensor) -> tuple[Map, Map]:
        """Both in O(d)."""
        moments = self._moments(theta)
        return partial(self._forward, *moments), partial(self._backward, *moments)

    def _moments(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        linear, half = theta.split(self.d, dim=-1)
        return -linear / (2 * half), -0.5 / half

    def _forward(self, mean: Tensor, v: Tensor, tangent: Tensor) -> Tensor:
        a, b = tangent.split(self.d, dim=-1)
        moved = v * (a + 2 * mean * b)  # d mu
        return torch.cat([moved, 2 * mean * moved + 2 * v * (v * b)], dim=-1)

    def _backward(self, mean: Tensor, v: Tensor, tangent: Tensor) -> Tensor:
        a, b = tangent.split(self.d, dim=-1)
        half = (b - 2 * mean * a) / v / (2 * v)  # d (-1 / (2 v)), as d v = b - 2 mu a
        return torch.cat([a / v - 2 * mean * half, half], dim=-1)


class Normal(DiagonalNormal):
    """One variable: T = (x, x^2), theta = (mu / s^2, -1 / (2 s^2)), eta = (mu, s^2 + mu^2). x is (..., 1).

    Example:
        >>> normal = ng.Normal()
        >>> theta = normal.from_mean_std(torch.tensor(1.0), torch.tensor(2.0))
        >>> normal.expectation(theta)
        tensor([1., 5.])
    """

    shown = ()

    def __init__(self) -> None:
        super().__init__(1)

    def from_mean_std(self, mean: Tensor, std: Tensor) -> Tensor:
        """theta (..., 2) of means (...) and standard deviations (...)."""
        mean, std = as_tensors(mean, std)
        return super().from_mean_std(mean.unsqueeze(-1), std.unsqueeze(-1))

    def mean_std(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, (...) each."""
        mean, std = super().mean_std(theta)
        return mean.squeeze(-1), std.squeeze(-1)


@compute_exactly
class FixedCovarianceNormal(NormalFamily):
    """N(mu, Sigma) with a known covariance Sigma: T = x, theta = Sigma^-1 mu, eta = mu, Fisher matrix Sigma.

    Args:
        covariance: Sigma, positive definite, shape (d, d).
    """

    def __init__(self, covariance: Tensor) -> None:
        if not isinstance(covariance, Tensor) or covariance.dim() != 2:
            raise ValueError(f"covariance is {show_shape(covariance)}, expected a tensor (d, d)")
        check_moments(covariance[0], covariance, len(covariance))
        self.d = self.size = len(covariance)
        # in float64, so that a theta in float64 is not served with the factor of float32
        self._factor = factor_covariance(covariance if covariance.device.type == "mps" else covariance.double())
        self.known_covariance, self._precision = covariance, inverse_from(self._factor)

    def statistics(self, x: Tensor) -> Tensor:
        return check_width(self.as_numbers(x, self.known_covariance.dtype), self.d)

    def log_partition(self, theta: Tensor) -> Tensor:
        return 0.5 * (self.check_shape(theta, "theta") * self._times(self.known_covariance, theta)).sum(-1)

    def log_base(self, x: Tensor) -> Tensor:
        return -0.5 * (x * self._times(self._precision, x)).sum(-1) - self._constant(x)

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        mean = self.expectation(theta)
        away = self.statistics(x).to(mean) - mean
        half = torch.linalg.solve_triangular(self._factor.to(theta), away.unsqueeze(-1), upper=False).squeeze(-1)
        return -0.5 * half.square().sum(-1) - self._constant(theta)

    def entropy(self, theta: Tensor) -> Tensor:
        """The same for every theta."""
        return 0.5 * self.d + self._constant(self.check(theta)) + 0 * theta.sum(-1)

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """1/2 d^T Sigma d, d = other - theta."""
        return self.log_partition(self.check(other) - self.check(theta))

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return -0.5 * self.d - self.log_partition(theta) - self._constant(theta)  # E[x^T P x] = d + mu^T P mu

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.expectation(theta)
        return mean, self.known_covariance.to(mean).expand(*mean.shape, self.d)

    def expectation(self, theta: Tensor) -> Tensor:
        return self._times(self.known_covariance, self.check(theta))

    def natural(self, eta: Tensor) -> Tensor:
        return self._times(self._precision, self.check_finite(eta, "eta"))

    def covariance(self, theta: Tensor) -> Tensor:
        return self.mean_covariance(theta)[1]

    def find_products(self, theta: Tensor) -> tuple[Map, Map]:
        """The same everywhere."""
        return partial(self._times, self.known_covariance), partial(self._times, self._precision)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        z = torch.randn(count, *theta.shape, generator=generator, dtype=theta.dtype, device=theta.device)
        return self._times(self.known_covariance, theta) + z @ self._factor.to(theta).mT

    def _times(self, matrix: Tensor, vector: Tensor) -> Tensor:
        return vector @ matrix.to(vector)

    def _constant(self, like: Tensor) -> Tensor:
        return half_log_det(self._factor.to(like)) + 0.5 * self.d * LOG_2PI


LOG_2PI = math.log(2 * math.pi)


class PrecisionNormal(NormalFamily):
    """Normals whose theta ends with -P / 2, P the precision with the entries that `pairs` has."""

    pairs: Pairs
    domain = "the precision must be positive definite: theta_ii and theta_ij are those of -P / 2"

    def precision(self, theta: Tensor) -> Tensor:
        """P, shape (..., d, d).

        Args:
            theta: Natural parameters, shape (..., n).
        """
        return -2 * self.pairs.unpack(theta[..., -self.pairs.size :])

    def factor(self, theta: Tensor) -> Tensor:
        """L (..., d, d) with L L^T = P. ValueError where P is not positive definite.

        Args:
            theta: Natural parameters, shape (..., n).
        """
        return factor_covariance(self.precision(self.check_shape(theta, "theta")), self.explain_outside())


@compute_exactly
class GraphNormal(PrecisionNormal):
    """N(mu, P^-1) with the entries of P that `pairs` has: what the full and the sparse family share.

    Args:
        pairs: Which entries of P are kept.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.pairs, self.d, self.size = pairs, pairs.d, pairs.d + pairs.size

    def statistics(self, x: Tensor) -> Tensor:
        x = self.as_numbers(x, torch.get_default_dtype())
        return torch.cat([check_width(x, self.d), self.pairs.products(x)], dim=-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        precision = self.precision(self.check_shape(theta, "theta"))
        factor, fine = safe_factor(precision)
        half = torch.linalg.solve_triangular(factor, theta[..., : self.d].unsqueeze(-1), upper=False).squeeze(-1)
        psi = 0.5 * (half.square().sum(-1) + self.d * LOG_2PI) - half_log_det(factor)
        return torch.where(fine, psi, torch.inf)

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        factor, fine = safe_factor(self.precision(self.check(theta)))
        x = check_width(self.as_numbers(x, theta.dtype), self.d)
        away = x - solve_factor(factor, theta[..., : self.d])
        half = (away.unsqueeze(-2) @ factor).squeeze(-2)
        logs = half_log_det(factor) - 0.5 * (half.square().sum(-1) + self.d * LOG_2PI)
        return torch.where(fine, logs, -torch.inf)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        return 0.5 * self.d * (1 + LOG_2PI) - half_log_det(self.factor(theta))

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """1/2 [tr(Q Sigma) - d - log det(Q Sigma) + (mu - nu)^T Q (mu - nu)], Q the precision of `other`.

        Q (nu - mu) comes from the differences of theta, so that a mean far off the origin costs no digits.
        """
        factor, goal = self.factor(theta), self.factor(other)
        moved, turned = (other - theta)[..., : self.d], self.precision(other - theta)
        away = moved - (turned @ solve_factor(factor, theta[..., : self.d]).unsqueeze(-1)).squeeze(-1)
        half = torch.linalg.solve_triangular(goal, away.unsqueeze(-1), upper=False).squeeze(-1)
        return precision_gap(factor, goal) + 0.5 * half.square().sum(-1)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        mean, centred = centre(widen(x))
        return self._from_spread(mean, self.pairs.pack(measure_spread(self.pairs, centred, x), 2.0))

    def natural(self, eta: Tensor) -> Tensor:
        mean, second = widen(self.check_finite(eta, "eta")).tensor_split([self.d], dim=-1)
        spread, d = second - self.pairs.products(mean), self.d
        words = "covariance is not positive definite: eta has variances <= 0"
        check_rest(spread[..., :d], second[..., :d], eta.dtype, words, "E[x_i^2] > E[x_i]^2")
        return self._from_spread(mean, spread).to(eta.dtype)

    @abstractmethod
    def _from_spread(self, mean: Tensor, spread: Tensor) -> Tensor:
        """theta of a mean (..., d) and the covariance on the graph (Sigma_ii; 2 Sigma_ij), (..., n - d)."""

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        factor = self.factor(theta)
        z = torch.randn(
            count, *theta.shape[:-1], self.d, 1, generator=generator, dtype=theta.dtype, device=theta.device
        )
        # P = L L^T: L^-T (z + L^-1 b) has the covariance P^-1 and the mean P^-1 b
        linear = torch.linalg.solve_triangular(factor, theta[..., : self.d].unsqueeze(-1), upper=False)
        return torch.linalg.solve_triangular(factor.mT, z + linear, upper=True).squeeze(-1)

    def inside(self, theta: Tensor) -> Tensor:
        return torch.isfinite(theta).all(-1) & is_positive_definite(self.precision(theta))

    def pack(self, matrix: Tensor, factor: float = 1.0) -> Tensor:
        """Diagonal, then `factor` times the other entries, shape (..., n - d).

        Args:
            matrix: A symmetric matrix, shape (..., d, d).
            factor: What the entries off the diagonal are multiplied by.
        """
        return self.pairs.pack(matrix, factor)

    def unpack(self, entries: Tensor, factor: float = 1.0) -> Tensor:
        """The symmetric matrix of which `pack` made the entries, shape (..., d, d).

        Args:
            entries: Shape (..., n - d).
            factor: As it was for `pack`.
        """
        return self.pairs.unpack(entries, factor)

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        covariance = inverse_from(self.factor(theta))
        return (covariance @ theta[..., : self.d].unsqueeze(-1)).squeeze(-1), covariance

    def expectation(self, theta: Tensor) -> Tensor:
        mean, covariance = self.mean_covariance(theta)
        second = covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return torch.cat([mean, self.pairs.pack(second, 2.0)], dim=-1)

    def covariance(self, theta: Tensor) -> Tensor:
        """Cov(T), (..., n, n), in closed form."""
        mean, sigma = self.mean_covariance(theta)
        cross, second = self.pairs.moments(mean, sigma)
        return torch.cat([torch.cat([sigma, cross], -1), torch.cat([cross.mT, second], -1)], -2)

    def find_products(self, theta: Tensor) -> tuple[Map, Map | None]:
        """In O(d^3)."""
        return partial(self._forward, *self.mean_covariance(theta)), None

    def _forward(self, mean: Tensor, sigma: Tensor, tangent: Tensor) -> Tensor:
        """d eta = I_theta d theta, in O(d^3): dSigma = 2 Sigma dM Sigma, dmu = Sigma (db + 2 dM mu), M = -P / 2."""
        turned = 2 * self.pairs.unpack(tangent[..., self.d :])
        moved = sigma @ (tangent[..., : self.d].unsqueeze(-1) + turned @ mean.unsqueeze(-1))  # dmu (..., d, 1)
        outer = moved * mean.unsqueeze(-2)
        return torch.cat([moved.squeeze(-1), self.pairs.pack(sigma @ turned @ sigma + outer + outer.mT, 2.0)], dim=-1)

    def join(self, mean: Tensor, precision: Tensor) -> Tensor:
        """theta of a mean and a precision, shape (..., n).

        Args:
            mean: mu, shape (..., d).
            precision: P, shape (..., d, d).
        """
        linear = (precision @ mean.unsqueeze(-1)).squeeze(-1)
        return torch.cat([linear, self.pairs.pack(-precision / 2).expand(*linear.shape[:-1], -1)], dim=-1)


@compute_exactly
class MultivariateNormal(GraphNormal):
    """N(mu, Sigma) in d dimensions: n = d + d (d + 1) / 2 parameters.

    T = (x_i; x_i^2; 2 x_i x_j for i < j, row by row), theta = (P mu; -P_ii / 2; -P_ij / 2) with P = Sigma^-1, eta =
    (mu; Sigma_ii + mu_i^2; 2 Sigma_ij + 2 mu_i mu_j), in the order of Malago's lectures (2023; the printed eta has
    minus signs). Conversions both ways are closed; the Fisher matrix is an operator with products in O(d^3), whose
    inverse is that in the expectation coordinates.

    Far off the origin theta holds the mean to |mu| eps and eta loses the covariance, as told at `DiagonalNormal`;
    log_prob, entropy, kl and mle lose nothing beyond that.

    Args:
        d: Number of variables.

    Example:
        >>> normal = ng.MultivariateNormal(2)
        >>> theta = normal.from_mean_covariance(torch.zeros(2), torch.eye(2))
        >>> normal.expectation(theta)
        tensor([0., 0., 1., 1., 0.])
        >>> normal.fisher(theta).dense().diagonal()
        tensor([1., 1., 2., 2., 4.])
    """

    def __init__(self, d: int) -> None:
        super().__init__(Pairs(d))

    def from_mean_covariance(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """theta of a mean and a covariance, shape (..., n).

        Args:
            mean: mu, shape (..., d).
            covariance: Sigma, shape (..., d, d).

        Raises:
            ValueError: Unless Sigma is positive definite.
        """
        check_moments(mean, covariance, self.d)
        return self.join(mean, inverse_from(factor_covariance(covariance)))

    def _from_spread(self, mean: Tensor, spread: Tensor) -> Tensor:
        return self.from_mean_covariance(mean, self.pairs.unpack(spread, 2.0))

    def find_products(self, theta: Tensor) -> tuple[Map, Map]:
        """Both in O(d^3)."""
        mean, sigma = self.mean_covariance(theta)
        return partial(self._forward, mean, sigma), partial(self._backward, mean, self.precision(theta))

    def _backward(self, mean: Tensor, precision: Tensor, tangent: Tensor) -> Tensor:
        """d theta = I_eta d eta, in O(d^3): dP = -P dSigma P, d(P mu) = dP mu + P dmu."""
        moved = tangent[..., : self.d].unsqueeze(-1)
        outer = moved * mean.unsqueeze(-2)
        spread = self.pairs.unpack(tangent[..., self.d :], 2.0) - outer - outer.mT  # dSigma
        turned = -precision @ spread @ precision  # dP
        linear = turned @ mean.unsqueeze(-1) + precision @ moved
        return torch.cat([linear.squeeze(-1), self.pairs.pack(-turned / 2)], dim=-1)


@compute_exactly
class SparseNormal(GraphNormal):
    """N(mu, P^-1) in d dimensions with P_ij = 0 unless i = j or (i, j) is an edge: a sparse precision is a graph.

    T = (x_i; x_i^2; 2 x_i x_j of the edges, in their order), theta = (P mu; -P_ii / 2; -P_ij / 2 of the edges). That of
    the complete graph, row by row, is MultivariateNormal(d). From eta to theta by Newton's method on correlations: the
    covariance is known on the graph, the precision vanishes beside it.

    Args:
        d: Number of variables.
        edges: Pairs of different variables.

    Reference:
        Dempster 1972.

    Example:
        >>> chain = ng.families.SparseNormal(3, [(0, 1), (1, 2)])
        >>> chain.size
        8
    """

    def __init__(self, d: int, edges: Iterable[Iterable[int]]) -> None:
        super().__init__(Pairs(d, edges))

    def from_mean_precision(self, mean: Tensor, precision: Tensor) -> Tensor:
        """theta of a mean and a precision, shape (..., n).

        Args:
            mean: mu, shape (..., d).
            precision: P, shape (..., d, d).

        Raises:
            ValueError: Unless P is positive definite and zero beside the graph.
        """
        check_moments(mean, precision, self.d, "precision")
        factor_covariance(precision, "precision is not positive definite, which a distribution with a density needs")
        missing = self.pairs.unpack(precision.new_ones(self.pairs.size)) == 0
        if is_concrete(precision) and not bool((precision[..., missing] == 0).all()):
            raise ValueError("precision has entries that are not zero beside the edges")
        return self.join(mean, precision)

    def _from_spread(self, mean: Tensor, spread: Tensor) -> Tensor:
        centred = FixedMeanNormal(torch.zeros(self.d), self.pairs.edges)
        return self.join(mean, self.precision(centred.natural(spread)))

    def __repr__(self) -> str:
        return f"SparseNormal({self.d}, {len(self.pairs.edges)} edges)"


@compute_exactly
class FixedMeanNormal(PrecisionNormal, Embedded):
    """N(m, Sigma) with a known mean m, such as zero: n = d (d + 1) / 2 parameters.

    With z = x - m: T = (z_i^2; 2 z_i z_j), theta = (-P_ii / 2; -P_ij / 2), eta = (Sigma_ii; 2 Sigma_ij).

    Args:
        mean: m, shape (d,).
        edges: Those of a sparse precision, as in `SparseNormal`. None: all.
    """

    def __init__(self, mean: Tensor, edges: Iterable[Iterable[int]] | None = None) -> None:
        if not isinstance(mean, Tensor) or mean.dim() != 1 or not mean.is_floating_point():
            raise ValueError(
                f"mean is {mean!r}, expected a floating-point tensor (d,): torch.zeros(d) for a centred one"
            )
        self.mean, self.d = mean, len(mean)
        self.inner: GraphNormal = MultivariateNormal(self.d) if edges is None else SparseNormal(self.d, edges)
        self.pairs, self.size = self.inner.pairs, self.inner.pairs.size

    def _source(self, y: Tensor) -> Tensor:
        y = check_width(self.as_numbers(y, torch.get_default_dtype()), self.d)
        return y - self.mean.to(y)

    def _embed(self, theta: Tensor) -> Tensor:
        return torch.cat([theta.new_zeros(*theta.shape[:-1], self.d), theta], dim=-1)

    def _pull(self, covector: Tensor) -> Tensor:
        return covector[..., self.d :]

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        return super().log_prob(theta, x)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        return self.mean.to(theta) + super().draw(theta, count, generator)

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        covariance = inverse_from(self.factor(theta))
        return self.mean.to(theta).expand(*theta.shape[:-1], self.d), covariance

    def from_covariance(self, covariance: Tensor) -> Tensor:
        """theta of a covariance, shape (..., n).

        Args:
            covariance: Sigma, shape (..., d, d), of which only the entries on the graph count.
        """
        check_moments(self.mean, covariance, self.d)
        return self.natural(self.pairs.pack(covariance, 2.0))

    def natural(self, eta: Tensor) -> Tensor:
        """By inversion, or where the graph has gaps by Newton's method on correlations: every scale is then one."""
        self.check_finite(eta, "eta")
        if self.pairs.complete:
            return self.pairs.pack(inverse_from(factor_covariance(self.pairs.unpack(eta, 2.0))) / -2)
        variances = eta[..., : self.d]
        if is_concrete(eta) and not bool((variances > 0).all()):
            raise ValueError("eta has variances <= 0, expected E[x_i^2] > E[x_i]^2")
        scale = variances.sqrt()
        both = scale[..., self.pairs.first] * scale[..., self.pairs.second]
        return super().natural(eta / both) / both

    def guess(self, eta: Tensor) -> Tensor:
        """Independent variables of variance one."""
        return torch.where(self.pairs.weights(eta) == 1, -0.5, 0.0).to(eta).expand_as(eta).clone()

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        second = measure_spread(self.pairs, widen(x) - widen(self.mean).to(x.device), x)
        return self.natural(self.pairs.pack(second, 2.0))

    def find_products(self, theta: Tensor) -> tuple[Map, Map | None]:
        """Both in O(d^3); the second one where all pairs are edges."""
        sigma, precision = self.mean_covariance(theta)[1], self.precision(theta)
        pack, unpack = self.pairs.pack, self.pairs.unpack
        back = (lambda v: pack(precision @ unpack(v, 2.0) @ precision / 2)) if self.pairs.complete else None
        return lambda v: pack(sigma @ (2 * unpack(v)) @ sigma, 2.0), back

    def __repr__(self) -> str:
        return f"FixedMeanNormal({self.d}{'' if self.pairs.complete else f', {len(self.pairs.edges)} edges'})"


def measure_spread(pairs: Pairs, away: Tensor, x: Tensor) -> Tensor:
    """Second moments (..., d, d) of the deviations (b, ..., d) of examples x. ValueError where they do not vary."""
    rows, size = away.movedim(0, -2), x.detach().abs().amax(0)
    covariance = rows.mT @ rows / len(x)
    if pairs.complete:
        check_spreads(covariance, size, floating_dtype(x))
    else:  # the whole covariance may be singular
        check_varies(root_mean_square(away), size, floating_dtype(x))
    return covariance


@compute_exactly
class ComplexNormal(NormalFamily, Embedded):
    """CN(mu, Gamma): circularly symmetric complex vectors z (d,), E[(z - mu)(z - mu)^T] = 0.

    T = (Re z_i; Im z_i; |z_i|^2; 2 Re z_i z_j*; 2 Im z_i z_j* for i < j), theta = (2 Re b; 2 Im b; -P_ii; -Re P_ij; -Im
    P_ij) with P = Gamma^-1 and b = P mu, all real: n = 2 d + d^2. Gamma = E[(z - mu)(z - mu)^H]. Conversions both ways
    are closed. With `SubModel(ComplexNormal(d), range(2 * d, family.size), base)` the mean is zero.

    Args:
        d: Number of complex variables.

    Example:
        >>> family = ng.families.ComplexNormal(1)
        >>> theta = family.from_mean_covariance(torch.tensor([1.0 + 1.0j]), torch.tensor([[2.0 + 0.0j]]))
        >>> family.expectation(theta)
        tensor([1., 1., 4.])
    """

    domain = "the precision must be Hermitian and positive definite: theta_ii and theta_ij are those of -P"

    def __init__(self, d: int) -> None:
        self.inner = self.real = MultivariateNormal(2 * d)  # of (Re z, Im z)
        self.d, self.size = d, 2 * d + d * d
        self._pairs = MultivariateNormal(d).pairs
        signs = torch.ones(d, d).triu(1)
        self._signs = signs - signs.mT

    def _source(self, y: Tensor) -> Tensor:
        if not isinstance(y, Tensor) or not y.is_complex() or y.shape[-1:] != (self.d,):
            shape = f" of shape {show_shape(y)}" * isinstance(y, Tensor)
            raise ValueError(f"x is {show_dtype(y)}{shape}, expected a complex tensor (..., {self.d})")
        if is_concrete(y.real) and not bool(torch.isfinite(y.detach()).all()):
            raise ValueError("x has entries that are not finite")
        return torch.cat([y.real, y.imag], dim=-1)

    def as_numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x

    def natural(self, eta: Tensor) -> Tensor:
        first, second, outer = self._split(widen(self.check_finite(eta, "eta")), 2.0)
        mean = torch.complex(first, second)
        covariance = torch.complex(*outer) - mean.unsqueeze(-1) * mean.conj().unsqueeze(-2)
        variance, total = (part.real.diagonal(dim1=-2, dim2=-1) for part in (covariance, outer[0]))
        words = "covariance is not positive definite: eta has variances <= 0"
        check_rest(variance, total, eta.dtype, words, "E[|z_i|^2] > |E[z_i]|^2")
        return self.from_mean_covariance(mean, covariance).to(eta.dtype)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        mean, centred = centre(widen(x))
        rows = centred.movedim(0, -2)
        covariance, size = rows.mT @ rows.conj() / len(x), x.detach().abs().amax(0)
        check_spreads(
            embed_hermitian(covariance.real / 2, covariance.imag / 2),
            torch.cat([size, size], dim=-1),
            floating_dtype(x),
        )
        return self.from_mean_covariance(mean, covariance)

    def find_products(self, theta: Tensor) -> tuple[Map, Map | None]:
        """The first in O(d^3)."""
        forward, _ = self.real.find_products(self._embed(theta))
        return lambda v: self._pull(forward(self._embed(v))), None

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.complex(*self.real.draw(self._embed(theta), count, generator).split(self.d, dim=-1))

    def _embed(self, theta: Tensor) -> Tensor:
        """Those of (Re z, Im z), a linear map: the precision there is 2 (Re P, -Im P; Im P, Re P)."""
        first, second, minus_half = self._split(theta, 1.0)
        return torch.cat([first, second, self.real.pack(embed_hermitian(*minus_half))], dim=-1)

    def _pull(self, covector: Tensor) -> Tensor:
        """The transpose of `_embed`: expectation parameters of (Re z, Im z) to those of z."""
        d, second = self.d, self.real.unpack(covector[..., 2 * self.d :], 2.0)
        real = second[..., :d, :d] + second[..., d:, d:]
        imag = second[..., d:, :d] - second[..., :d, d:]
        return torch.cat([covector[..., : 2 * d], self._pack(real, imag, 2.0)], dim=-1)

    def from_mean_covariance(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """theta of a mean and a covariance, shape (..., n).

        Args:
            mean: mu, complex, shape (..., d).
            covariance: Gamma, Hermitian and positive definite, shape (..., d, d).
        """
        for each, what in ((mean, "mean"), (covariance, "covariance")):
            if not isinstance(each, Tensor) or not each.is_complex():
                came = show_dtype(each)
                raise TypeError(f"{what} is {came}, expected a complex tensor; convert it with .to(torch.complex64)")
        spread = embed_hermitian(covariance.real / 2, covariance.imag / 2)  # of (Re z, Im z)
        theta = self.real.from_mean_covariance(torch.cat([mean.real, mean.imag], dim=-1), spread)
        half, d = self.real.unpack(theta[..., 2 * self.d :]), self.d
        return torch.cat([theta[..., : 2 * d], self._pack(half[..., :d, :d], half[..., d:, :d], 1.0)], dim=-1)

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = self.real.mean_covariance(self._embed(self.check(theta)))
        d = self.d
        return torch.complex(*mean.split(d, -1)), 2 * torch.complex(covariance[..., :d, :d], covariance[..., d:, :d])

    def _split(self, value: Tensor, factor: float) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """The parts of a vector (..., n): two (..., d), real and imaginary part of a Hermitian matrix (..., d, d)."""
        d, pairs = self.d, self._pairs.size - self.d
        first, second, own, real, imag = value.split([d, d, d, pairs, pairs], dim=-1)
        symmetric = self._pairs.unpack(torch.cat([own, real], dim=-1), factor)
        skew = self._pairs.unpack(torch.cat([torch.zeros_like(own), imag], dim=-1), factor) * self._signs.to(value)
        return first, second, (symmetric, skew)

    def _pack(self, real: Tensor, imag: Tensor, factor: float) -> Tensor:
        """(..., d^2) of a Hermitian matrix: diagonal, then `factor` times the real and the imaginary pairs."""
        return torch.cat([self._pairs.pack(real, factor), self._pairs.pack(imag, factor)[..., self.d :]], dim=-1)


def embed_hermitian(real: Tensor, imag: Tensor) -> Tensor:
    """[[Re A, -Im A], [Im A, Re A]], (..., d, d) -> (..., 2 d, 2 d)."""
    return torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)
