"""Weighted regression of f on the statistics: its slope is the natural gradient of E_p[f] in natural parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.lapack import svd
from natgrad.linalg import eigh

RIDGES = tuple(10.0**k for k in range(-7, 3))


@dataclass(frozen=True)
class Slope:
    """b, the natural gradient in natural parameters, and how well f is a + b T.

    Args:
        value: b, shape (K,).
        explained: Share of f's variance that predictions of the left-out explain: 1 where f lies in the span of T,
            negative where they are worse than the mean.
        ridge: The shrinkage, relative to the mean variance of a statistic.
    """

    value: Tensor
    explained: float
    ridge: float


def natural_slope(
    statistics: Tensor, values: Tensor, weights: Tensor | None = None, *, ridges: tuple[float, ...] = RIDGES
) -> Slope:
    """Weighted ridge regression of f on T, the ridge chosen by the error on left-out draws.

    In natural parameters the Fisher matrix is Cov(T, T) and the gradient Cov(T, f): the natural gradient is the
    regression's slope, exact for f in the span of T from N > K draws on, whatever their distribution. Where N is
    smaller the ridge decides.

    Args:
        statistics: T, shape (N, K).
        values: f, shape (N,).
        weights: Importance weights, shape (N,). None: equal.
        ridges: To choose from, relative to the mean variance of a statistic.

    Reference:
        Malago 2023.
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


def regress(statistics: Tensor, values: Tensor, share: Tensor) -> Tensor:
    """The weighted least-squares slope, of least norm.

    Columns are scaled to one size first, so that statistics that hardly vary keep their digits. Where they depend on
    one another the scaling would choose another of the solutions, and is left out.

    Args:
        statistics: T, shape (N, K).
        values: f, shape (N, k).
        share: Weights that sum to one, shape (N,).

    Returns:
        Shape (k, K).
    """
    root = share.sqrt().unsqueeze(1)
    centred = (statistics - share @ statistics) * root
    target = (values - share @ values) * root
    sizes = torch.linalg.vector_norm(centred, dim=0)
    found, rank = solve_least_norm(centred / torch.where(sizes > 0, sizes, 1), target)
    if rank == centred.shape[1]:
        return (found / sizes.unsqueeze(1)).mT
    return solve_least_norm(centred, target)[0].mT


def solve_least_norm(matrix: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """argmin |A X - B| of least norm and the rank of A, by QR and the singular values of R."""
    q, r = torch.linalg.qr(matrix)
    left, sizes, right = svd(r)
    kept = sizes > max(matrix.shape) * torch.finfo(matrix.dtype).eps * sizes.amax()
    inverse = torch.where(kept, 1 / torch.where(kept, sizes, 1), 0)
    return right.mT @ (inverse.unsqueeze(1) * (left.mT @ (q.mT @ target))), int(kept.sum())
