"""The univariate normal: the hyperbolic plane."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.geometry.base import Manifold
from natgrad.geometry.stable_functions import arc_over_hyperbolic_sine, safe_sqrt, sinhc

ROOT2 = math.sqrt(2)


class HalfPlane(Manifold):
    """Points (mean, standard deviation), (..., 2); metric (d mean^2 + 2 d std^2) / std^2, of curvature -1/2.

    With x = mean / sqrt 2 and y = std it is twice that of Poincare's upper half-plane; geodesics are half ellipses
    around points of the line std = 0, which is infinitely far away.
    """

    domain = "(mean, standard deviation) with a positive, finite deviation"

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (first[..., 0] * second[..., 0] + 2 * first[..., 1] * second[..., 1]) / point[..., 1].square()

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        return point[..., 1:].square() * gradient * gradient.new_tensor([1.0, 0.5])

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        deviation = point[..., 1]
        a, b = tangent[..., 0] / ROOT2 / deviation, tangent[..., 1] / deviation
        square = a.square() + b.square()
        shrink = _denominator(a, b, square)
        sideways = a * sinhc(square) / shrink
        return torch.stack([point[..., 0] + ROOT2 * deviation * sideways, deviation / shrink], dim=-1)

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        deviation = point[..., 1]
        u, w = (other[..., 0] - point[..., 0]) / (ROOT2 * deviation), other[..., 1] / deviation
        chord = (u.square() + (w - 1).square()) / (4 * w)  # sinh^2(r / 2)
        rise = (u.square() + (w - 1) * (w + 1)) / (2 * w)
        factor = deviation * arc_over_hyperbolic_sine(chord)
        return torch.stack([ROOT2 * factor * u / w, factor * rise], dim=-1)

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        square = (other[..., 0] - point[..., 0]).square() / 2 + (other[..., 1] - point[..., 1]).square()
        return 2 * ROOT2 * (safe_sqrt(square) / (2 * (point[..., 1] * other[..., 1]).sqrt())).asinh()

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        """Scaled by the ratio of deviations, and turned by the angle of (z' - conj z) / (z - conj z')."""
        across, up = (other[..., 0] - point[..., 0]) / ROOT2, point[..., 1] + other[..., 1]
        total = across.square() + up.square()
        cos, sin = (up.square() - across.square()) / total, -2 * across * up / total
        x, y = vector[..., 0] / ROOT2, vector[..., 1]
        turned = torch.stack([ROOT2 * (cos * x - sin * y), sin * x + cos * y], dim=-1)
        return turned * (other[..., 1:] / point[..., 1:])

    def inside(self, point: Tensor) -> Tensor:
        return torch.isfinite(point).all(-1) & (point[..., 1] > 0)


def _denominator(a: Tensor, b: Tensor, square: Tensor) -> Tensor:
    """cosh r - b sinh(r) / r with r^2 = a^2 + b^2, positive, without the cancellation of large b > 0."""
    r = safe_sqrt(square)
    cosine = torch.where(r > 0, b / torch.where(r > 0, r, 1.0), 0.0)
    short = a.square() / torch.where(r > 0, r * (r + b.abs()), 1.0)  # 1 - |cosine|
    less = torch.where(b > 0, short, 1 - cosine)
    more = torch.where(b > 0, 1 + cosine, short)
    grown = (more * (-r).exp() + less * r.exp()) / 2
    return torch.where(r > 1, grown, r.cosh() - b * sinhc(square))
