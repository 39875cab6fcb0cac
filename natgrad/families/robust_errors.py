"""Errors that count by their size, and not by their square: Laplace's and Huber's densities of a location."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.families.base import SeparableLikelihood
from natgrad.families.special_functions import NEAR, exp_gap, in_double
from natgrad.ground.checks import check_positive

ROOT_2PI = math.sqrt(2 * math.pi)
TERMS = 14
"""Of the series of the divergence near zero, enough for float64 at `NEAR`."""


@dataclass(frozen=True)
class Laplace(SeparableLikelihood):
    """p(t | r) = exp(-|t - r| / scale) / (2 scale), independent entries. Fisher form I / scale^2.

    Args:
        scale: The mean of |t - r|, positive. A loss sum |r - t| corresponds to 1.

    Raises:
        ValueError: Unless scale > 0.

    Example:
        >>> ng.families.Laplace(2.0).fisher(torch.zeros(1, 1))
        tensor([[[0.2500]]])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("scale", self.scale, hint=": the mean of the errors' sizes")

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets - outputs).abs() / self.scale + math.log(2 * self.scale)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        sizes = torch.empty_like(outputs.detach()).exponential_(generator=generator)
        return outputs.detach() + self.scale * draw_signs(outputs, generator) * sizes

    def curvature(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, self.scale**-2)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return exp_gap(-measure_size((outputs - other) / self.scale)).sum(1)  # |d| + exp(-|d|) - 1

    def cool(self, tau: Tensor) -> Tensor:
        """The Fisher information of an entry at temperature tau, over that at 1.

        Args:
            tau: >= 1, any shape.
        """
        return 1 / tau

    def error_of(self, nats: float) -> float:
        """The size of an error in standard deviations of a score, 1 / sqrt(Fisher), by what it adds to -log p.

        Args:
            nats: -log p less its least value.
        """
        return nats


@dataclass(frozen=True)
class Huber(SeparableLikelihood):
    """p(t | r) = exp(-h(z)) / (scale Z), z = (t - r) / scale: normal up to delta, exponential beyond.

    h(z) = z^2 / 2 up to |z| = delta and delta (|z| - delta / 2) beyond, and Z = sqrt(2 pi) erf(delta / sqrt 2) +
    2 exp(-delta^2 / 2) / delta. The Fisher information of an entry is P(|z| < delta) / scale^2.

    Args:
        delta: Where the density leaves the normal one, in units of `scale`, positive.
        scale: The standard deviation of that normal density, positive. `nn.HuberLoss(delta=d)` corresponds to
            Huber(d), and `nn.SmoothL1Loss(beta=b)` to Huber(sqrt b, scale=sqrt b).

    Raises:
        ValueError: Unless delta, scale > 0.

    Reference:
        Huber 1964.

    Example:
        >>> ng.families.Huber(1.0).fisher(torch.zeros(1, 1))
        tensor([[[0.5851]]])
    """

    delta: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("delta", self.delta, hint=": where squares end, in units of the scale")
        check_positive("scale", self.scale, hint=": the errors' standard deviation where they are squared")

    @cached_property
    def core(self) -> float:
        """P(|z| < delta)."""
        return float(core_mass(torch.tensor(self.delta, dtype=torch.float64)))

    @cached_property
    def log_mass(self) -> float:
        """log Z, from the tails where delta is so small that they hold nearly all."""
        tails = math.log(2 / self.delta) - self.delta * self.delta / 2
        middle = math.log(ROOT_2PI * math.erf(self.delta / math.sqrt(2)))
        return max(tails, middle) + math.log1p(math.exp(-abs(tails - middle)))

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        z = (targets - outputs) / self.scale
        size = functional.huber_loss(z, torch.zeros_like(z), reduction="none", delta=self.delta)
        return size + self.log_mass + math.log(self.scale)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        like = outputs.detach()
        share = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)
        inside = math.sqrt(2) * (share * math.erf(self.delta / math.sqrt(2))).erfinv()  # |z|, normal and cut off
        inside = inside.clamp(max=self.delta)
        outside = self.delta + torch.empty_like(like).exponential_(generator=generator) / self.delta
        chosen = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device) < self.core
        return like + self.scale * draw_signs(like, generator) * torch.where(chosen, inside, outside)

    def curvature(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, self.core / self.scale**2)

    @in_double
    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return huber_divergence(measure_size((outputs - other) / self.scale), self.delta).sum(1)

    def cool(self, tau: Tensor) -> Tensor:
        """The Fisher information of an entry at temperature tau, over that at 1.

        Args:
            tau: >= 1, any shape.
        """
        return core_mass(self.delta / tau.sqrt()) / core_mass(torch.full_like(tau, self.delta))

    def error_of(self, nats: float) -> float:
        """The size of an error in units of 1 / sqrt(Fisher), by what it adds to -log p.

        Args:
            nats: -log p less its least value.
        """
        inside = nats <= self.delta * self.delta / 2
        return math.sqrt(self.core) * (math.sqrt(2 * nats) if inside else nats / self.delta + self.delta / 2)


# At every temperature tau a loss rho(z) is tau times -log p of p = exp(-rho / tau) / Z. The metric of squares is the
# same at each; Laplace's is 1 / tau, and that of Huber P(|z| < delta / sqrt tau). By parts E[z rho'(z)] = tau, so that
# the mean over a batch tells tau. At tau = 1 a step moves by about 1: targets in thousands take thousands.


def sum_errors(family: Laplace | Huber, outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of z rho'(z) over errors, and their number: (2,), double precision."""
    targets = targets.to(torch.promote_types(outputs.dtype, targets.dtype))
    z = ((targets - outputs).detach() / family.scale).abs().double()
    terms = z if isinstance(family, Laplace) else z * z.clamp(max=family.delta)
    return torch.stack([terms.sum(), terms.new_tensor(float(terms.numel()))])


def find_temperature(sums: Tensor) -> Tensor:
    """tau >= 1, from `sum_errors` of all errors: the metric is that of a density as wide as these, or wider."""
    return (sums[0] / sums[1]).clamp(min=1)


def core_mass(delta: Tensor) -> Tensor:
    """P(|z| < delta) of Huber's density, any shape: delta^2 near zero and 1 from about 6 on."""
    middle = ROOT_2PI / 2 * delta * (delta / math.sqrt(2)).erf()  # both parts of Z times delta / 2
    return middle / (middle + (-delta.square() / 2).exp())


def huber_divergence(d: Tensor, delta: float) -> Tensor:
    """KL of two of Huber's densities of scale 1 that lie d >= 0 apart, any shape."""
    # its second derivative is C(d) = P(|z - d| < delta): up to 2 delta one edge of the interval lies in the tail and
    # one in the core, beyond both in the tail
    near, edge = d.clamp(max=2 * delta), torch.tensor(2 * delta, dtype=d.dtype, device=d.device)
    rest = d - near
    tail = (1 - float(core_mass(edge / 2))) / 2
    faded = -math.expm1(-2 * delta * delta) * tail * exp_gap(-delta * rest) / delta / delta
    return divergence_within(near, delta, 0) + rest * divergence_within(edge, delta, 1) + faded


def divergence_within(d: Tensor, delta: float, order: int) -> Tensor:
    """The divergence of distances 0 <= d <= 2 delta (order 0), or its derivative (order 1), in float64."""
    # C(d) = 1 - T exp(-delta d) - T - (Phi(d - delta) - Phi(-delta)) sqrt(2 pi) / Z, with the mass T of one tail, is
    # integrated twice; near zero by the series of C'(d) = f(delta) (exp(-delta d) - exp(delta d - d^2 / 2))
    core = float(core_mass(torch.tensor(delta, dtype=torch.float64)))
    tail = (1 - core) / 2
    density = delta * tail  # f(delta)
    weight = core / math.erf(delta / math.sqrt(2))  # sqrt(2 pi) / Z
    near = d < NEAR / max(1.0, delta)
    small, far = torch.where(near, d, 0.0), torch.where(near, 2 * delta, d)
    series = core * small ** (2 - order) / (2 - order)
    if density > 0:
        before, now = 1.0, delta  # Hermite's polynomials at delta
        for n in range(1, TERMS):
            gap = (-delta) ** n - now
            series = series + density * gap * small ** (n + 3 - order) / math.factorial(n + 3 - order)
            before, now = now, delta * now - n * before
    start, end = torch.full_like(d, -delta), far - delta
    if order == 0:
        faded = exp_gap(-delta * far) / delta / delta
        middle = second_integral(end) - second_integral(start) - far * first_integral(start)
    else:
        faded = -torch.expm1(-delta * far) / delta
        middle = first_integral(end) - first_integral(start)
    power = far ** (2 - order) / (2 - order)
    middle = middle - normal_cdf(start) * power
    return torch.where(near, series, (1 - tail) * power - tail * faded - weight * middle)


def normal_cdf(x: Tensor) -> Tensor:
    """Phi(x), to all digits below zero."""
    return torch.special.erfc(-x / math.sqrt(2)) / 2


def first_integral(x: Tensor) -> Tensor:
    """The integral of Phi from -inf to x: x Phi(x) + phi(x)."""
    return x * normal_cdf(x) + (-x.square() / 2).exp() / ROOT_2PI


def second_integral(x: Tensor) -> Tensor:
    """The integral of `first_integral`: ((x^2 + 1) Phi(x) + x phi(x)) / 2."""
    return ((x.square() + 1) * normal_cdf(x) + x * (-x.square() / 2).exp() / ROOT_2PI) / 2


def measure_size(d: Tensor) -> Tensor:
    """|d|, with a derivative of 1 at zero, so that second derivatives of even functions are right there."""
    return torch.where(d < 0, -d, d)


def draw_signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """-1 or 1 with equal chances, in the shape of `like`."""
    bits = torch.randint(2, like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return 2 * bits - 1
