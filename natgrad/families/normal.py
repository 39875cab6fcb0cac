"""The multivariate normal as an exponential family, in the coordinates of Malago's lectures; sparse precisions."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from natgrad.families.cancellation import in_double, ratio_gap
from natgrad.families.closed_forms import Closed
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.symmetric_matrices import Pairs
from natgrad.lapack import concrete, factor_or_nan, invert_or_nan, is_positive_definite, require_factor
from natgrad.operators import Operator

LOG_2PI = math.log(2 * math.pi)
POSITIVE = "the precision must be positive definite: theta_ii and theta_ij are those of -P / 2"

SMALL = 8
"""Dimensions up to which `inv` of a batch takes half the time of a triangular solve (10,000 of d = 3: 5 ms for 12)."""


class GraphNormal(ExponentialFamily):
    """N(mu, P^-1) with the entries of P that `pairs` has: what the full and the sparse family share."""

    domain = POSITIVE

    def __init__(self, pairs: Pairs) -> None:
        self.pairs, self.d, self.size = pairs, pairs.d, pairs.d + pairs.size

    def statistics(self, x: Tensor) -> Tensor:
        x = self.as_numbers(x, torch.get_default_dtype())
        return torch.cat([points(x, self.d), self.pairs.products(x)], dim=-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        precision = self.precision(self.check_shape(theta, "theta"))
        factor, fine = safe_factor(precision)
        half = torch.linalg.solve_triangular(factor, theta[..., : self.d].unsqueeze(-1), upper=False).squeeze(-1)
        found = 0.5 * (half.square().sum(-1) + self.d * LOG_2PI) - half_log_det(factor)
        return torch.where(fine, found, torch.inf)

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        factor, fine = safe_factor(self.precision(self.check(theta)))
        x = points(self.as_numbers(x, theta.dtype), self.d)
        away = x - solve_factor(factor, theta[..., : self.d])
        half = (away.unsqueeze(-2) @ factor).squeeze(-2)
        found = half_log_det(factor) - 0.5 * (half.square().sum(-1) + self.d * LOG_2PI)
        return torch.where(fine, found, -torch.inf)

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

    def mle(self, x: Tensor) -> Tensor:
        mean, centred = mean_of_examples(x, self.d)
        rows = centred.movedim(0, -2)
        return self.from_spread(mean, rows.mT @ rows / len(x)).to(floating(x))

    @abstractmethod
    def from_spread(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """theta (..., n) of the maximum of likelihood, from the examples' mean (..., d) and covariance (..., d, d)."""

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        factor = self.factor(theta)
        z = torch.randn(
            count, *theta.shape[:-1], self.d, 1, generator=generator, dtype=theta.dtype, device=theta.device
        )
        # P = L L^T: L^-T (z + L^-1 b) has the covariance P^-1 and the mean P^-1 b
        linear = torch.linalg.solve_triangular(factor, theta[..., : self.d].unsqueeze(-1), upper=False)
        return torch.linalg.solve_triangular(factor.mT, z + linear, upper=True).squeeze(-1)

    def inside(self, theta: Tensor) -> Tensor:
        return torch.isfinite(theta).all(-1) & positive(self.precision(theta))

    def pack(self, matrix: Tensor, factor: float = 1.0) -> Tensor:
        """Diagonal, then `factor` times the other entries: (..., d, d) -> (..., n - d)."""
        return self.pairs.pack(matrix, factor)

    def unpack(self, entries: Tensor, factor: float = 1.0) -> Tensor:
        """The symmetric matrix of which `pack` made the entries."""
        return self.pairs.unpack(entries, factor)

    def precision(self, theta: Tensor) -> Tensor:
        """P (..., d, d)."""
        return -2 * self.pairs.unpack(theta[..., self.d :])

    def factor(self, theta: Tensor) -> Tensor:
        """L (..., d, d) with L L^T = P. ValueError where P is not positive definite."""
        return checked_factor(self.precision(self.check_shape(theta, "theta")), outside(self))

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """mu (..., d) and Sigma (..., d, d)."""
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

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        return self.forward(*self.mean_covariance(outputs), tangents)

    def fisher(self, theta: Tensor) -> Operator:
        """The Fisher matrix of theta (n,): products in O(d^3)."""
        mean, sigma = (part.detach() for part in self.mean_covariance(self.single(theta, "theta")))
        return Closed(theta, lambda v: self.forward(mean, sigma, v))

    def forward(self, mean: Tensor, sigma: Tensor, tangent: Tensor) -> Tensor:
        """d eta = I_theta d theta, in O(d^3): dSigma = 2 Sigma dM Sigma, dmu = Sigma (db + 2 dM mu), M = -P / 2."""
        turned = 2 * self.pairs.unpack(tangent[..., self.d :])
        moved = sigma @ (tangent[..., : self.d].unsqueeze(-1) + turned @ mean.unsqueeze(-1))  # dmu (..., d, 1)
        outer = moved * mean.unsqueeze(-2)
        return torch.cat([moved.squeeze(-1), self.pairs.pack(sigma @ turned @ sigma + outer + outer.mT, 2.0)], dim=-1)

    def joined(self, mean: Tensor, precision: Tensor) -> Tensor:
        """theta of mu (..., d) and P (..., d, d)."""
        linear = (precision @ mean.unsqueeze(-1)).squeeze(-1)
        return torch.cat([linear, self.pairs.pack(-precision / 2).expand(*linear.shape[:-1], -1)], dim=-1)


class MultivariateNormal(GraphNormal):
    """N(mu, Sigma) in d dimensions: n = d + d (d + 1) / 2 parameters.

    T = (x_i; x_i^2; 2 x_i x_j for i < j, row by row), theta = (P mu; -P_ii / 2; -P_ij / 2) with P = Sigma^-1,
    eta = (mu; Sigma_ii + mu_i^2; 2 Sigma_ij + 2 mu_i mu_j), in the order of Malago's lectures (2023; the printed eta
    has minus signs). Conversions both ways are closed; the Fisher matrix is an operator with products in O(d^3), whose
    inverse is that in the expectation coordinates.

    Far off the origin theta holds the mean to |mu| eps and eta loses the covariance, as told at `DiagonalNormal`;
    log_prob, entropy, kl and mle lose nothing beyond that.
    """

    def __init__(self, d: int) -> None:
        super().__init__(Pairs(d))

    def from_mean_covariance(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """theta (..., n) of mu (..., d) and Sigma (..., d, d). ValueError unless Sigma is positive definite."""
        check_moments(mean, covariance, self.d)
        return self.joined(mean, inverse_from(checked_factor(covariance)))

    def from_spread(self, mean: Tensor, covariance: Tensor) -> Tensor:
        return self.from_mean_covariance(mean, covariance)

    @in_double
    def natural(self, eta: Tensor) -> Tensor:
        mean, covariance = self.split_moments(self.check_finite(eta, "eta"))
        return self.from_mean_covariance(mean, covariance)

    def split_moments(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """mu and Sigma = E - mu mu^T of eta."""
        mean = eta[..., : self.d]
        return mean, self.pairs.unpack(eta[..., self.d :], 2.0) - mean.unsqueeze(-1) * mean.unsqueeze(-2)

    def fisher(self, theta: Tensor) -> Operator:
        """The Fisher matrix of theta (n,): products in O(d^3), and its inverse, which is that in eta."""
        mean, sigma = (part.detach() for part in self.mean_covariance(self.single(theta, "theta")))
        precision = self.precision(theta).detach()
        return Closed(theta, lambda v: self.forward(mean, sigma, v), lambda v: self.backward(mean, precision, v))

    def fisher_expectation(self, eta: Tensor) -> Operator:
        theta = self.natural(self.single(eta, "eta"))
        mean, sigma = (part.detach() for part in self.mean_covariance(theta))
        precision = self.precision(theta).detach()
        return Closed(eta, lambda v: self.backward(mean, precision, v), lambda v: self.forward(mean, sigma, v))

    def backward(self, mean: Tensor, precision: Tensor, tangent: Tensor) -> Tensor:
        """d theta = I_eta d eta, in O(d^3): dP = -P dSigma P, d(P mu) = dP mu + P dmu."""
        moved = tangent[..., : self.d].unsqueeze(-1)
        outer = moved * mean.unsqueeze(-2)
        spread = self.pairs.unpack(tangent[..., self.d :], 2.0) - outer - outer.mT  # dSigma
        turned = -precision @ spread @ precision  # dP
        linear = turned @ mean.unsqueeze(-1) + precision @ moved
        return torch.cat([linear.squeeze(-1), self.pairs.pack(-turned / 2)], dim=-1)

    def __repr__(self) -> str:
        return f"MultivariateNormal({self.d})"


def points(x: Tensor, d: int) -> Tensor:
    """x (..., d) as it is. ValueError for another size."""
    if not isinstance(x, Tensor) or x.shape[-1:] != (d,):
        came = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is {type(x).__name__}"
        raise ValueError(f"x {came}, expected (..., {d})")
    return x


def check_moments(mean: Tensor, matrix: Tensor, d: int, name: str = "covariance") -> None:
    """ValueError unless the shapes are (..., d) and (..., d, d), of finite floating-point numbers."""
    for each, what in ((mean, "mean"), (matrix, name)):
        if not isinstance(each, Tensor) or not each.is_floating_point():
            came = each.dtype if isinstance(each, Tensor) else type(each).__name__
            raise TypeError(f"{what} is {came}, expected a floating-point tensor")
    if mean.shape[-1:] != (d,) or matrix.shape[-2:] != (d, d):
        raise ValueError(
            f"mean and {name} have shapes {tuple(mean.shape)} and {tuple(matrix.shape)}, expected (..., {d}) and "
            f"(..., {d}, {d})"
        )
    if not concrete(mean) or not concrete(matrix):
        return
    if not bool(torch.isfinite(mean.detach()).all()):
        raise ValueError("mean has entries that are not finite")
    gap = (matrix - matrix.mT).detach().abs()
    largest = matrix.detach().abs().amax((-2, -1), keepdim=True)
    if bool((gap > 1e4 * torch.finfo(matrix.dtype).eps * largest).any()):
        raise ValueError(f"{name} is not symmetric; symmetrise it with (A + A.mT) / 2")


def checked_factor(matrix: Tensor, message: str | None = None) -> Tensor:
    """L with L L^T the matrix (..., d, d). ValueError unless it is positive definite (the lower triangle is read)."""
    return require_factor(
        matrix, message or "covariance is not positive definite, which a distribution with a density needs"
    )


def outside(family: ExponentialFamily) -> str:
    """What is said of a theta whose precision is not positive definite."""
    return f"theta is outside the natural parameters of {family!r}: {family.domain}"


def safe_factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor, that of the identity where there is none, and whether there is."""
    fine = positive(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return factor_or_nan(torch.where(fine[..., None, None], matrix, eye)), fine


def solve_factor(factor: Tensor, vector: Tensor) -> Tensor:
    """(L L^T)^-1 v, (..., d, d), (..., d) -> (..., d)."""
    half = torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)


def precision_gap(factor: Tensor, goal: Tensor) -> Tensor:
    """1/2 [tr(M) - d - log det M] >= 0 for M = P^-1 Q, P = L L^T (factor), Q = K K^T (goal): KL of centred normals.

    C = L^-1 K is lower triangular with C C^T similar to M, so that nothing cancels: 1/2 sum_i [c_ii^2 - 1 - log
    c_ii^2] + 1/2 sum_{i > j} c_ij^2.
    """
    both = torch.linalg.solve_triangular(factor, goal, upper=False).tril(-1)
    start, end = (each.diagonal(dim1=-2, dim2=-1) for each in (factor, goal))
    gaps = ratio_gap(end.square(), start.square(), (end - start) * (end + start))
    return 0.5 * (gaps.sum(-1) + both.square().sum((-2, -1)))


def mean_of_examples(x: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Mean (..., d) of x (b, ..., d) and what is left of x without it, in float64. ValueError for an empty x."""
    x = points(x, d)
    if len(x) == 0:
        raise ValueError("x is empty, expected at least one example")
    x = x if x.device.type == "mps" and x.is_floating_point() else x.double()
    return x.mean(0), x - x.mean(0)


def floating(x: Tensor) -> torch.dtype:
    """The dtype of x, torch's default one for integers."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


def half_log_det(factor: Tensor) -> Tensor:
    """1/2 log det(L L^T)."""
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def inverse_from(factor: Tensor) -> Tensor:
    """(L L^T)^-1 for L (..., d, d). The forward derivative of torch.cholesky_inverse is wrong (torch 2.13)."""
    if factor.shape[-1] <= SMALL:
        half = invert_or_nan(factor)
    else:
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        half = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return half.mT @ half


def positive(matrix: Tensor) -> Tensor:
    """Whether a symmetric matrix is positive definite, (..., d, d) -> (...)."""
    return is_positive_definite(matrix)
