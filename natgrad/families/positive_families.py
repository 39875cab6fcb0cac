"""Families over positive numbers and proportions, and those of y = g(x) where x has one of them."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from natgrad.families.event_checks import (
    as_tensors,
    centre,
    centre_varying,
    check_above,
    check_rest,
    check_support,
    check_varies,
    check_width,
    read_positive,
    root_mean_square,
    widen,
)
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.normal import Normal
from natgrad.families.product_families import Embedded
from natgrad.families.special_functions import (
    EULER,
    HALF_LOG_2PI,
    digamma,
    digamma_inverse,
    in_double,
    log_gamma,
    log_gamma_bregman,
    log_minus_digamma,
    log_ratio,
    ratio_gap,
    stirling_rest,
    trigamma,
)
from natgrad.ground.checks import check_integer, check_positive
from natgrad.ground.typed_torch import Map

GAMMA_STEPS = 8
LEAST_GAP = 1e4
"""Gaps of proportions, in units of round-off, that are known to four digits: below, their concentration is not."""


class Exponential(ExponentialFamily):
    """Waiting times of rate lambda: T = x, theta = -lambda < 0, eta = 1 / lambda.

    Example:
        >>> ng.Exponential().expectation(torch.tensor([-2.0]))
        tensor([0.5000])
    """

    size = 1
    domain = "theta = -rate must be negative"
    bounds = (-torch.inf, 0.0)

    def statistics(self, x: Tensor) -> Tensor:
        return check_support(check_width(x, 1), x >= 0, "x >= 0")

    def log_partition(self, theta: Tensor) -> Tensor:
        rate = -self.check_shape(theta, "theta")[..., 0]
        return torch.where(self.inside(theta), -rate.log(), torch.inf)

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        theta, other = self.check(theta), self.check(other)
        return ratio_gap(-other, -theta, theta - other).sum(-1)

    def expectation(self, theta: Tensor) -> Tensor:
        return -1 / self.check(theta)

    def natural(self, eta: Tensor) -> Tensor:
        return -1 / check_above(self.check_finite(eta, "eta"), 0.0, "eta, the mean of x,")

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.rand(count, *theta.shape, generator=generator, dtype=theta.dtype, device=theta.device)
        return torch.log1p(-uniform) / theta


class Gamma(ExponentialFamily):
    """Shape alpha, rate beta: T = (log x, x), theta = (alpha - 1, -beta).

    eta = (digamma(alpha) - log beta, alpha / beta); from eta to theta by Newton's method. theta holds the shape to eps,
    also a small one; log_prob, entropy and kl lose nothing beyond that, for shapes up to 1e10.

    Example:
        >>> gamma = ng.Gamma()
        >>> theta = torch.tensor([1.0, -4.0])  # shape 2, rate 4
        >>> gamma.fisher(theta).dense()
        tensor([[0.6449, 0.2500],
                [0.2500, 0.1250]])
    """

    size = 2
    domain = "theta = (shape - 1, -rate): the first above -1, the second negative"

    def statistics(self, x: Tensor) -> Tensor:
        x = read_positive(x)
        return torch.cat([x.log(), x], dim=-1)

    def log_partition(self, theta: Tensor) -> Tensor:
        self.check_shape(theta, "theta")
        shape, rate = theta[..., 0] + 1, -theta[..., 1]
        return torch.where(self.inside(theta), log_gamma(shape) - shape * rate.log(), torch.inf)

    def inside(self, theta: Tensor) -> Tensor:
        return (theta[..., 0] > -1) & (theta[..., 1] < 0) & torch.isfinite(theta).all(-1)

    @in_double
    def expectation(self, theta: Tensor) -> Tensor:
        shape, rate = self._split(theta)
        return torch.stack([digamma(shape) - rate.log(), shape / rate], dim=-1)

    def covariance(self, theta: Tensor) -> Tensor:
        """[[trigamma(shape), 1 / rate], [1 / rate, shape / rate^2]], (..., 2) -> (..., 2, 2)."""
        shape, rate = self._split(theta)
        entries = [trigamma(shape), 1 / rate, 1 / rate, shape / rate.square()]
        return torch.stack(entries, dim=-1).unflatten(-1, (2, 2))

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        """-shape (y - 1 - log y) + 1/2 log shape - log x - ..., y = x / mean: the large terms cancel by hand."""
        shape, rate = self._split(theta)
        x = read_positive(self.as_numbers(x, theta.dtype)).squeeze(-1)
        main = shape * ratio_gap(rate * x, shape, rate * x - shape)
        return 0.5 * shape.log() - main - x.log() - HALF_LOG_2PI - stirling_rest(shape)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        shape, rate = self._split(theta)
        rest = stirling_rest(shape) + (shape - 1) * log_minus_digamma(shape)
        return 0.5 * shape.log() - rate.log() + HALF_LOG_2PI + rest

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        (shape, rate), (other_shape, other_rate) = self._split(theta), self._split(other)
        away = other_rate - rate
        turned = (other_shape - shape) * log_ratio(other_rate, rate, away)
        main = shape * ratio_gap(other_rate, rate, away) - turned
        return log_gamma_bregman(other_shape, shape) + main

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Shape and rate (...)."""
        first, second = self.check(theta).unbind(-1)
        return first + 1, -second

    def invert(self, eta: Tensor) -> Tensor:
        gap = eta[:, 1].log() - eta[:, 0]
        words = "E[log x] < log E[x] in eta = (E[log x], E[x]): x that do not vary have no density"
        check_rest(gap, 1 + eta[:, 0].abs(), eta.dtype, "log E[x] - E[log x] is not positive", words)
        return self._solve_shape(gap, eta[:, 1])

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        (mean, centred), wide = centre_varying(x, by_mean=True), widen(x)
        # the mean of y - 1 - log y, y = x / mean, as E[y] = 1: what log E[x] and E[log x] share cancels by hand
        return self._solve_shape(ratio_gap(wide, mean, centred).mean(0).squeeze(-1), mean.squeeze(-1))

    def _solve_shape(self, gap: Tensor, mean: Tensor) -> Tensor:
        """theta (..., 2) of the gap log E[x] - E[log x] > 0 (...) (Jensen) and the mean (...)."""
        shape = (3 - gap + ((gap - 3).square() + 24 * gap).sqrt()) / (12 * gap)  # Minka 2002: within 1.5 %
        for _ in range(GAMMA_STEPS):  # in 1 / shape, where the equation is nearly linear (Minka 2002)
            error = log_minus_digamma(shape) - gap
            slope = 1 - shape * torch.polygamma(1, shape)
            shape = shape / (1 + error / torch.minimum(slope, -0.5 / (1 + shape)))
        return torch.stack([shape - 1, -shape / mean], dim=-1)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        shape = (theta[..., :1] + 1).expand(count, *theta.shape[:-1], 1)
        drawn = log_gamma_draws(shape, generator).exp() / -theta[..., 1:]
        return drawn.clamp(min=torch.finfo(drawn.dtype).tiny)  # a density without an atom at zero, where log x is not


class ChiSquare(Embedded):
    """The sum of k squares of standard normals, also for real k > 0: T = log x, theta = k / 2 - 1.

    This is `Gamma` with the shape k / 2 and the known rate 1/2: h(x) = exp(-x / 2), eta = digamma(k / 2) + log 2.

    Example:
        >>> chi_square = ng.families.ChiSquare()
        >>> chi_square.log_prob(torch.tensor([0.0]), torch.tensor([2.0]))  # two squares: 1/2 exp(-x / 2)
        tensor(-1.6931)
    """

    size = 1
    inner = Gamma()
    domain = "theta = degrees of freedom / 2 - 1 must be above -1"

    def _embed(self, theta: Tensor) -> Tensor:
        return torch.cat([theta, torch.full_like(theta, -0.5)], dim=-1)

    def _pull(self, covector: Tensor) -> Tensor:
        return covector[..., :1]

    def log_base(self, x: Tensor) -> Tensor:
        return -check_width(x, 1).squeeze(-1) / 2

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return -(self.check(theta)[..., 0] + 1)

    def invert(self, eta: Tensor) -> Tensor:
        return digamma_inverse(eta - math.log(2)) - 1


class Dirichlet(ExponentialFamily):
    """Proportions x_1 + ... + x_k = 1: T = log x, theta = alpha - 1, eta_i = digamma(alpha_i) - digamma(sum alpha).

    Args:
        k: Number of proportions.

    Example:
        >>> ng.Dirichlet(3).entropy(torch.zeros(3))  # uniform on a triangle of measure 1/2
        tensor(-0.6931)
    """

    shown = ("size",)

    domain = "theta = concentration - 1 must be above -1"
    bounds = (-1.0, torch.inf)

    def __init__(self, k: int) -> None:
        self.size = check_integer("k", k, 2, of="the number of proportions")

    def statistics(self, x: Tensor) -> Tensor:
        x = self.as_numbers(check_width(x, self.size), torch.get_default_dtype())
        slack = 1e3 * torch.finfo(x.dtype).eps
        fits = (x > 0) & ((x.sum(-1, keepdim=True) - 1).abs() < slack)
        return check_support(x, fits, "proportions > 0 with the sum 1").log()

    @in_double
    def log_partition(self, theta: Tensor) -> Tensor:
        self.check_shape(theta, "theta")
        psi = log_gamma(theta + 1).sum(-1) - log_gamma((theta + 1).sum(-1))
        return torch.where(self.inside(theta), psi, torch.inf)  # lgamma has values below zero, psi has not

    def covariance(self, theta: Tensor) -> Tensor:
        """diag(trigamma(alpha)) - trigamma(sum alpha), (..., k) -> (..., k, k)."""
        alpha = self.check(theta) + 1
        return torch.diag_embed(trigamma(alpha)) - trigamma(alpha.sum(-1))[..., None, None]

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        self.statistics(x)  # refuses what is not on the simplex, by the digits that x has
        return self._log_density(theta, x)

    @in_double
    def _log_density(self, theta: Tensor, x: Tensor) -> Tensor:
        """log p from how far log x is from the log of the mean: the large terms cancel by hand."""
        alpha = self.check(theta) + 1
        total = alpha.sum(-1)
        mean = alpha / total.unsqueeze(-1)
        ratio = log_ratio(x, mean, x - mean)
        main = (alpha * ratio - x.log()).sum(-1)
        roots = 0.5 * (alpha.log().sum(-1) - total.log()) + (1 - self.size) * HALF_LOG_2PI
        return main + roots + stirling_rest(total) - stirling_rest(alpha).sum(-1)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        alpha = self.check(theta) + 1
        total = alpha.sum(-1)
        roots = 0.5 * alpha.log().sum(-1) - (self.size - 0.5) * total.log() + (self.size - 1) * HALF_LOG_2PI
        each = stirling_rest(alpha) + (alpha - 1) * log_minus_digamma(alpha)
        return roots + each.sum(-1) - stirling_rest(total) - (total - self.size) * log_minus_digamma(total)

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        alpha, beta = self.check(theta) + 1, self.check(other) + 1
        return log_gamma_bregman(beta, alpha).sum(-1) - log_gamma_bregman(beta.sum(-1), alpha.sum(-1))

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        x = widen(x)
        return self._maximise_shares(x / x.sum(-1, keepdim=True), statistics.dtype)

    def _maximise_shares(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """theta (..., k) of proportions (b, ..., k) in float64, which came in the dtype."""
        mean, centred = centre(x)
        gap = ratio_gap(x, mean, centred).mean(0)  # E[log x_i] = log m_i - E[y_i - 1 - log y_i], y_i = x_i / m_i
        total = (mean * gap).sum(-1).detach()  # about (k - 1) / (2 sum alpha)
        least = LEAST_GAP * torch.finfo(x.dtype).eps
        check_varies(torch.where(total > least, (2 * total).sqrt(), 0.0), 1.0, dtype)
        return self.natural(mean.log() - gap)

    invert = in_double(ExponentialFamily.invert)

    def guess(self, eta: Tensor) -> Tensor:
        """Bisection on s = sum alpha with alpha_i = digamma^-1(eta_i + digamma(s)): their sum falls below s once."""
        if not bool((eta < 0).all() and (eta.exp().sum(1) < 1).all()):
            raise ValueError("eta = E[log x_i] must have sum_i exp(eta_i) < 1: x that do not vary have no density")
        low, high = torch.full_like(eta[:, :1], -30.0), torch.full_like(eta[:, :1], 30.0)
        for _ in range(50):
            middle = (low + high) / 2
            above = digamma_inverse(eta + torch.digamma(middle.exp())).sum(1, keepdim=True) > middle.exp()
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return digamma_inverse(eta + torch.digamma(((low + high) / 2).exp())) - 1

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        # as logarithms: at concentrations of .001 all gamma draws underflow together
        shares = log_gamma_draws((theta + 1).expand(count, *theta.shape), generator).softmax(-1)
        return shares.clamp(min=torch.finfo(shares.dtype).tiny)


PAIR = Dirichlet(2)


class Beta(Embedded):
    """A proportion x: T = (log x, log(1 - x)), theta = (alpha - 1, beta - 1).

    Example:
        >>> ng.Beta().log_prob(torch.zeros(2), torch.tensor([0.3]))  # uniform
        tensor(0.)
    """

    size = 2
    inner = PAIR
    domain = Dirichlet.domain

    def statistics(self, x: Tensor) -> Tensor:
        x = check_support(check_width(x, 1), (x > 0) & (x < 1), "0 < x < 1")
        return torch.cat([x.log(), torch.log1p(-x)], dim=-1)

    def _source(self, y: Tensor) -> Tensor:
        return torch.cat([y, 1 - y], dim=-1)

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        self.statistics(x)
        return self._log_density(theta, x)

    @in_double
    def _log_density(self, theta: Tensor, x: Tensor) -> Tensor:
        return PAIR._log_density(self.check(theta), self._source(x))

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        return PAIR._maximise_shares(self._source(widen(x)), statistics.dtype)

    invert = in_double(ExponentialFamily.invert)

    def guess(self, eta: Tensor) -> Tensor:
        return PAIR.guess(eta)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        drawn = PAIR.draw(theta, count, generator)[..., :1]
        return drawn.clamp(max=1 - torch.finfo(drawn.dtype).eps / 2)  # log(1 - x) has to be a number


def log_gamma_draws(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Logarithms of gamma draws of rate 1, by Marsaglia & Tsang 2000: rejection until every entry is accepted."""
    boosted = torch.where(shape < 1, shape + 1, shape)  # below 1: times u^(1 / shape)
    d = boosted - 1 / 3
    drawn, todo = torch.empty_like(shape), torch.ones_like(shape, dtype=torch.bool)
    like = {"generator": generator, "dtype": shape.dtype, "device": shape.device}
    while bool(todo.any()):
        z, u = torch.randn(shape.shape, **like), torch.rand(shape.shape, **like)
        v = (1 + z / (9 * d).sqrt()) ** 3
        taken = (
            todo
            & (v > 0)
            & (u.log() < z.square() / 2 + d - d * v + d * v.clamp(min=torch.finfo(shape.dtype).tiny).log())
        )
        drawn, todo = torch.where(taken, d * v, drawn), todo & ~taken
    boost = torch.log1p(-torch.rand(shape.shape, **like)) / shape
    return torch.where(shape < 1, drawn.log() + boost, drawn.log())


# How long a Brownian motion with drift takes to reach a level

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
    bounds = (-torch.inf, 0.0)

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

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        mean, shape = self.mean_shape(theta)
        x = read_positive(self.as_numbers(x, theta.dtype)).squeeze(-1)
        return 0.5 * shape.log() - 1.5 * x.log() - HALF_LOG_2PI - shape * ((x - mean) / mean).square() / (2 * x)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        return 0.5 - 0.5 * self.mean_shape(theta)[1].log() - self.mean_log_base(theta)

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """1/2 (r - 1 - log r) + lambda' (mu - mu')^2 / (2 mu mu'^2), r = lambda' / lambda.

        mu - mu' comes from the differences of theta, so that near distributions lose no digits.
        """
        (mean, shape), (other_mean, other_shape) = self.mean_shape(theta), self.mean_shape(other)
        away = other - theta
        # of mu^2 - mu'^2 = theta_2 / theta_1 - ...
        crossed = theta[..., 1] * away[..., 0] - away[..., 1] * theta[..., 0]
        gap = crossed / theta[..., 0] / other[..., 0] / (mean + other_mean)
        shift = other_shape * (gap / other_mean).square() / (2 * mean)
        return 0.5 * ratio_gap(other_shape, shape, -2 * away[..., 1]) + shift

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
        """theta of a mean and a shape, shape (..., 2).

        Args:
            mean: mu, positive, shape (...).
            shape: lambda, positive, shape (...).
        """
        mean, shape = torch.broadcast_tensors(*as_tensors(mean, shape))
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


# y = g(x) > 0, where x has a family of its own


class ChangedVariable(Embedded):
    """y = g(x) > 0 of one positive or real x: T(y) = T(g^-1(y)), and theta, psi, Fisher matrix and KL are those of x.

    Only densities and entropies change, by h(y) = |d x / d y|. A subclass sets `inner`, the family of x, and
    writes `_source`, g^-1, `_image`, g, `log_base` and `mean_log_base`.
    """

    @abstractmethod
    def _image(self, x: Tensor) -> Tensor:
        """y = g(x), (..., 1) -> (..., 1)."""

    def statistics(self, x: Tensor) -> Tensor:
        return super().statistics(read_positive(x))

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        x = read_positive(self.as_numbers(x, theta.dtype))
        return super().log_prob(theta, x) + self.log_base(x)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        return super().entropy(theta) - self.mean_log_base(theta)

    def natural(self, eta: Tensor) -> Tensor:
        return self.inner.natural(self.check_finite(eta, "eta"))

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        return self.inner.maximise_likelihood(self._source(x), statistics)

    def find_products(self, theta: Tensor) -> tuple[Map, Map | None] | None:
        return self.inner.find_products(theta)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        drawn = self._image(self.inner.draw(theta, count, generator))
        limits = torch.finfo(drawn.dtype)
        return drawn.clamp(min=limits.tiny, max=limits.max)  # a density on x > 0, where log x is a number


class LogNormal(ChangedVariable):
    """log x is normal with mean mu and standard deviation s: T = (log x, log^2 x), theta = (mu / s^2, -1 / (2 s^2)).

    Example:
        >>> family = ng.families.LogNormal()
        >>> theta = family.from_mean_std(torch.tensor(0.0), torch.tensor(1.0))
        >>> family.log_prob(theta, torch.tensor([1.0]))
        tensor(-0.9189)
    """

    size = 2
    inner: Normal = Normal()
    domain = Normal.domain

    def _source(self, y: Tensor) -> Tensor:
        return y.log()

    def _image(self, x: Tensor) -> Tensor:
        return x.exp()

    def log_base(self, x: Tensor) -> Tensor:
        return -check_width(x, 1).log().squeeze(-1)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return -self.expectation(theta)[..., 0]

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        first, rest = widen(x[:1]), widen(x)
        mean, centred = centre(log_ratio(rest, first, rest - first))  # near numbers have near logarithms, to all digits
        mean = first[0].log() + mean
        check_varies(root_mean_square(centred), 1 + mean.detach().abs(), x.dtype)
        return self.inner._from_moments(mean, centred.square().mean(0))

    def from_mean_std(self, mean: Tensor, std: Tensor) -> Tensor:
        """theta of the mean and the standard deviation of log x, shape (..., 2).

        Args:
            mean: Shape (...).
            std: Positive, shape (...).
        """
        return self.inner.from_mean_std(mean, std)

    def mean_std(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of log x, (...) each.

        Args:
            theta: Natural parameters, shape (..., 2).
        """
        return self.inner.mean_std(self.check(theta))


class InverseGamma(ChangedVariable):
    """1 / x is a gamma variable of shape alpha and rate beta: T = (-log x, 1 / x), theta = (alpha - 1, -beta).

    p(x) = beta^alpha / Gamma(alpha) x^(-alpha - 1) exp(-beta / x). theta and eta are those of `Gamma`, whose x is the
    reciprocal; textbooks with h = 1 write (-alpha - 1, -beta) for T = (log x, 1 / x).

    Example:
        >>> ng.families.InverseGamma().expectation(torch.tensor([1.0, -4.0]))  # E[1 / x] = alpha / beta
        tensor([-0.9635,  0.5000])
    """

    size = 2
    inner = Gamma()
    domain = Gamma.domain

    def _source(self, y: Tensor) -> Tensor:
        return 1 / y

    def _image(self, x: Tensor) -> Tensor:
        return 1 / x

    def log_base(self, x: Tensor) -> Tensor:
        return -2 * check_width(x, 1).log().squeeze(-1)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return 2 * self.expectation(theta)[..., 0]


class Weibull(ChangedVariable):
    """x^k is a waiting time, the shape k known: T = x^k, theta = -1 / scale^k < 0, eta = scale^k.

    p(x) = k / scale (x / scale)^(k - 1) exp(-(x / scale)^k).

    Args:
        shape: k, positive.

    Example:
        >>> ng.families.Weibull(2.0).expectation(torch.tensor([-0.25]))  # scale 2
        tensor([4.])
    """

    shown = ("shape",)

    size = 1
    inner = Exponential()
    domain = "theta = -1 / scale^shape must be negative"
    _unit = 1.0  # scales of this family in one of those that `from_scale` takes

    def __init__(self, shape: float) -> None:
        check_positive("shape", shape)
        self.shape = float(shape)

    def _source(self, y: Tensor) -> Tensor:
        return y.pow(self.shape)

    def _image(self, x: Tensor) -> Tensor:
        return x.pow(1 / self.shape)

    def log_base(self, x: Tensor) -> Tensor:
        return math.log(self.shape) + (self.shape - 1) * check_width(x, 1).log().squeeze(-1)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        mean_log = -(EULER + (-self.check(theta)[..., 0]).log()) / self.shape
        return math.log(self.shape) + (self.shape - 1) * mean_log

    def from_scale(self, scale: Tensor) -> Tensor:
        """theta of a scale, shape (..., 1).

        Args:
            scale: Positive, a number or of shape (..., 1).
        """
        scale = torch.atleast_1d(torch.as_tensor(scale))
        return self.check(-(self._unit * check_above(scale, 0.0, "scale")).pow(-self.shape))

    def scale(self, theta: Tensor) -> Tensor:
        """The scale of theta, shape (..., 1).

        Args:
            theta: Natural parameters, shape (..., 1).
        """
        return (-self.check(theta)).pow(-1 / self.shape) / self._unit


class Rayleigh(Weibull):
    """The length of a normal vector in the plane with standard deviation s: T = x^2, theta = -1 / (2 s^2).

    This is `Weibull(2)`, whose scale is s sqrt(2); the scale of a Rayleigh is s, that of one coordinate.

    Example:
        >>> ng.families.Rayleigh().expectation(torch.tensor([-0.5]))  # s = 1
        tensor([2.])
    """

    shown = ()

    domain = "theta = -1 / (2 s^2) must be negative"
    _unit = math.sqrt(2)

    def __init__(self) -> None:
        super().__init__(2.0)
