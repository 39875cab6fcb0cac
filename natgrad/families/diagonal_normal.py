"""Normal distributions of one variable, of independent ones, and with a known covariance."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from natgrad.families.cancellation import in_double, ratio_gap
from natgrad.families.event_checks import centre_varying, check_moments, check_rest, check_width, widen
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.normal import LOG_2PI
from natgrad.families.symmetric_matrices import factor_covariance, half_log_det, inverse_from
from natgrad.ground.checks import check_integer
from natgrad.ground.linalg import is_concrete
from natgrad.ground.typed_torch import Map


class DiagonalNormal(ExponentialFamily):
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

    shown = ("d",)

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
        away = moved - turned * linear / half  # (nu - mu) / w
        return (0.5 * ratio_gap(-goal, -half, -turned) - 0.25 * away.square() / goal).sum(-1)

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
        return torch.cat([mean / std.square(), -0.5 / std.square()], dim=-1)

    def mean_std(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, (..., d) each.

        Args:
            theta: Natural parameters, shape (..., 2 d).
        """
        mean, variance = self._moments(self.check(theta))
        return mean, variance.sqrt()

    def mean_covariance(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """mu (..., d) and the diagonal Sigma (..., d, d).

        Args:
            theta: Natural parameters, shape (..., 2 d).
        """
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
        return torch.cat([moved, 2 * mean * moved + 2 * v.square() * b], dim=-1)

    def _backward(self, mean: Tensor, v: Tensor, tangent: Tensor) -> Tensor:
        a, b = tangent.split(self.d, dim=-1)
        half = (b - 2 * mean * a) / (2 * v.square())  # d (-1 / (2 v)), as d v = b - 2 mu a
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
        return super().from_mean_std(torch.as_tensor(mean).unsqueeze(-1), torch.as_tensor(std).unsqueeze(-1))

    def mean_std(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, (...) each."""
        mean, std = super().mean_std(theta)
        return mean.squeeze(-1), std.squeeze(-1)


class FixedCovarianceNormal(ExponentialFamily):
    """N(mu, Sigma) with a known covariance Sigma: T = x, theta = Sigma^-1 mu, eta = mu, Fisher matrix Sigma.

    Args:
        covariance: Sigma, positive definite, shape (d, d).
    """

    shown = ("d",)

    def __init__(self, covariance: Tensor) -> None:
        if not isinstance(covariance, Tensor) or covariance.dim() != 2:
            came = tuple(covariance.shape) if isinstance(covariance, Tensor) else type(covariance).__name__
            raise ValueError(f"covariance is {came}, expected a tensor (d, d)")
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
        """mu (..., d) and Sigma (..., d, d).

        Args:
            theta: Natural parameters, shape (..., d).
        """
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
