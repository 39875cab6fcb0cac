"""Flat models: after a change of coordinates the geodesics are straight lines."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.geometry.stable_functions import largest_log, log_one_plus, safe_sqrt, squared_arc, squared_root_gap
from natgrad.ground.checks import check_positive
from natgrad.ground.linalg import require_factor
from natgrad.ground.pure import compute_exactly

INSIDE = 0.5
"""A coordinate that is on no edge."""


class IndependentEntries(Manifold):
    """Independent coordinates (..., n), each with the metric y'(x)^2 dx^2."""

    @abstractmethod
    def _slope(self, point: Tensor) -> Tensor:
        """y'(x) > 0, entry by entry; infinite on an edge that is at a finite distance."""

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (self._lift(point, first) * self._lift(point, second)).sum(-1)

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        return gradient / self._slope(point).square()

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        lifted = self._lift(point, vector)
        held = self._is_edge(other) & (lifted == 0)
        return torch.where(held, 0.0, lifted / self._slope(torch.where(held, INSIDE, other)))

    def _lift(self, point: Tensor, tangent: Tensor) -> Tensor:
        """dy = y'(x) dx; 0 for no dx, also on an edge."""
        held = self._is_edge(point) & (tangent == 0)
        return torch.where(held, 0.0, self._slope(torch.where(held, INSIDE, point)) * tangent)

    def _is_edge(self, point: Tensor) -> Tensor:
        return torch.isinf(self._slope(point.detach()))


class Straightened(IndependentEntries):
    """Where y(x) and its inverse lose no digits: geodesics are straight lines in y."""

    @abstractmethod
    def _straighten(self, point: Tensor) -> Tensor:
        """y(x), entry by entry."""

    @abstractmethod
    def _bend(self, line: Tensor) -> Tensor:
        """x(y), entry by entry."""

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        held = self._is_edge(point) & (tangent == 0)  # there is nothing to bend, and no derivative to be had
        inside = torch.where(held, INSIDE, point)
        return torch.where(held, point, self._bend(self._straighten(inside) + self._lift(inside, tangent)))

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        held = self._is_edge(point) & (point == other)
        start, end = (torch.where(held, INSIDE, each) for each in (point, other))
        rise = (self._straighten(end) - self._straighten(start)) / self._slope(start)
        return torch.where(held, 2 * (point.detach() - point), rise)  # sqrt(a b) - a, twice, at the edges that are


class Rates(Straightened):
    """Independent Poisson rates, each > 0: metric d rate^2 / rate, distance 2 |sqrt a - sqrt b|.

    The edge, 0, is at a finite distance: `exp` comes back from it, `retract` (rate exp(v / rate)) never gets there.
    """

    domain = "positive rates (..., n)"

    def _straighten(self, point: Tensor) -> Tensor:
        return 2 * point.sqrt()

    def _bend(self, line: Tensor) -> Tensor:
        return (line / 2).square()

    def _slope(self, point: Tensor) -> Tensor:
        return point.rsqrt()

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        return gradient * point

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        return 2 * safe_sqrt(squared_root_gap(point, other).sum(-1))

    def inside(self, point: Tensor) -> Tensor:
        return are_positive(point)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        return point * (tangent / point).exp()


class Scales(Straightened):
    """Independent rates (or means) of Exponential distributions, each > 0: metric shape d rate^2 / rate^2.

    The distance is sqrt(shape) |log a / b|.

    Args:
        shape: Of Gamma distributions of a known shape, whose metric is that times larger.
    """

    domain = "positive rates (..., n)"

    def __init__(self, shape: float = 1.0) -> None:
        check_positive("shape", shape, hint="; 1 for the Exponential")
        self.root = shape**0.5

    def _straighten(self, point: Tensor) -> Tensor:
        return self.root * point.log()

    def _bend(self, line: Tensor) -> Tensor:
        return (line / self.root).exp()

    def _slope(self, point: Tensor) -> Tensor:
        return self.root / point

    def inside(self, point: Tensor) -> Tensor:
        return are_positive(point)


class Bits(Straightened):
    """Independent Bernoulli probabilities, each in (0, 1): metric dp^2 / (p (1 - p)), distance 2 |arcsin sqrt a - ...|.

    p = 0 and 1 are at finite distances: `exp` comes back from them, `retract` (straight in the logit) never gets there.
    """

    domain = "probabilities strictly between 0 and 1, (..., n)"

    def _straighten(self, point: Tensor) -> Tensor:
        return 2 * torch.atan2(point.sqrt(), (1 - point).sqrt())

    def _bend(self, line: Tensor) -> Tensor:
        return (line / 2).sin().square()

    def _slope(self, point: Tensor) -> Tensor:
        return (point * (1 - point)).rsqrt()

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        return gradient * point * (1 - point)

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        chord = (squared_root_gap(point, other) + squared_root_gap(1 - point, 1 - other)) / 4  # sin^2(phi / 2)
        return 2 * safe_sqrt(squared_arc(chord).sum(-1))

    def inside(self, point: Tensor) -> Tensor:
        return ((point > 0) & (point < 1)).all(-1)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        return torch.sigmoid(point.logit() + tangent / (point * (1 - point)))


# The same in natural parameters, where probabilities and rates may be far closer to an edge than they are exact


class LogRates(IndependentEntries):
    """Independent Poisson counts, points log rates (..., n): metric rate d theta^2, distance 2 |sqrt a - sqrt b|."""

    domain = "log rates (..., n) whose rates are numbers above zero"

    def _slope(self, point: Tensor) -> Tensor:
        return (point / 2).exp()

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return point + 2 * log_one_plus(tangent / 2)

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        return 2 * torch.expm1((other - point) / 2)

    def inside(self, point: Tensor) -> Tensor:
        return (torch.isfinite(point) & (point.abs() < largest_log(point))).all(-1)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        return point + tangent


class Logits(LogRates):
    """Independent bits, points logits (..., n) over `width`: metric p (1 - p) d theta^2, distances those of `Bits`."""

    domain = "logits (..., n) whose probabilities are above zero, and below one, as numbers"

    def __init__(self, width: float = 1.0) -> None:
        self.width = width

    def _slope(self, point: Tensor) -> Tensor:
        return self.width / (2 * (self.width * point / 2).cosh())

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        """tan(a + b) from tan a = exp(logit / 2), over tan a: the tangent's part alone, so that no digit is lost."""
        half, turn = (self.width * point / 2).exp(), (self._slope(point) * tangent / 2).tan()
        return point + 2 * (log_one_plus(turn / half) - log_one_plus(-turn * half)) / self.width

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        """2 atan(sinh((b - a) / 4) / cosh((a + b) / 4)) is the arc between two logits, exact however far out."""
        a, b = self.width * point / 4, self.width * other / 4
        return 2 * ((b - a).sinh() / (a + b).cosh()).atan() / self._slope(point)

    def inside(self, point: Tensor) -> Tensor:
        return super().inside(self.width * point)


@compute_exactly
class Location(Manifold):
    """Means of normals with a known covariance: Euclidean, the distance is Mahalanobis'.

    Args:
        covariance: Shape (d, d).
    """

    domain = "finite means (..., d)"

    def __init__(self, covariance: Tensor) -> None:
        message = "covariance must be one positive definite matrix (d, d)"
        if covariance.dim() != 2:
            raise ValueError(message)
        self.covariance, self.factor = covariance, require_factor(covariance, message)

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        _, first, second = torch.broadcast_tensors(point, first, second)
        whitened = torch.cholesky_solve(second.unsqueeze(-1), self.factor.to(second)).squeeze(-1)
        return (first * whitened).sum(-1)

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        gradient = torch.broadcast_tensors(point, gradient)[1]
        return (self.covariance.to(gradient) @ gradient.unsqueeze(-1)).squeeze(-1)

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return point + tangent

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        return other - point

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        return torch.broadcast_tensors(point, other, vector)[2]

    def inside(self, point: Tensor) -> Tensor:
        return torch.isfinite(point).all(-1)

    def __repr__(self) -> str:
        return f"Location(covariance of {len(self.covariance)} variables)"


def are_positive(point: Tensor) -> Tensor:
    """Whether all entries are positive and finite, (..., n) -> (...)."""
    return ((point > 0) & torch.isfinite(point)).all(-1)
