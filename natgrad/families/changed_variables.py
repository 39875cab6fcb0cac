"""Families of y = g(x), where x has a family of its own: log-normal, Weibull, Rayleigh, inverse gamma."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from natgrad.families.cancellation import in_double, log_ratio
from natgrad.families.diagonal_normal import Normal
from natgrad.families.event_checks import (
    centre,
    check_above,
    check_varies,
    check_width,
    read_positive,
    root_mean_square,
    widen,
)
from natgrad.families.log_gamma import EULER
from natgrad.families.positive_families import Exponential, Gamma
from natgrad.families.product_families import Embedded
from natgrad.ground.checks import check_positive
from natgrad.ground.typed_torch import Map


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
        check_above(scale, 0.0, "scale")
        return self.check(-scale.pow(-self.shape))

    def scale(self, theta: Tensor) -> Tensor:
        """The scale of theta, shape (..., 1).

        Args:
            theta: Natural parameters, shape (..., 1).
        """
        return (-self.check(theta)).pow(-1 / self.shape)


class Rayleigh(Weibull):
    """The length of a normal vector in the plane with standard deviation s: T = x^2, theta = -1 / (2 s^2).

    This is `Weibull(2)`, whose scale is s sqrt(2); the scale of a Rayleigh is s.

    Example:
        >>> ng.families.Rayleigh().expectation(torch.tensor([-0.5]))  # s = 1
        tensor([2.])
    """

    shown = ()

    domain = "theta = -1 / (2 s^2) must be negative"

    def __init__(self) -> None:
        super().__init__(2.0)

    def from_scale(self, scale: Tensor) -> Tensor:
        """theta of s.

        Args:
            scale: s, the standard deviation of one coordinate; positive, a number or of shape (..., 1).

        Returns:
            Shape (..., 1).
        """
        return super().from_scale(torch.as_tensor(scale) * math.sqrt(2))

    def scale(self, theta: Tensor) -> Tensor:
        """s of theta, shape (..., 1).

        Args:
            theta: Natural parameters, shape (..., 1).
        """
        return super().scale(theta) / math.sqrt(2)
