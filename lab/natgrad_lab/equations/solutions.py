"""Solutions of equations that have no closed form: Burgers' by quadrature, Allen and Cahn's by splitting."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

VISCOSITY = 0.01 / math.pi
ROWS = 50
"""Intervals of time at whose ends the solution of Allen and Cahn's equation is kept."""


def solve_burgers(x: Tensor, nodes: int = 1001) -> Tensor:
    """u(x, t), (...,), from -sin(pi x) by Cole and Hopf's formula, by quadrature. x: (..., 2)."""
    s = torch.linspace(-12, 12, nodes, dtype=x.dtype, device=x.device)
    y = x[..., :1] - s * (4 * VISCOSITY * x[..., 1:]).sqrt()
    weights = torch.softmax(-torch.cos(math.pi * y) / (2 * math.pi * VISCOSITY) - s.square(), -1)
    return -(weights * torch.sin(math.pi * y)).sum(-1)


@lru_cache
def split_allen_cahn(modes: int = 512, steps: int = 4000) -> Tensor:
    """Fourier coefficients of u at the times 0, 1 / ROWS, ..., 1, (ROWS + 1, modes / 2 + 1).

    Strang's splitting: both parts of a step are exact, so that its error is O(1 / steps^2).
    """
    x = -1 + 2 * torch.arange(modes, dtype=torch.float64) / modes
    dt, waves = 1 / steps, math.pi * torch.arange(modes // 2 + 1)
    diffuse, u = torch.exp(-1e-4 * waves**2 * dt / 2), x**2 * torch.cos(math.pi * x)
    kept = [torch.fft.rfft(u)]
    for step in range(1, steps + 1):
        u = torch.fft.irfft(diffuse * torch.fft.rfft(u), modes)
        u = u / torch.sqrt(u**2 + (1 - u**2) * math.exp(-10 * dt))  # u' = 5 u - 5 u^3
        u = torch.fft.irfft(diffuse * torch.fft.rfft(u), modes)
        if step % (steps // ROWS) == 0:
            kept.append(torch.fft.rfft(u))
    return torch.stack(kept) / modes


def solve_allen_cahn(x: Tensor) -> Tensor:
    """u(x, t), (b,), from x^2 cos(pi x), periodic. x: (b, 2), its times multiples of 1 / ROWS."""
    found = split_allen_cahn()
    rows = found[(x[:, 1] * ROWS).round().long()]
    waves = math.pi * torch.arange(found.shape[1], dtype=x.dtype)
    turned = torch.exp(1j * waves * (x[:, :1] + 1))
    twice = torch.full_like(waves, 2.0)
    twice[0] = twice[-1] = 1.0  # the others stand for two coefficients
    return (twice * rows * turned).real.sum(1)
