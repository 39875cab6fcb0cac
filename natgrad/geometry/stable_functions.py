"""Functions whose textbook form loses digits or gradients at zero: sinh(r) / r, lengths, functions of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.ground.linalg import eigh, symmetrise


def safe_sqrt(square: Tensor) -> Tensor:
    """sqrt(square), with gradient zero where square is zero (or, by round-off, below); NaN stays NaN."""
    none = square <= 0
    return torch.where(none, 0.0, torch.where(none, 1.0, square).sqrt())


def squared_root_gap(first: Tensor, second: Tensor) -> Tensor:
    """(sqrt a - sqrt b)^2 for a, b >= 0: where both are 0, as a + b, which it is where one is."""
    none = (first == 0) & (second == 0)
    a, b = (torch.where(none, 1.0, each) for each in (first, second))
    return torch.where(none, first + second, (a.sqrt() - b.sqrt()).square())


def sinhc(square: Tensor) -> Tensor:
    """sinh(r) / r as a function of r^2 >= 0, smooth at zero."""
    r = _root(square)
    return torch.where(square > SMALL, r.sinh() / r, 1 + square / 6 * (1 + square / 20))


def sinc(square: Tensor) -> Tensor:
    """sin(r) / r as a function of r^2 >= 0, smooth at zero."""
    r = _root(square)
    return torch.where(square > SMALL, r.sin() / r, 1 - square / 6 * (1 - square / 20))


def arc_over_sine(half_chord: Tensor) -> Tensor:
    """phi / sin(phi) for q = sin^2(phi / 2), smooth at q = 0."""
    s = _root(half_chord)
    phi = 2 * s.asin()
    return torch.where(half_chord > SMALL, phi / phi.sin(), 1 + half_chord * (2 / 3 + half_chord * 8 / 15))


def squared_arc(half_chord: Tensor) -> Tensor:
    """phi^2 for q = sin^2(phi / 2), smooth at q = 0."""
    series = 4 * half_chord * (1 + half_chord * (1 / 3 + half_chord * 8 / 45))
    return torch.where(half_chord > SMALL, 4 * _root(half_chord).asin().square(), series)


def arc_over_hyperbolic_sine(half_chord: Tensor) -> Tensor:
    """r / sinh(r) for q = sinh^2(r / 2), smooth at q = 0."""
    s = _root(half_chord)
    r = 2 * s.asinh()
    return torch.where(half_chord > SMALL, r / r.sinh(), 1 - half_chord * (2 / 3 - half_chord * 8 / 15))


SMALL = 1e-5  # below, two terms of the series are exact to 1e-16


def _root(square: Tensor) -> Tensor:
    """sqrt where it will be used, 1 elsewhere, so that no gradient is infinite."""
    return torch.where(square > SMALL, square, 1.0).sqrt()


def log_one_plus(x: Tensor) -> Tensor:
    """log |1 + x|: beyond the edge, where 1 + x is negative, geodesics come back."""
    small = x > -0.5
    far = torch.where(small, -2.0, x)
    return torch.where(small, torch.log1p(torch.where(small, x, 0.0)), (1 + far).abs().log())


def largest_log(like: Tensor) -> float:
    """The largest |log p| of which p, and its inverse, are ordinary numbers: 708 in float64, 87 in float32."""
    return -math.log(torch.finfo(like.dtype).tiny) - 0.5


def apply_to_matrix(function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], matrix: Tensor) -> Tensor:
    """f(A) for symmetric A (..., d, d) through its eigenvalues; exact first derivatives, for equal eigenvalues too."""
    # Daleckii and Krein: V (K o (V^T dA V)) V^T, K the divided differences of f; second derivatives are not those of f
    symmetric = symmetrise(matrix)
    values, vectors = eigh(symmetric.detach())
    gap = values.unsqueeze(-1) - values.unsqueeze(-2)
    mean = (values.unsqueeze(-1) + values.unsqueeze(-2)) / 2
    near = gap.abs() <= 1e-6 * mean.abs().clamp_min(1e-300)
    image = function(values)
    rise = image.unsqueeze(-1) - image.unsqueeze(-2)
    kernel = torch.where(near, slope(mean), rise / torch.where(near, 1.0, gap))
    moved = vectors.mT @ (symmetric - symmetric.detach()) @ vectors
    return vectors @ (torch.diag_embed(image) + kernel * moved) @ vectors.mT


def matrix_log(matrix: Tensor) -> Tensor:
    """log A of positive definite A (..., d, d)."""
    return apply_to_matrix(torch.log, torch.reciprocal, matrix)


def matrix_sqrt(matrix: Tensor) -> Tensor:
    """A^1/2 of positive definite A (..., d, d)."""
    return apply_to_matrix(torch.sqrt, lambda x: 0.5 / x.sqrt(), matrix)
