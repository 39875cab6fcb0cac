"""The multivariate normal as an exponential family, in the coordinates of Malago's lectures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.families.exponential import ExponentialFamily
from natgrad.operators import Operator


class MultivariateNormal(ExponentialFamily):
    """N(mu, Sigma) in d dimensions: n = d + d (d + 1) / 2 parameters.

    T = (x_i; x_i^2; 2 x_i x_j for i < j, row by row), theta = (P mu; -P_ii / 2; -P_ij / 2) with P = Sigma^-1,
    eta = (mu; Sigma_ii + mu_i^2; 2 Sigma_ij + 2 mu_i mu_j), in the order of Malago's lectures (2023; the printed eta
    has minus signs). Conversions both ways are closed; the Fisher matrix is an operator with products in O(d^3), whose
    inverse is that in the expectation coordinates.
    """

    domain = "the precision must be positive definite: theta_ii and theta_ij are those of -P / 2"

    def __init__(self, d: int) -> None:
        if not isinstance(d, int) or d < 1:
            raise ValueError(f"d is {d!r}, expected the number of dimensions, an integer >= 1")
        self.d, self.size = d, d + d * (d + 1) // 2
        self._first, self._second = torch.triu_indices(d, d, 1)

    def statistics(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.d,):
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., {self.d})")
        return torch.cat([x, x.square(), 2 * x[..., self._first] * x[..., self._second]], dim=-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        factor, half, precision = self._solved(theta)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        found = 0.5 * (half.square().sum(-1) - log_det + self.d * math.log(2 * math.pi))
        return torch.where(_positive(precision), found, torch.inf)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        mean, covariance = self.mean_covariance(theta)
        z = torch.randn(count, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + (torch.linalg.cholesky(covariance) @ z.unsqueeze(-1)).squeeze(-1)

    def inside(self, theta: Tensor) -> Tensor:
        return torch.isfinite(theta).all(-1) & _positive(self.precision(theta))

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """mu (..., d) and Sigma (..., d, d)."""
        factor = torch.linalg.cholesky(self.precision(self.check(theta)))
        covariance = inverse_from(factor)
        return (covariance @ theta[..., : self.d].unsqueeze(-1)).squeeze(-1), covariance

    def from_mean_covariance(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """theta (..., n) of mu (..., d) and Sigma (..., d, d). ValueError unless Sigma is positive definite."""
        self._check_moments(mean, covariance)
        factor, info = torch.linalg.cholesky_ex(covariance)
        if bool((info != 0).any()):
            raise ValueError("covariance is not positive definite, which a distribution with a density needs")
        precision = inverse_from(factor)
        linear = (precision @ mean.unsqueeze(-1)).squeeze(-1)
        return torch.cat([linear.expand(*precision.shape[:-2], self.d), self.pack(-precision / 2)], dim=-1)

    def expectation(self, theta: Tensor) -> Tensor:
        mean, covariance = self.mean_covariance(theta)
        second = covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return torch.cat([mean, self.pack(second, 2.0)], dim=-1)

    def natural(self, eta: Tensor) -> Tensor:
        mean = self.check_shape(eta, "eta")[..., : self.d]
        covariance = self.unpack(eta[..., self.d :], 2.0) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return self.from_mean_covariance(mean, covariance)

    def precision(self, theta: Tensor) -> Tensor:
        """P (..., d, d)."""
        return -2 * self.unpack(theta[..., self.d :])

    def covariance(self, theta: Tensor) -> Tensor:
        """Cov(T), (..., n, n): products of the operator with the unit vectors."""
        units = torch.eye(self.size, dtype=theta.dtype, device=theta.device)
        mean, sigma = self.mean_covariance(theta)
        rows = [self.forward(mean, sigma, unit.expand_as(theta)) for unit in units]
        return torch.stack(rows, dim=-2)

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        return self.forward(*self.mean_covariance(outputs), tangents)

    def fisher(self, theta: Tensor) -> Operator:
        mean, covariance = self.mean_covariance(self.single(theta, "theta"))
        return NormalFisher(self, mean.detach(), covariance.detach(), self.precision(theta).detach())

    def fisher_expectation(self, eta: Tensor) -> Operator:
        theta = self.natural(self.single(eta, "eta"))
        mean, covariance = self.mean_covariance(theta)
        return NormalFisher(self, mean.detach(), covariance.detach(), self.precision(theta).detach(), dual=True)

    def forward(self, mean: Tensor, sigma: Tensor, tangent: Tensor) -> Tensor:
        """d eta = I_theta d theta, in O(d^3): dSigma = 2 Sigma dM Sigma, dmu = Sigma (db + 2 dM mu), M = -P / 2."""
        turned = 2 * self.unpack(tangent[..., self.d :])
        moved = sigma @ (tangent[..., : self.d].unsqueeze(-1) + turned @ mean.unsqueeze(-1))  # dmu (..., d, 1)
        outer = moved * mean.unsqueeze(-2)
        return torch.cat([moved.squeeze(-1), self.pack(sigma @ turned @ sigma + outer + outer.mT, 2.0)], dim=-1)

    def backward(self, mean: Tensor, precision: Tensor, tangent: Tensor) -> Tensor:
        """d theta = I_eta d eta, in O(d^3): dP = -P dSigma P, d(P mu) = dP mu + P dmu."""
        moved = tangent[..., : self.d].unsqueeze(-1)
        outer = moved * mean.unsqueeze(-2)
        spread = self.unpack(tangent[..., self.d :], 2.0) - outer - outer.mT  # dSigma
        turned = -precision @ spread @ precision  # dP
        linear = turned @ mean.unsqueeze(-1) + precision @ moved
        return torch.cat([linear.squeeze(-1), self.pack(-turned / 2)], dim=-1)

    def pack(self, matrix: Tensor, factor: float = 1.0) -> Tensor:
        """Diagonal, then `factor` times the entries i < j row by row: (..., d, d) -> (..., d (d + 1) / 2)."""
        pairs = factor * matrix[..., self._first, self._second]
        return torch.cat([matrix.diagonal(dim1=-2, dim2=-1), pairs], dim=-1)

    def unpack(self, entries: Tensor, factor: float = 1.0) -> Tensor:
        """The symmetric matrix of which `pack` made the entries."""
        pairs = entries[..., self.d :] / factor
        shape = (*entries.shape[:-1], self.d * self.d)
        places = (self._first * self.d + self._second).to(entries.device).expand(pairs.shape)
        upper = pairs.new_zeros(shape).scatter(-1, places, pairs).unflatten(-1, (self.d, self.d))
        return torch.diag_embed(entries[..., : self.d]) + upper + upper.mT

    def _solved(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """L with L L^T = P, L^-1 b, and P; where P is not positive definite, of the identity."""
        precision = self.precision(theta)
        safe = torch.where(
            _positive(precision)[..., None, None], precision, torch.eye(self.d, dtype=theta.dtype, device=theta.device)
        )
        factor = torch.linalg.cholesky(safe)
        half = torch.linalg.solve_triangular(factor, theta[..., : self.d].unsqueeze(-1), upper=False).squeeze(-1)
        return factor, half, precision

    def _check_moments(self, mean: Tensor, covariance: Tensor) -> None:
        if mean.shape[-1:] != (self.d,) or covariance.shape[-2:] != (self.d, self.d):
            raise ValueError(
                f"mean and covariance have shapes {tuple(mean.shape)} and {tuple(covariance.shape)}, expected "
                f"(..., {self.d}) and (..., {self.d}, {self.d})"
            )

    def __repr__(self) -> str:
        return f"MultivariateNormal({self.d})"


class NormalFisher(Operator):
    """I_theta of a normal distribution, or its inverse I_eta (dual): products in O(d^3), closed inverse."""

    def __init__(
        self, family: MultivariateNormal, mean: Tensor, sigma: Tensor, precision: Tensor, dual: bool = False
    ) -> None:
        self.family, self.mean, self.sigma, self.precision, self.dual = family, mean, sigma, precision, dual
        self.size, self.dtype, self.device = family.size, mean.dtype, mean.device

    def mv(self, vector: Tensor) -> Tensor:
        if self.dual:
            return self.family.backward(self.mean, self.precision, vector)
        return self.family.forward(self.mean, self.sigma, vector)

    def mm(self, block: Tensor) -> Tensor:
        return self.mv(block.mT).mT  # leading dimensions are batches

    def inverse(self, damping: float = 0.0) -> Operator | None:
        """The matrix of the other coordinates; None with damping, where no closed form is known."""
        if damping:
            return None
        return NormalFisher(self.family, self.mean, self.sigma, self.precision, not self.dual)


def inverse_from(factor: Tensor) -> Tensor:
    """(L L^T)^-1 for L (..., d, d). The forward derivative of torch.cholesky_inverse is wrong (torch 2.13)."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    half = torch.linalg.solve_triangular(factor, eye, upper=False)
    return half.mT @ half


def _positive(matrix: Tensor) -> Tensor:
    """Whether a symmetric matrix is positive definite, (..., d, d) -> (...)."""
    return torch.linalg.cholesky_ex(matrix.detach()).info == 0
