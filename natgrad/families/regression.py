"""Weighted regression of f on the statistics: its slope is the natural gradient of E_p[f] in natural parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.lapack import svd
from natgrad.linalg import eigh, gram

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
    k, error = choose_ridge(left, sizes, target, share, [ridge * scale for ridge in ridges])
    slope = right.mT @ (sizes / (sizes.square() + ridges[k] * scale) * coordinates)
    return Slope(slope, 1 - error / total, ridges[k])


def choose_ridge(
    left: Tensor, sizes: Tensor, target: Tensor, share: Tensor, ridges: Sequence[float]
) -> tuple[int, float]:
    """The ridge whose predictions of left-out draws err least, and the sum of their squared errors.

    The predictions of all ridges are one product with U and their leverages another with its squares: a pass over U
    for each ridge took longer than its Gram matrix where there are many draws.

    Args:
        left: U of the weighted statistics, shape (N, r).
        sizes: Their singular values, shape (r,).
        target: The weighted values, shape (N,).
        share: Weights that sum to one, shape (N,).
        ridges: In the unit of a squared singular value.

    Returns:
        The place in `ridges`, the last where no error is a number, and the error, then infinite.
    """
    powers = sizes.square().unsqueeze(1)
    shrink = powers / (powers + torch.tensor(ridges, dtype=powers.dtype, device=powers.device))  # (r, ridges)
    predicted = left @ (shrink * (left.mT @ target).unsqueeze(1))
    leverage = left.square() @ shrink + share.unsqueeze(1)
    residual = (target.unsqueeze(1) - predicted) / (1 - leverage).clamp(min=1e-12)
    errors = [error if error == error else math.inf for error in residual.square().sum(0).tolist()]
    least = min(errors)
    return (errors.index(least) if math.isfinite(least) else len(errors) - 1), least


def thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (N, r), sizes (r,), V^T (r, K) from the smaller Gram matrix; sizes below 1e-7 of the largest are left out."""
    tall = matrix.shape[0] > matrix.shape[1]
    values, vectors = eigh(gram(matrix if tall else matrix.mT))
    kept = values > 1e-14 * values[-1].clamp(min=1e-300)
    sizes, basis = values[kept].sqrt(), vectors[:, kept]
    if tall:
        return (matrix @ basis).div_(sizes), sizes, basis.mT
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
