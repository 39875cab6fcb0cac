"""The natural gradient of E_p[f] from draws: Cov(T, T)^-1 Cov(T, f), with as much shrinkage as the draws ask for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.linalg import eigh

RIDGES = tuple(10.0**k for k in range(-7, 3))


@dataclass(frozen=True)
class Slope:
    """b (K,), the natural gradient in natural parameters, and how well f is a + b T.

    explained: share of f's variance that predictions of the left-out explain, 1 where f lies in the span of T;
    negative where they are worse than the mean.   ridge: the shrinkage, relative to the mean variance of a statistic.
    """

    value: Tensor
    explained: float
    ridge: float


def natural_slope(
    statistics: Tensor, values: Tensor, weights: Tensor | None = None, *, ridges: tuple[float, ...] = RIDGES
) -> Slope:
    """Weighted ridge regression of f (N,) on T (N, K), the ridge chosen by the error on left-out draws.

    In natural parameters the Fisher matrix is Cov(T, T) and the gradient Cov(T, f): the natural gradient is the
    regression's slope, exact for f in the span of T from N > K draws on, whatever their distribution (Malago
    2023). Where N is smaller the ridge decides.   weights: (N,), importance weights; default equal.   ridges: to try.
    """
    share = torch.full_like(values, 1 / len(values)) if weights is None else weights / weights.sum()
    root = share.sqrt()
    centred = (statistics - share @ statistics) * root.unsqueeze(1)
    target = (values - share @ values) * root
    total = float(target.square().sum())
    if total == 0 or len(values) < 3:
        return Slope(torch.zeros_like(statistics[0]), 0.0, 0.0)
    left, sizes, right = thin_svd(centred)
    coordinates = left.mT @ target
    scale = float(sizes.square().sum()) / statistics.shape[1]
    best = (torch.inf, ridges[-1])
    for ridge in ridges:
        shrink = sizes.square() / (sizes.square() + ridge * scale)
        leverage = left.square() @ shrink + share
        error = ((target - left @ (shrink * coordinates)) / (1 - leverage).clamp(min=1e-12)).square().sum()
        if float(error) < best[0]:
            best = (float(error), ridge)
    error, ridge = best
    slope = right.mT @ (sizes / (sizes.square() + ridge * scale) * coordinates)
    return Slope(slope, 1 - error / total, ridge)


def thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (N, r), sizes (r,), V^T (r, K) from the smaller Gram matrix; sizes below 1e-7 of the largest are left out."""
    tall = matrix.shape[0] > matrix.shape[1]
    values, vectors = eigh(matrix.mT @ matrix if tall else matrix @ matrix.mT)
    kept = values > 1e-14 * values[-1].clamp(min=1e-300)
    sizes, basis = values[kept].sqrt(), vectors[:, kept]
    if tall:
        return (matrix @ basis) / sizes, sizes, basis.mT
    return basis, sizes, (basis.mT @ matrix) / sizes.unsqueeze(1)


def reuse(log_ratios: list[Tensor]) -> Tensor:
    """Weights (N,) of draws from earlier distributions, from log p(x) - log q_g(x) by generation, up to constants.

    Within a generation they are normalised, so that no partition function is needed; a generation counts for its
    effective number of draws.
    """
    parts = []
    for ratio in log_ratios:
        share = torch.softmax(ratio, 0)
        parts.append(share / share.square().sum())
    return torch.cat(parts) / sum(float(part.sum()) for part in parts)
