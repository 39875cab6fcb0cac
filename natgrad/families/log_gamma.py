"""The logarithm of the gamma function and its derivative where their textbook differences lose their digits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.families.gaps import ratio_gap

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
SHIFT = 10
"""Arguments from which the series of Stirling's formula has all digits of float64."""

SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""Its coefficients: of 1 / x, 1 / x^3, ..."""


def stirling_rest(x: Tensor) -> Tensor:
    """log Gamma(x) - ((x - 1/2) log x - x + 1/2 log 2 pi), x > 0: about 1 / (12 x)."""
    near = torch.where(x < SHIFT, x, 1.0)
    plain = torch.lgamma(near) - ((near - 0.5) * near.log() - near + HALF_LOG_2PI)
    return torch.where(x < SHIFT, plain, stirling_series(x.clamp(min=float(SHIFT))))


def stirling_series(x: Tensor) -> Tensor:
    """`stirling_rest` for x >= `SHIFT`."""
    inverse, found = 1 / x.square(), torch.zeros_like(x)
    for coefficient in reversed(SERIES):
        found = coefficient + inverse * found
    return found / x


def stirling_slope(x: Tensor) -> Tensor:
    """The derivative of `stirling_series`."""
    inverse, found = 1 / x.square(), torch.zeros_like(x)
    for k in range(len(SERIES) - 1, -1, -1):
        found = -(2 * k + 1) * SERIES[k] + inverse * found
    return found * inverse


def log_gamma_bregman(x: Tensor, base: Tensor) -> Tensor:
    """log Gamma(x) - log Gamma(base) - digamma(base) (x - base) >= 0, to all digits for near and for large x, base.

    log Gamma(x) = log Gamma(x + n) - sum_k log(x + k) with n = `SHIFT`, and Stirling's formula for x + n: the
    divergences of its parts are sums of `ratio_gap`, which are all positive but for a small rest.
    """
    away, far, start = x - base, x + SHIFT, base + SHIFT
    steps = torch.arange(SHIFT, dtype=x.dtype, device=x.device)
    shifted = ratio_gap(x.unsqueeze(-1) + steps, base.unsqueeze(-1) + steps, away.unsqueeze(-1)).sum(-1)
    # the divergence of x log x is far log(far / start) - (far - start): the gap of start / far, times far
    main = far * ratio_gap(start, far, -away) + ratio_gap(far, start, away) / 2
    rest = stirling_series(far) - stirling_series(start) - stirling_slope(start) * away
    return shifted + main + rest


def log_minus_digamma(x: Tensor) -> Tensor:
    """log x - digamma(x), x > 0; from `SHIFT` on by its series, since the two agree in most digits."""
    near = torch.where(x < SHIFT, x, 1.0)
    far = x.clamp(min=float(SHIFT))
    return torch.where(x < SHIFT, near.log() - torch.digamma(near), 0.5 / far - stirling_slope(far))


def digamma_inverse(y: Tensor) -> Tensor:
    """x > 0 with digamma(x) = y, by Newton's method in log x (start: Minka 2000)."""
    log_x = torch.where(
        y > -2.22, (y.exp() + 0.5).log(), -(torch.digamma(torch.ones_like(y)) - y).clamp(min=1e-3).log()
    )
    for _ in range(6):
        x = log_x.exp()
        log_x = log_x - (torch.digamma(x) - y) / (x * torch.polygamma(1, x))
    return log_x.exp()
