"""Differences that textbook formulas lose to cancellation: in float64 where there is one, and by series near zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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
        dtype = floats[0].dtype
        for each in floats[1:]:
            dtype = torch.promote_types(dtype, each.dtype)
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
