"""The inverse Gaussian: how long a Brownian motion with drift takes to reach a level."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families.cancellation import in_double, ratio_gap
from natgrad.families.event_checks import centre_varying, check_above, check_rest, check_width, read_positive, widen
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.log_gamma import EULER, HALF_LOG_2PI

SERIES_BELOW = 2.0
"""Arguments below which the exponential integral is taken from its series."""

SERIES_TERMS, FRACTION_TERMS = 40, 70
"""Terms enough for float64 at `SERIES_BELOW`."""


class InverseGaussian(ExponentialFamily):
    """Mean mu, shape lambda: T = (x, 1 / x), theta = (-lambda / (2 mu^2), -lambda / 2).

    eta = (mu, 1 / mu + 1 / lambda), closed both ways, and p(x) = sqrt(lambda / (2 pi x^3)) exp(-lambda (x - mu)^2 / (2
    mu^2 x)).

    Example:
        >>> family = ng.families.InverseGaussian()
        >>> theta = family.from_mean_shape(torch.tensor(2.0), torch.tensor(4.0))
        >>> family.expectation(theta)
        tensor([2.0000, 0.7500])
    """

    size = 2
    domain = "theta = (-shape / (2 mean^2), -shape / 2): both must be negative"

    def statistics(self, x: Tensor) -> Tensor:
        x = read_positive(x)
        return torch.cat([x, 1 / x], dim=-1)

    def log_base(self, x: Tensor) -> Tensor:
        return -1.5 * check_width(x, 1).squeeze(-1).log() - HALF_LOG_2PI

    def mean_log_base(self, theta: Tensor) -> Tensor:
        mean, shape = self.mean_shape(theta)
        return -1.5 * (mean.log() - scaled_exponential_integral(2 * shape / mean)) - HALF_LOG_2PI

    def log_partition(self, theta: Tensor) -> Tensor:
        first, second = self.check_shape(theta, "theta").unbind(-1)
        inside = self.inside(theta)
        first, second = (torch.where(inside, part, -1.0) for part in (first, second))
        psi = -2 * (first * second).sqrt() - 0.5 * (-2 * second).log()
        return torch.where(inside, psi, torch.inf)

    def inside(self, theta: Tensor) -> Tensor:
        return ((theta < 0) & torch.isfinite(theta)).all(-1)

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        mean, shape = self.mean_shape(theta)
        x = read_positive(self.as_numbers(x, theta.dtype)).squeeze(-1)
        return 0.5 * shape.log() - 1.5 * x.log() - HALF_LOG_2PI - shape * ((x - mean) / mean).square() / (2 * x)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        mean, shape = self.mean_shape(theta)
        mean_log = mean.log() - scaled_exponential_integral(2 * shape / mean)
        return 0.5 - 0.5 * shape.log() + HALF_LOG_2PI + 1.5 * mean_log

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """1/2 (r - 1 - log r) + lambda' (mu - mu')^2 / (2 mu mu'^2), r = lambda' / lambda.

        mu - mu' comes from the differences of theta, so that near distributions lose no digits.
        """
        (mean, shape), (other_mean, other_shape) = self.mean_shape(theta), self.mean_shape(other)
        away = other - theta
        crossed = (
            theta[..., 1] * away[..., 0] - away[..., 1] * theta[..., 0]
        )  # of mu^2 - mu'^2 = theta_2 / theta_1 - ...
        gap = crossed / (theta[..., 0] * other[..., 0]) / (mean + other_mean)
        return 0.5 * ratio_gap(other_shape, shape, -2 * away[..., 1]) + other_shape * (gap / other_mean).square() / (
            2 * mean
        )

    def expectation(self, theta: Tensor) -> Tensor:
        mean, shape = self.mean_shape(theta)
        return torch.stack([mean, 1 / mean + 1 / shape], dim=-1)

    def natural(self, eta: Tensor) -> Tensor:
        mean, second = self.check_finite(eta, "eta").unbind(-1)
        inverse_mean = 1 / check_above(mean, 0.0, "eta[..., 0], the mean of x,")
        rest = second - inverse_mean
        words = "eta[..., 1] - 1 / eta[..., 0], which is 1 / shape, is not positive"
        check_rest(rest, inverse_mean, eta.dtype, words, "E[1 / x] > 1 / E[x]")
        return torch.stack([-0.5 * inverse_mean.square() / rest, -0.5 / rest], dim=-1)

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        (mean, centred), wide = centre_varying(x, by_mean=True), widen(x)
        # 1 / shape = E[1 / x] - 1 / mean = E[(x - mean)^2 / (x mean^2)], in which nothing cancels
        rest = ((centred / mean).square() / wide).mean(0)
        return torch.cat([-0.5 / (rest * mean.square()), -0.5 / rest], dim=-1)

    def covariance(self, theta: Tensor) -> Tensor:
        """[[mu^3 / lambda, -mu / lambda], [-mu / lambda, 1 / (lambda mu) + 2 / lambda^2]], (..., 2) -> (..., 2, 2)."""
        mean, shape = self.mean_shape(theta)
        cross = -mean / shape
        entries = [mean.pow(3) / shape, cross, cross, 1 / (shape * mean) + 2 / shape.square()]
        return torch.stack(entries, dim=-1).unflatten(-1, (2, 2))

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """By the roots of a quadratic equation (Michael, Schucany & Haas 1976), without their cancellation."""
        mean, shape = (part.expand(count, *theta.shape[:-1]) for part in self.mean_shape(theta))
        like = {"generator": generator, "dtype": theta.dtype, "device": theta.device}
        w = mean * torch.randn(mean.shape, **like).square() / (2 * shape)
        small = 1 / (1 + w + (w * (w + 2)).sqrt())  # the smaller root over the mean; 1 / small is the other one
        lower = torch.rand(mean.shape, **like) * (1 + small) < 1
        limits = torch.finfo(theta.dtype)
        return (mean * torch.where(lower, small, 1 / small)).clamp(limits.tiny, limits.max).unsqueeze(-1)

    def from_mean_shape(self, mean: Tensor, shape: Tensor) -> Tensor:
        """theta of a mean and a shape.

        Args:
            mean: mu, positive, shape (...).
            shape: lambda, positive, shape (...).

        Returns:
            Shape (..., 2).
        """
        mean, shape = torch.broadcast_tensors(torch.as_tensor(mean), torch.as_tensor(shape))
        check_above(mean, 0.0, "mean")
        return self.check(torch.stack([-shape / (2 * mean.square()), -shape / 2], dim=-1))

    def mean_shape(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """mu and lambda, (...) each.

        Args:
            theta: Natural parameters, shape (..., 2).
        """
        first, second = self.check(theta).unbind(-1)
        return (second / first).sqrt(), -2 * second


def scaled_exponential_integral(x: Tensor) -> Tensor:
    """exp(x) E_1(x), x > 0: by the series of E_1 below `SERIES_BELOW`, by its continued fraction above."""
    near = x < SERIES_BELOW
    small, large = torch.where(near, x, 1.0), torch.where(near, SERIES_BELOW, x)
    term, series = -torch.ones_like(small), torch.zeros_like(small)
    for k in range(1, SERIES_TERMS):
        term = -term * small / k
        series = series + term / k
    below = small.exp() * (series - EULER - small.log())
    fraction = large + 2 * FRACTION_TERMS + 1
    for k in range(FRACTION_TERMS, 0, -1):
        fraction = large + 2 * k - 1 - k**2 / fraction
    return torch.where(near, below, 1 / fraction)
