"""Blocks as a rule that shapes directions sees them, and the polar factor by definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.operators import Operator
from natgrad.rules import BlockPoint


def polar_by_svd(matrix: Tensor) -> Tensor:
    """U V^T of U S V^T."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def refuse_metric() -> Operator:
    """Nobody asks for it."""
    raise AssertionError


def make_point(
    gradient: Tensor, memory: dict[str, Tensor] | None = None, values: Tensor | None = None, **known: Any
) -> BlockPoint:
    """A layer with white inputs, whose running mean is its gradient."""
    point = BlockPoint(
        names=("weight",),
        kind="Kronecker",
        mean=gradient,
        gradient=lambda: gradient,
        inverse=None,
        metric=refuse_metric,
        level=0.1,
        prepared={"inputs": torch.eye(gradient.shape[-1], dtype=gradient.dtype)},
        memory=memory or {},
        values=lambda: torch.ones_like(gradient) if values is None else values,
    )
    return replace(point, **known)


def join_bias(layer: nn.Linear) -> Tensor:
    """Weight and bias in one matrix, a copy."""
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach().clone()


def describe_fit(before: Tensor, x: Tensor, y: Tensor, damping: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of a linear least-squares fit: its mean gradient, the damped second moment of its inputs and that to the -1/2."""
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    gradient = 2 * (ones @ before.mT - y).mT @ ones / y.numel()
    moment = ones.mT @ ones / len(x)
    white = moment / moment.diagonal().mean() + damping * torch.eye(len(moment), dtype=x.dtype)
    values, vectors = torch.linalg.eigh(white)
    return gradient, white, (vectors * values.rsqrt()) @ vectors.mT


def draw_layers(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Linear layers with tanh in between, from torch's own start."""
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)
