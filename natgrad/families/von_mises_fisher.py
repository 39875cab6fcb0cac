"""The von Mises-Fisher family: directions, and its integral over the sphere in any dimension."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.families.event_checks import centre, check_support, check_varies, check_width, widen
from natgrad.families.exponential import ExponentialFamily
from natgrad.families.positive_families import log_gamma_draws
from natgrad.families.special_functions import exp_gap, in_double, ratio_gap
from natgrad.ground.checks import check_integer

TERMS = 16
"""Of the power series that is used for concentrations below one."""

LARGEST_EXPONENT = 300.0
NEAR_DIRECTIONS = 0.05
"""Variance of directions below which their concentration is computed from it."""

CONCENTRATION_STEPS = 20


class VonMisesFisher(ExponentialFamily):
    """Unit vectors x in d dimensions: T = x, theta = kappa mu, with the mean direction mu and the concentration kappa.

    The density is that on the sphere: theta = 0 is uniform, 1 / (2 pi) on the circle. eta = A(kappa) mu is shorter than
    one; from eta to theta by Newton's method.

    Args:
        d: Dimensions, at least 2: the circle (von Mises), the sphere (Fisher), ...

    Example:
        >>> family = ng.families.VonMisesFisher(3)
        >>> family.expectation(torch.tensor([0.0, 0.0, 2.0]))  # coth 2 - 1 / 2
        tensor([0.0000, 0.0000, 0.5373])
    """

    shown = ("d",)

    def __init__(self, d: int) -> None:
        self.d = self.size = check_integer("d", d, 2, of="the number of dimensions")
        self.alpha = (self.d - 1) / 2
        self._log_ring = math.log(2) + self.alpha * math.log(math.pi) - math.lgamma(self.alpha)
        self._log_sphere = math.log(2) + self.d / 2 * math.log(math.pi) - math.lgamma(self.d / 2)

    def statistics(self, x: Tensor) -> Tensor:
        x = self.as_numbers(check_width(x, self.d), torch.get_default_dtype())
        fits = (torch.linalg.vector_norm(x, dim=-1) - 1).abs() < 1e3 * torch.finfo(x.dtype).eps
        return check_support(x, fits, "vectors of length one")

    def log_partition(self, theta: Tensor) -> Tensor:
        square = self.check_shape(theta, "theta").square().sum(-1)
        near = square < 1
        kappa = torch.where(near, 1.0, square).sqrt()
        far = kappa + self._log_ring + weigh_cosines(self.alpha, kappa)[0]
        small = torch.where(near, square, 0.0)
        series = divide_power_sum(self.alpha, small, small)[0].log() + self._log_sphere
        return torch.where(self.inside(theta), torch.where(near, series, far), torch.inf)

    def log_prob(self, theta: Tensor, x: Tensor) -> Tensor:
        return self._log_density(self.check(theta), self.statistics(x))  # refuses lengths by the digits that x has

    @in_double
    def _log_density(self, theta: Tensor, x: Tensor) -> Tensor:
        return (theta * x).sum(-1) - self.log_partition(theta)

    @in_double
    def entropy(self, theta: Tensor) -> Tensor:
        """log of the sphere's area less the divergence from the uniform distribution."""
        return self._log_sphere - self.kl(self.check(theta), torch.zeros_like(theta))

    @in_double
    def kl(self, theta: Tensor, other: Tensor) -> Tensor:
        square, goal = (self.check(each).square().sum(-1) for each in (theta, other))
        near = (square < 1) & (goal < 1)
        distant = self._kl_of_lengths(*(torch.where(near.unsqueeze(-1), 1.0, each) for each in (theta, other)))
        close = self._kl_near_uniform(*(torch.where(near.unsqueeze(-1), each, 0.0) for each in (theta, other)))
        return torch.where(near, close, distant)

    def _kl_of_lengths(self, theta: Tensor, other: Tensor) -> Tensor:
        """That of kappa along mu, by log E[exp(d (t - E[t]))], and A kappa' (1 - cos), both without cancellation."""
        tiny = torch.finfo(theta.dtype).tiny
        kappa, goal = ((each.square().sum(-1) + tiny).sqrt() for each in (theta, other))
        start, share, short = weigh_cosines(self.alpha, kappa)
        mean = (share * short).sum(-1)  # E[1 - t]
        step = ((other - theta) * (other + theta)).sum(-1) / (goal + kappa)
        near = step.abs() < 0.25 * kappa.clamp(min=1.0)
        moved = torch.where(near, step, 0.0).unsqueeze(-1) * (mean.unsqueeze(-1) - short)
        gap = torch.log1p((share * exp_gap(moved.clamp(max=LARGEST_EXPONENT))).sum(-1))
        difference = weigh_cosines(self.alpha, goal)[0] - start + step * mean
        directions = theta / kappa.unsqueeze(-1) - other / goal.unsqueeze(-1)
        return torch.where(near, gap, difference) + (1 - mean) * goal * directions.square().sum(-1) / 2

    def _kl_near_uniform(self, theta: Tensor, other: Tensor) -> Tensor:
        """That of psi = log G(s), s = kappa^2: from the divergence of the power series G, and |theta' - theta|^2."""
        step = other - theta
        square, moved = theta.square().sum(-1), (step * (other + theta)).sum(-1)
        value, slope, first, second = divide_power_sum(self.alpha, square, square + moved)
        gap = ratio_gap(value + first * moved, value, first * moved)
        return second * moved.square() / value - gap + slope / value * step.square().sum(-1)

    def expectation(self, theta: Tensor) -> Tensor:
        return 2 * self._bends(theta)[0].unsqueeze(-1) * theta

    def covariance(self, theta: Tensor) -> Tensor:
        """2 F' I + 4 F'' theta theta^T of psi = F(s), s = kappa^2."""
        slope, bend = (part[..., None, None] for part in self._bends(theta))
        unit = torch.eye(self.d, dtype=theta.dtype, device=theta.device)
        return 2 * slope * unit + 4 * bend * theta.unsqueeze(-1) * theta.unsqueeze(-2)

    def _bends(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """F'(s) = A / (2 kappa) and F''(s) = (A' - A / kappa) / (4 s), from the power series below s = 1."""
        square = self.check(theta).square().sum(-1)
        near = square < 1
        s = torch.where(near, square, 0.0)
        value, slope, _, half_bend = divide_power_sum(self.alpha, s, s)
        kappa = torch.where(near, 1.0, square).sqrt()
        _, share, short = weigh_cosines(self.alpha, kappa)
        mean = (share * short).sum(-1)
        spread = (share * (short - mean.unsqueeze(-1)).square()).sum(-1)
        ratio = (1 - mean) / kappa
        first = torch.where(near, slope / value, ratio / 2)
        second = torch.where(near, 2 * half_bend / value - (slope / value).square(), (spread - ratio) / (4 * kappa**2))
        return first, second

    def maximise_likelihood(self, x: Tensor, statistics: Tensor) -> Tensor:
        """By Newton's method; of near directions by 1 - |E[x]|, which is Var(x) / (1 + |E[x]|) without cancellation."""
        mean, centred = centre(torch.nn.functional.normalize(widen(x), dim=-1))
        variance = centred.square().sum(-1).mean(0)
        check_varies(variance.detach().sqrt(), 1.0, statistics.dtype)
        if bool((variance > NEAR_DIRECTIONS).any()):
            return self.natural(mean)
        length = (1 - variance).sqrt()
        short = variance / (1 + length)
        kappa = (self.d - 1) / (2 * short)
        for _ in range(CONCENTRATION_STEPS):  # E[1 - t] falls nearly as 1 / kappa
            _, share, nodes = weigh_cosines(self.alpha, kappa)
            kappa = kappa * (share * nodes).sum(-1) / short
        return (kappa / length).unsqueeze(-1) * mean

    def guess(self, eta: Tensor) -> Tensor:
        """theta = eta (d - |eta|^2) / (1 - |eta|^2) (Banerjee et al. 2005)."""
        square = eta.square().sum(-1, keepdim=True)
        if not bool((square < 1).all()):
            raise ValueError("eta = E[x] must be shorter than one: directions that do not vary have no density")
        return eta * (self.d - square) / (1 - square)

    def draw(self, theta: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """The cosine by rejection (Wood 1994), written for 1 - t, which keeps its digits; a uniform vector across."""
        kappa = torch.linalg.vector_norm(theta, dim=-1)
        first = torch.zeros_like(theta)
        first[..., 0] = 1
        mean = torch.where((kappa > 0).unsqueeze(-1), theta / kappa.unsqueeze(-1), first)
        short = self._draw_cosines(kappa.expand(count, *kappa.shape), generator).unsqueeze(-1)
        across = torch.randn(count, *theta.shape, generator=generator, dtype=theta.dtype, device=theta.device)
        across = across - (across * mean).sum(-1, keepdim=True) * mean
        across = torch.nn.functional.normalize(across, dim=-1)
        return torch.nn.functional.normalize((1 - short) * mean + (short * (2 - short)).sqrt() * across, dim=-1)

    def _draw_cosines(self, kappa: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws of 1 - t, t = mu . x, in the shape of kappa."""
        width, like = self.d - 1, {"generator": generator, "dtype": kappa.dtype, "device": kappa.device}
        b = width / (2 * kappa + (4 * kappa.square() + width**2).sqrt())
        centre = (1 - b) / (1 + b)
        peak = width * ((4 * b).log() - 2 * torch.log1p(b)) - 2 * b * kappa / (1 + b)
        drawn, todo = torch.empty_like(kappa), torch.ones_like(kappa, dtype=torch.bool)
        shape = torch.full_like(kappa, self.alpha)
        while bool(todo.any()):
            odds = log_gamma_draws(shape, generator) - log_gamma_draws(shape, generator)
            z, rest = odds.sigmoid(), (-odds).sigmoid()  # a symmetric beta draw, and one minus it
            short = 2 * b * z / (rest + b * z)
            height = width * (2 * b / (1 + b) + centre * short).log() - kappa * short
            taken = todo & (torch.rand(kappa.shape, **like).log() <= height - peak)
            drawn, todo = torch.where(taken, short, drawn), todo & ~taken
        return drawn


def weigh_cosines(alpha: float, kappa: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log of the integral of exp(-kappa (1 - t)) (1 - t^2)^(alpha - 1) over -1 < t < 1; 1 - t as shares of nodes."""
    # the trapezoid rule in the logit z of s = (1 - t) / 2: the integrand 1/2 exp(-2 kappa s) (4 s (1 - s))^alpha is
    # taken around its peak, with steps for which the error is that of round-off, for every alpha and kappa
    at = kappa.detach()
    s = alpha / (at + alpha + (at.square() + alpha**2).sqrt())  # the peak
    step = min(0.2, 0.45 / alpha**0.5)
    reach = math.ceil((40 / alpha + 9 / alpha**0.5) / step)
    places = step * torch.arange(-reach, reach + 1, dtype=kappa.dtype, device=kappa.device)
    z = torch.logit(s).unsqueeze(-1) + places
    short = 2 * torch.sigmoid(z)
    spread = alpha * (
        2 * math.log(2) - torch.logaddexp(z, torch.zeros_like(z)) - torch.logaddexp(-z, torch.zeros_like(z))
    )
    logs = spread - kappa.unsqueeze(-1) * short
    total = logs.logsumexp(-1)
    return total + math.log(step / 2), (logs - total.unsqueeze(-1)).exp(), short


def divide_power_sum(alpha: float, s: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """G(s), G'(s), [G(s') - G(s)] / (s' - s) and ([...] - G'(s)) / (s' - s): sums of positive terms.

    G(s) = 1 + sum_m c_m s^m = E[exp(theta . x)] for uniform x, s = |theta|^2.
    """
    value, slope, first, second = torch.ones_like(s), torch.zeros_like(s), torch.zeros_like(s), torch.zeros_like(s)
    power, lower, ratio, bend = torch.ones_like(s), torch.zeros_like(s), torch.zeros_like(s), torch.zeros_like(s)
    coefficient = 1.0
    for m in range(1, TERMS + 1):
        coefficient /= 4 * m * (alpha + m - 0.5)  # c_m
        # of s^m: its derivative, its divided differences of first and second order
        bend = other * bend + lower
        ratio = other * ratio + power
        lower, power = m * power, power * s
        value, slope = value + coefficient * power, slope + coefficient * lower
        first, second = first + coefficient * ratio, second + coefficient * bend
    return value, slope, first, second
