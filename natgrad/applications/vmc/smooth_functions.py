"""Analytic functions of every number by itself, with their first and second derivative."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def differentiate_tanh(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tanh z with two derivatives."""
    value = torch.tanh(z)
    slope = 1 - value.square()
    return value, slope, -2 * value * slope


def differentiate_sigmoid(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 / (1 + exp(-z)) with two derivatives."""
    value = torch.sigmoid(z)
    slope = value * (1 - value)
    return value, slope, slope * (1 - 2 * value)


def differentiate_silu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z / (1 + exp(-z)) with two derivatives."""
    gate, slope, bend = differentiate_sigmoid(z)
    return z * gate, gate + z * slope, 2 * slope + z * bend


def differentiate_sqrt(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The root of z with two derivatives."""
    value = z.sqrt()
    slope = 0.5 / value
    return value, slope, -0.5 * slope / z


def differentiate_reciprocal(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 / z with two derivatives."""
    value = 1 / z
    square = value.square()
    return value, -square, 2 * square * value


def differentiate_exponential(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp z with two derivatives."""
    value = z.exp()
    return value, value, value


SMOOTH: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | float]]] = {
    "tanh": differentiate_tanh,
    "sigmoid": differentiate_sigmoid,
    "silu": differentiate_silu,
    "sqrt": differentiate_sqrt,
    "reciprocal": differentiate_reciprocal,
    "exp": differentiate_exponential,
    "log": lambda z: (z.log(), 1 / z, -1 / z.square()),
    "log1p": lambda z: (z.log1p(), 1 / (1 + z), -1 / (1 + z).square()),
    "square": lambda z: (z.square(), 2 * z, torch.full_like(z, 2)),
    "sin": lambda z: (z.sin(), z.cos(), -z.sin()),
    "cos": lambda z: (z.cos(), -z.sin(), -z.cos()),
}
"""By the names of torch's functions: z -> f, f' and f''."""
