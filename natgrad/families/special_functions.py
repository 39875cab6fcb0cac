"""Differences that textbook formulas lose to cancellation, and the logarithm of the gamma function to all digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce, wraps
from typing import Any

import torch
from torch import Tensor

NEAR = 0.25
"""Arguments below which the series are used; above, the plain difference loses at most one digit."""

EXP_TERMS, LOG_TERMS = 14, 9
"""Terms of the series, enough for float64 at `NEAR`."""


def in_double(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method on float64 copies of its tensors, its result in their own dtype; without float64 as it is."""

    @wraps(method)
    def call_in_double(self: Any, *args: Any) -> Tensor:
        floats = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        if not floats or any(x.device.type == "mps" for x in floats):
            return method(self, *args)
        dtype = reduce(torch.promote_types, (x.dtype for x in floats))
        wide = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
        return method(self, *wide).to(dtype)

    return call_in_double


def ratio_gap(x: Tensor, base: Tensor, away: Tensor) -> Tensor:
    """r - 1 - log r >= 0 of r = x / base, numbers > 0, away = x - base, to all digits: (r - 1)^2 / 2 near one."""
    e = away / base
    near = e.abs() < NEAR
    small, ratio = torch.where(near, e, 0.0), torch.where(near, 1.0, x / base)
    t = small / (2 + small)  # log r = 2 atanh(t) with e = away / base, and e - 2 t = e t
    square, series = t.square(), torch.zeros_like(t)
    for k in range(LOG_TERMS, 0, -1):
        series = series * square + 1 / (2 * k + 1)
    return torch.where(near, small * t - 2 * t * square * series, ratio - 1 - ratio.log())


def log_ratio(x: Tensor, base: Tensor, away: Tensor) -> Tensor:
    """log(x / base) of positive numbers, away = x - base, to all digits."""
    e = away / base
    near = e.abs() < NEAR
    return torch.where(near, torch.log1p(torch.where(near, e, 0.0)), torch.where(near, 1.0, x / base).log())


def exp_gap(e: Tensor) -> Tensor:
    """exp(e) - 1 - e >= 0, to all digits: e^2 / 2 near zero."""
    near = e.abs() < NEAR
    small, far = torch.where(near, e, 0.0), torch.where(near, 1.0, e)
    series = torch.ones_like(small)
    for k in range(EXP_TERMS, 2, -1):
        series = 1 + small / k * series
    return torch.where(near, small.square() / 2 * series, torch.expm1(far) - far)


def divergence_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / q) - p + q >= 0 without cancellation; 0 where p = q = 0, q where p alone is; they sum to KL(p, q)."""
    none = log_p == -torch.inf
    log_p = torch.where(none, 0.0, log_p)
    p, gap = log_p.exp(), torch.where(none, 0.0, log_q - log_p)
    near = gap.abs() < NEAR
    near_terms = p * exp_gap(torch.where(near, gap, 0.0))
    distant = log_q.exp() - p - p * torch.where(near, 0.0, gap)
    return torch.where(none, log_q.exp(), torch.where(near, near_terms, distant))


# log Gamma and its derivatives, where torch's lose digits

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
EULER = 0.5772156649015329
"""-E[log x] of a waiting time x of rate one."""
SHIFT = 10
"""Arguments from which the series of Stirling's formula has all digits of float64."""

SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""Its coefficients: of 1 / x, 1 / x^3, ..."""


def log_gamma(x: Tensor) -> Tensor:
    """log Gamma(x), x > 0, as `torch.lgamma` has it, with a second derivative that has all digits of float64 too."""
    return torch.lgamma(x) + 0.5 * trigamma_error(x) * away_from_here(x).square()


def digamma(x: Tensor) -> Tensor:
    """The derivative of log Gamma(x), x > 0, as `torch.digamma` has it, with a derivative that has all digits too."""
    return torch.digamma(x) + trigamma_error(x) * away_from_here(x)


def trigamma(x: Tensor) -> Tensor:
    """The second derivative of log Gamma(x), x > 0, to all digits; its own derivatives are torch's."""
    return torch.polygamma(1, x) + trigamma_error(x)


def trigamma_error(x: Tensor) -> Tensor:
    """What `torch.polygamma(1, x)` lacks in float64, as a constant: up to 5e-10 of it below x = 10. Else zero."""
    at = x.detach()  # zeta(2, x) has all digits, but no forward derivative; polygammas of higher order need no mending
    if x.dtype != torch.float64:
        return torch.zeros_like(at)
    return (torch.special.zeta(2.0, at) - torch.polygamma(1, at)).nan_to_num(0.0, 0.0, 0.0)  # inf - inf at zero


def away_from_here(x: Tensor) -> Tensor:
    """Zero, with the derivative one: powers of it add to one derivative and leave the value and the others alone."""
    finite = x.clamp(max=torch.finfo(x.dtype).max)  # inf - inf is no zero
    return finite - finite.detach()


def stirling_rest(x: Tensor, lgamma: Callable[[Tensor], Tensor] = log_gamma) -> Tensor:
    """log Gamma(x) - ((x - 1/2) log x - x + 1/2 log 2 pi), x > 0: about 1 / (12 x)."""
    near = torch.where(x < SHIFT, x, 1.0)
    plain = lgamma(near) - ((near - 0.5) * near.log() - near + HALF_LOG_2PI)
    return torch.where(x < SHIFT, plain, stirling_series(x.clamp(min=float(SHIFT))))


def stirling_series(x: Tensor) -> Tensor:
    """`stirling_rest` for x >= `SHIFT`."""
    inverse, total = 1 / x.square(), torch.zeros_like(x)
    for coefficient in reversed(SERIES):
        total = coefficient + inverse * total
    return total / x


def stirling_slope(x: Tensor) -> Tensor:
    """The derivative of `stirling_series`."""
    inverse, total = 1 / x.square(), torch.zeros_like(x)
    for k in range(len(SERIES) - 1, -1, -1):
        total = -(2 * k + 1) * SERIES[k] + inverse * total
    return total * inverse


def log_gamma_bregman(x: Tensor, base: Tensor) -> Tensor:
    """log Gamma(x) - log Gamma(base) - digamma(base) (x - base) >= 0, to all digits for near and for large x, base."""
    # log Gamma(x) = log Gamma(x + n) - sum_k log(x + k), n = `SHIFT`, then Stirling: parts >= 0 but for a small rest
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
    return torch.where(x < SHIFT, near.log() - digamma(near), 0.5 / far - stirling_slope(far))


def digamma_inverse(y: Tensor) -> Tensor:
    """x > 0 with digamma(x) = y, by Newton's method in log x (start: Minka 2000)."""
    log_x = torch.where(
        y > -2.22, (y.exp() + 0.5).log(), -(torch.digamma(torch.ones_like(y)) - y).clamp(min=1e-3).log()
    )
    for _ in range(6):  # torch's trigamma will do: a slope off by 1e-10 bends no root
        x = log_x.exp()
        log_x = log_x - (torch.digamma(x) - y) / (x * torch.polygamma(1, x))
    return log_x.exp()
