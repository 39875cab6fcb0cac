"""Categorical and multinomial distributions: a part of the sphere of radius 2."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.geometry.stable_functions import arc_over_sine, safe_sqrt, sinc, squared_root_gap
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


def cosine(square: Tensor) -> Tensor:
    """cos(r) as a function of r^2, smooth at zero."""
    half = sinc(square / 4)
    return 1 - square / 2 * half.square()
