"""Networks of points, and points, that tests of residuals share."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def perceptron(*sizes: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Layers of these widths with activations in between, in float64."""
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1]).double()


def draw(count: int, dims: int = 2, seed: int = 1) -> Tensor:
    """Points in the unit cube, (count, dims)."""
    return torch.rand(count, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
