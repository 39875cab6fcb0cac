"""Counts with p(x) = a_x p^x / f(p): negative binomial with a known number of failures, geometric, logarithmic.

Means of log Gamma and of log x have no closed form. Malmsten's integral writes them as E[exp(-x t)], which is closed,
integrated over t; in log t the trapezoid rule has all digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.families.event_checks import check_above, check_support, check_width
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.positive_families import log_gamma_draws
from natgrad.families.special_functions import HALF_LOG_2PI, divergence_terms, in_double, ratio_gap, stirling_rest
from natgrad.ground.checks import check_positive

NODES = 480
DIGITS = 40.0
"""The integrand is left out where it is below exp(-DIGITS)."""

SMALLEST_RATIO = 1e-3
"""p below which log(-log(1 - p) / p) is taken from its series."""

FAINT = -80.0
"""log p below which p is lost beside one: x log p is then all that log p(x) has of it."""

LARGEST_SUM, SUMMED, FAR = math.log(0.25), 28, 3.0
"""log p up to which that many terms of -log(1 - p) / p have all digits; and what lies far below it, in log p."""


class PowerSeries(ExponentialFamily):
    """What the counts share: T = x, theta = log p < 0."""

    size = 1
    domain = "theta = log p, p a probability below one, must be negative"
    bounds = (-torch.inf, 0.0)
    least = 0
    """The smallest count."""

    def statistics(self, x: Tensor) -> Tensor:
        x = check_width(x, 1)
        return check_support(x, (x >= self.least) & (x == x.floor()), f"whole numbers >= {self.least}")

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """p and 1 - p, (..., 1) -> (...) each."""
        log_p = self.check(theta)[..., 0]
        return log_p.exp(), -torch.expm1(log_p)

    def _compare(self, theta: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """p (e^d - 1 - d) and p' - p, d = log p' - log p, (..., 1) -> (...) each; also where p or p' is zero."""
        log_p, other_log_p = theta[..., 0], other[..., 0]
        excess = divergence_terms(log_p, other_log_p)
        return excess, excess + log_p.exp() * (other_log_p - log_p)

    log_prob = in_double(ExponentialFamily.log_prob)
    entropy = in_double(ExponentialFamily.entropy)

    def _keep_inside(self, theta: Tensor) -> Tensor:
        """theta where it is inside, -1 elsewhere, (..., 1) -> (...)."""
        theta = self.check_shape(theta, "theta")
        return torch.where(self.inside(theta), theta[..., 0], -1.0)


class NegativeBinomial(PowerSeries):
    """Successes of probability p before the r-th failure, r > 0 known: T = x, theta = log p, eta = r p / (1 - p).

    Counts with a variance above their mean: eta + eta^2 / r.

    Args:
        failures: r, positive; it need not be whole.

    Example:
        >>> family = ng.families.NegativeBinomial(3)
        >>> family.natural(torch.tensor([3.0])).exp()  # as many successes as failures
        tensor([0.5000])
    """

    shown = ("failures",)

    def __init__(self, failures: float) -> None:
        check_positive("failures", failures)
        self.failures = float(failures)

    def log_base(self, x: Tensor) -> Tensor:
        x = check_width(x, 1).squeeze(-1)
        return torch.lgamma(x + self.failures) - torch.lgamma(x + 1) - math.lgamma(self.failures)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        """E[log Gamma(x + r) - log Gamma(x + 1)] - log Gamma(r), where the expectation is an integral.

        That of e^-t [(r - 1) - (1 - e^(-(r - 1) t)) / (1 - e^-t) E[e^(-x t)]] / t over t > 0, with E[e^(-x t)] =
        (1 + p / q (1 - e^-t))^-r.
        """
        (p, rest), r, slow = self._split(theta), self.failures, min(self.failures, 1.0)
        odds = p / rest

        def integrand(t: Tensor) -> Tensor:
            part = -torch.expm1(-t)  # 1 - e^-t
            spread = (-slow * t).exp() * -torch.expm1(-abs(r - 1) * t) / part * math.copysign(1.0, r - 1)
            return (r - 1) * (-t).exp() - spread * (-r * torch.log1p(odds.unsqueeze(-1) * part)).exp()

        return integrate_over_logs(integrand, 1 + r * odds, 1 / slow) - math.lgamma(r)

    def log_partition(self, theta: Tensor) -> Tensor:
        psi = -self.failures * log_one_minus_exp(self._keep_inside(theta))
        return torch.where(self.inside(theta), psi, torch.inf)

    @in_double
    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        """By Stirling's formula for the three log Gamma: what they have in common cancels by hand."""
        x = self.statistics(self.as_numbers(x, theta.dtype)).squeeze(-1)
        above, below = split_faint(self.check(theta))
        (p, rest), r = self._split(above), torch.as_tensor(self.failures, dtype=theta.dtype, device=theta.device)
        some, away = torch.where(x > 0, x, 1.0), x * rest - r * p
        total = some + r
        main = r * ratio_gap(total * rest, r, away) + some * ratio_gap(total * p, some, -away)
        rests = [stirling_rest(each, torch.lgamma) for each in (total, r, some)]
        logs = 0.5 * (r.log() - total.log() - some.log()) - HALF_LOG_2PI + rests[0] - rests[1] - rests[2] - main
        return torch.where(x > 0, logs + x * below[..., 0], r * log_one_minus_exp(theta[..., 0]))

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """r [g(q' / q) + p / q g(p' / p)], g(y) = y - 1 - log y and q = 1 - p."""
        (_, rest), (_, other_rest) = self._split(theta), self._split(other)
        excess, away = self._compare(theta, other)
        return self.failures * (ratio_gap(other_rest, rest, -away) + excess / rest)

    def expectation(self, theta: Tensor) -> Tensor:
        p, rest = self._split(theta)
        return (self.failures * p / rest).unsqueeze(-1)

    def natural(self, eta: Tensor) -> Tensor:
        return -torch.log1p(self.failures / check_above(self.check_finite(eta, "eta"), 0.0, "eta, the mean of x,"))

    def covariance(self, theta: Tensor) -> Tensor:
        p, rest = self._split(theta)
        return (self.failures * p / rest.square())[..., None, None]

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Poisson counts whose rate is a gamma draw."""
        p, rest = (part.unsqueeze(-1).expand(count, *theta.shape) for part in self._split(theta))
        rate = log_gamma_draws(torch.full_like(p, self.failures), generator).exp() * p / rest
        return torch.poisson(rate, generator=generator)


class Geometric(NegativeBinomial):
    """Successes of probability p before the first failure: x = 0, 1, ..., T = x, theta = log p, eta = p / (1 - p).

    This is `NegativeBinomial(1)`. Where x counts the trials, failure included, it is one more.

    Example:
        >>> ng.families.Geometric().expectation(torch.tensor([0.5]).log())
        tensor([1.0000])
    """

    shown = ()

    def __init__(self) -> None:
        super().__init__(1.0)

    def mean_log_base(self, theta: Tensor) -> Tensor:
        return 0 * self.check(theta)[..., 0]  # h = 1


class Logarithmic(PowerSeries):
    """Fisher's counts x = 1, 2, ... with p(x) = p^x / (-x log(1 - p)): T = x, theta = log p; to theta by Newton.

    Example:
        >>> family = ng.families.Logarithmic()
        >>> family.log_prob(torch.tensor([0.5]).log(), torch.tensor([1.0])).exp()  # 1 / (2 log 2)
        tensor(0.7213)
    """

    least = 1

    def log_base(self, x: Tensor) -> Tensor:
        return -check_width(x, 1).squeeze(-1).log()

    def mean_log_base(self, theta: Tensor) -> Tensor:
        """-E[log x] = integral of (E[e^(-x t)] - e^-t) / t over t > 0, E[e^(-x t)] = log(1 - p e^-t) / log(1 - p)."""
        theta = split_faint(self.check(theta))[0]
        (p, rest), log_rest = self._split(theta), log_one_minus_exp(theta[..., 0])

        def integrand(t: Tensor) -> Tensor:
            return torch.log1p(-p.unsqueeze(-1) * (-t).exp()) / log_rest.unsqueeze(-1) - (-t).exp()

        return integrate_over_logs(integrand, 1 / rest, 1.0)

    def log_partition(self, theta: Tensor) -> Tensor:
        """theta + log(-log(1 - p) / p): the ratio is one where p is lost."""
        log_p = self._keep_inside(theta)
        return torch.where(self.inside(theta), log_p + self._log_ratio(log_p), torch.inf)

    def _log_ratio(self, log_p: Tensor) -> Tensor:
        """log w, w = -log(1 - p) / p, of log p (...)."""
        small = log_p.exp() < SMALLEST_RATIO
        p = torch.where(small, log_p, -8.0).exp()
        series = torch.log1p(p * (1 / 2 + p * (1 / 3 + p * (1 / 4 + p * (1 / 5 + p * (1 / 6 + p / 7))))))
        far = torch.where(small, -1.0, log_p)
        return torch.where(small, series, (-log_one_minus_exp(far)).log() - far)

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        """log(w' / w) - (eta - 1) d, w = -log(1 - p) / p = sum_k p^k / (k + 1), d = log p' - log p."""
        log_p, goal = torch.broadcast_tensors(self.check(theta)[..., 0], self.check(other)[..., 0])
        least = LARGEST_SUM
        both = torch.maximum(log_p, goal) < least
        start, end = (torch.where(each < least, each, least).unsqueeze(-1) for each in (log_p, goal))
        k = torch.arange(1, SUMMED + 1, dtype=theta.dtype, device=theta.device)
        powers = (k * start).exp() / (k + 1)
        w, rise = 1 + powers.sum(-1), (k * powers).sum(-1)
        excess = (divergence_terms(k * start, k * end) / (k + 1)).sum(-1)  # w' - w - rise d
        moved = excess + rise * (end - start).squeeze(-1)
        summed = excess / w - ratio_gap(w + moved, w, moved)
        far = ~both & (torch.minimum(log_p, goal) < least - FAR)
        eta = self.expectation(torch.where(log_p < least, -1.0, log_p).unsqueeze(-1)).squeeze(-1)
        above = torch.where(log_p < least, rise / w, eta - 1)
        apart = self._log_ratio(goal) - self._log_ratio(log_p) - above * (goal - log_p)
        near = torch.where(both | far, -1.0, log_p), torch.where(both | far, -1.0, goal)
        return torch.where(both, summed, torch.where(far, apart, self._compare_near(*near)))

    def _compare_near(self, log_p: Tensor, goal: Tensor) -> Tensor:
        """[g(q' / q) + p / q (e^d - 1 - d)] / l - g(l' / l), g(y) = y - 1 - log y, q = 1 - p, l = -log q."""
        theta, other = log_p.unsqueeze(-1), goal.unsqueeze(-1)
        (_, rest), (_, other_rest) = self._split(theta), self._split(other)
        excess, away = self._compare(theta, other)
        start, gap = -log_one_minus_exp(log_p), ratio_gap(other_rest, rest, -away)
        return (gap + excess / rest) / start - ratio_gap(-log_one_minus_exp(goal), start, gap + away / rest)

    def expectation(self, theta: Tensor) -> Tensor:
        theta = split_faint(self.check(theta))[0]
        p, rest = self._split(theta)
        return (p / (-rest * log_one_minus_exp(theta[..., 0]))).unsqueeze(-1)

    def guess(self, eta: Tensor) -> Tensor:
        """eta = o / log(1 + o) of the odds o = p / (1 - p): about 2 (eta - 1), and eta log eta where they are large."""
        odds = check_above(eta, 1.0, "eta, the mean of x,") - 1
        odds = 2 * odds * (1 + 0.5 * torch.log1p(odds))
        return -torch.log1p(1 / odds)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """By a geometric count of a random probability (Kemp 1981)."""
        _, rest = self._split(theta)
        like = {"generator": generator, "dtype": theta.dtype, "device": theta.device}
        shape = (count, *rest.shape)
        log_p = (-torch.expm1(torch.rand(shape, **like) * rest.log())).log()
        counts = 1 + (torch.log1p(-torch.rand(shape, **like)) / log_p).floor()
        return torch.where(log_p == 0, 1.0, counts).clamp(1, torch.finfo(theta.dtype).max).unsqueeze(-1)


def split_faint(theta: Tensor) -> tuple[Tensor, Tensor]:
    """log p, at least `FAINT`, and what it is below that."""
    above = theta.clamp(min=FAINT)
    return above, theta - above


def log_one_minus_exp(log_p: Tensor) -> Tensor:
    """log(1 - p) of log p < 0, to all digits of a small p and of a small 1 - p."""
    half = -math.log(2)
    small = log_p < half
    near = (-torch.expm1(torch.where(small, half, log_p))).log()
    return torch.where(small, torch.log1p(-torch.where(small, log_p, half).exp()), near)


def integrate_over_logs(integrand: Callable[[Tensor], Tensor], slope: Tensor, decay: float) -> Tensor:
    """The integral of f(t) / t over t > 0 by the trapezoid rule in log t; f is about `slope` t near zero."""
    low = -DIGITS - slope.detach().log()
    high = math.log(DIGITS * decay)
    places = torch.linspace(0, 1, NODES, dtype=slope.dtype, device=slope.device)
    width = (high - low).unsqueeze(-1)
    return (integrand((low.unsqueeze(-1) + width * places).exp()) * width / (NODES - 1)).sum(-1)
