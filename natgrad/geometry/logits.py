"""Discrete distributions in their natural parameters: the arcs, square roots and spheres of `Bits`, `Rates`, `Simplex`.

Written in theta throughout: a probability that rounds to 0 or 1 has a logit still.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.geometry.flat_manifold import Straightened
from natgrad.geometry.stable_functions import arc_over_sine, safe_sqrt, sinc


class LogRates(Straightened):
    """Independent Poisson counts, points log rates (..., n): metric rate d theta^2, distance 2 |sqrt a - sqrt b|."""

    domain = "log rates (..., n) whose rates are numbers above zero"

    def straighten(self, point: Tensor) -> Tensor:
        return 2 * (point / 2).exp()

    def bend(self, line: Tensor) -> Tensor:
        return 2 * (line / 2).abs().log()

    def slope(self, point: Tensor) -> Tensor:
        return (point / 2).exp()

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return point + 2 * log_one_plus(tangent / 2)

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        return 2 * torch.expm1((other - point) / 2)

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        return vector * ((point - other) / 2).exp()

    def inside(self, point: Tensor) -> Tensor:
        return (torch.isfinite(point) & (point.abs() < largest_log(point))).all(-1)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        return point + tangent


class Logits(LogRates):
    """Independent bits, points logits (..., n) over `width`: metric p (1 - p) d theta^2, distances those of `Bits`."""

    domain = "logits (..., n) whose probabilities are above zero, and below one, as numbers"

    def __init__(self, width: float = 1.0) -> None:
        self.width = width

    def straighten(self, point: Tensor) -> Tensor:
        return 2 * (self.width * point / 2).exp().atan()

    def bend(self, line: Tensor) -> Tensor:
        return 2 * (line / 2).tan().abs().log() / self.width

    def slope(self, point: Tensor) -> Tensor:
        return self.width / (2 * (self.width * point / 2).cosh())

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        """tan(a + b) from tan a = exp(logit / 2), over tan a: the tangent's part alone, so that no digit is lost."""
        half, turn = (self.width * point / 2).exp(), (self.slope(point) * tangent / 2).tan()
        return point + 2 * (log_one_plus(turn / half) - log_one_plus(-turn * half)) / self.width

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        """2 atan(sinh((b - a) / 4) / cosh((a + b) / 4)) is the arc between two logits, exact however far out."""
        a, b = self.width * point / 4, self.width * other / 4
        return 2 * ((b - a).sinh() / (a + b).cosh()).atan() / self.slope(point)

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        return vector * self.slope(point) / self.slope(other)

    def inside(self, point: Tensor) -> Tensor:
        return super().inside(self.width * point)


class ClassLogits(Manifold):
    """One of C classes, or counts of `trials`, points logits (..., C): `Simplex` in theta."""

    # a constant added to all logits is of no length: the metric is singular along it; geodesics change it evenly, so
    # that `exp` undoes `log`, and tangents have the sum zero elsewhere
    domain = "logits (..., C) whose probabilities are above zero as numbers"

    def __init__(self, trials: int = 1) -> None:
        self.trials = trials

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        p = point.softmax(-1)
        return self.trials * (p * centre(p, first) * centre(p, second)).sum(-1)

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        """The pseudo-inverse of trials (diag p - p p^T): of a derivative, whose sum is zero, one with the sum zero."""
        scaled = self.project(point, gradient) / (self.trials * point.softmax(-1))
        return self.project(point, scaled)

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        p = point.softmax(-1)
        turn = centre(p, tangent) / 2  # sqrt p moves by turn * sqrt p
        square = (p * turn.square()).sum(-1, keepdim=True)
        cosine_less_one = -square / 2 * sinc(square / 4).square()
        moved = 2 * log_one_plus(cosine_less_one + sinc(square) * turn)
        return point + self.project(point, moved) + tangent.mean(-1, keepdim=True)

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        rise, chord = self._chord(point, other)
        along = 2 * arc_over_sine(chord) * (rise + 2 * chord)  # root'/root - cos phi, without its digits lost
        constant = (other - point).mean(-1, keepdim=True)
        return self.project(point, along) + constant

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        return 4 * self.trials**0.5 * safe_sqrt(self._chord(point, other)[1].squeeze(-1)).asin()

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        p, gap = point.softmax(-1), (point.log_softmax(-1) - other.log_softmax(-1)) / 2
        _, chord = self._chord(point, other)
        turn = centre(p, vector)
        along = (p * (-gap).exp() * turn).sum(-1, keepdim=True) / (2 - 2 * chord)
        moved = gap.exp() * turn - along * (gap.exp() + 1)
        return self.project(other, moved) + vector.mean(-1, keepdim=True)

    def inside(self, point: Tensor) -> Tensor:
        finite = torch.isfinite(point).all(-1)
        return finite & (point.nan_to_num().log_softmax(-1) > -largest_log(point)).all(-1)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        return point + tangent

    def project(self, point: Tensor, vector: Tensor) -> Tensor:
        return vector - vector.mean(-1, keepdim=True)

    def _chord(self, point: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """root'/root - 1 and sin^2(phi / 2) of the roots of the probabilities, phi between them."""
        log_p = point.log_softmax(-1)
        log_q = other.log_softmax(-1)
        none = (log_p == -torch.inf) & (log_q == -torch.inf)  # a class that neither has
        log_p, log_q = (torch.where(none, 0.0, each) for each in (log_p, log_q))
        rise = torch.expm1((log_q - log_p) / 2)
        return rise, ((log_p / 2).exp() * rise).square().sum(-1, keepdim=True) / 4

    def __repr__(self) -> str:
        return f"ClassLogits(trials={self.trials})"


def centre(p: Tensor, vector: Tensor) -> Tensor:
    """v - E_p[v]."""
    return vector - (p * vector).sum(-1, keepdim=True)


def log_one_plus(x: Tensor) -> Tensor:
    """log |1 + x|: beyond the edge, where 1 + x is negative, geodesics come back."""
    small = x > -0.5
    far = torch.where(small, -2.0, x)
    return torch.where(small, torch.log1p(torch.where(small, x, 0.0)), (1 + far).abs().log())


def largest_log(like: Tensor) -> float:
    """The largest |log p| of which p, and its inverse, are ordinary numbers: 708 in float64, 87 in float32."""
    return -math.log(torch.finfo(like.dtype).tiny) - 0.5
