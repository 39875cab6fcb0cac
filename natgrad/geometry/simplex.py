"""Categorical and multinomial distributions: a part of the sphere of radius 2."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.geometry.stable_functions import (
    arc_over_sine,
    largest_log,
    log_one_plus,
    safe_sqrt,
    sinc,
    squared_root_gap,
)
from natgrad.ground.checks import check_integer


class Simplex(Manifold):
    """Probabilities p (..., k), all positive, of sum 1; tangents have sum 0. Metric: trials * sum v_i^2 / p_i.

    2 sqrt(p) lies on a sphere of radius 2: geodesics are great circles and the distance is 2 sqrt(trials) arccos sum
    sqrt(p_i q_i). The faces are at finite distances: `exp` comes back from them, `retract` (p_i exp(v_i / p_i),
    normalised) never gets there.

    Args:
        trials: Of a multinomial distribution.

    Example:
        >>> simplex = ng.geometry.Simplex()
        >>> simplex.natural(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 0.0, 0.0]))
        tensor([ 0.2500, -0.1250, -0.1250])
    """

    domain = "positive probabilities (..., k) of sum 1"

    def __init__(self, trials: int = 1) -> None:
        self.trials = check_integer("trials", trials)

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        none = (point == 0) & ((first == 0) | (second == 0))
        return self.trials * torch.where(none, 0.0, first * second / torch.where(none, 1.0, point)).sum(-1)

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        """p_i (g_i - sum_j p_j g_j) / trials: a constant added to the gradient changes nothing."""
        return point * (gradient - (point * gradient).sum(-1, keepdim=True)) / self.trials

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        none = (point == 0) & (tangent == 0)  # a class that stays absent; what is zero there keeps its derivative
        root = torch.where(none, 1.0, point).sqrt()
        turn = torch.where(none, 0.0, tangent / (2 * root))
        square = turn.square().sum(-1, keepdim=True)
        cos, sine = cosine(square), sinc(square)
        return torch.where(none, cos * (cos * point + sine * tangent), (root * cos + sine * turn).square())

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        chord = squared_root_gap(point, other).sum(-1, keepdim=True) / 4  # sin^2(phi / 2)
        none = (point == 0) & (other == 0)
        root, target = (torch.where(none, 1.0, each).sqrt() for each in (point, other))
        across = torch.where(none, -(1 - 2 * chord) * point, root * (target - (1 - 2 * chord) * root))
        return 2 * arc_over_sine(chord) * across

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        half = safe_sqrt(squared_root_gap(point, other).sum(-1)) / 2
        return 4 * self.trials**0.5 * half.asin()

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        none = (point == 0) & (vector == 0)
        root, target = safe_sqrt(point), safe_sqrt(other)
        turn = torch.where(none, 0.0, vector / torch.where(none, 1.0, root))
        along = (turn * target).sum(-1, keepdim=True) / (1 + (root * target).sum(-1, keepdim=True))
        return target * (turn - along * (root + target))

    def inside(self, point: Tensor) -> Tensor:
        rounding = 100 * point.shape[-1] * torch.finfo(point.dtype).eps
        return (point > 0).all(-1) & ((point.sum(-1) - 1).abs() <= rounding)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        return (point.log() + tangent / point).softmax(-1)

    def project(self, point: Tensor, vector: Tensor) -> Tensor:
        return vector - point * vector.sum(-1, keepdim=True)

    def __repr__(self) -> str:
        return f"Simplex(trials={self.trials})"


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


def cosine(square: Tensor) -> Tensor:
    """cos(r) as a function of r^2, smooth at zero."""
    half = sinc(square / 4)
    return 1 - square / 2 * half.square()


def centre(p: Tensor, vector: Tensor) -> Tensor:
    """v - E_p[v]."""
    return vector - (p * vector).sum(-1, keepdim=True)
