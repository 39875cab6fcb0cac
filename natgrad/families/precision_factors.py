"""Triangular factors of precisions and covariances: solves, inverses, determinants and divergences from them."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families.cancellation import ratio_gap
from natgrad.ground.linalg import factor_or_nan, invert_or_nan, is_positive_definite, require_factor

SMALL = 8  # up to this dimension `inv` of a batch takes half the time of a triangular solve


def factor_covariance(matrix: Tensor, message: str | None = None) -> Tensor:
    """L with L L^T the matrix (..., d, d). ValueError unless it is positive definite (the lower triangle is read)."""
    return require_factor(
        matrix, message or "covariance is not positive definite, which a distribution with a density needs"
    )


def safe_factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor, that of the identity where there is none, and whether there is."""
    fine = is_positive_definite(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return factor_or_nan(torch.where(fine[..., None, None], matrix, eye)), fine


def solve_factor(factor: Tensor, vector: Tensor) -> Tensor:
    """(L L^T)^-1 v, (..., d, d), (..., d) -> (..., d)."""
    half = torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)


def precision_gap(factor: Tensor, goal: Tensor) -> Tensor:
    """1/2 [tr(M) - d - log det M] >= 0 for M = P^-1 Q: KL of centred normals.

    C = L^-1 K is lower triangular with C C^T similar to M, so that nothing cancels: 1/2 sum_i [c_ii^2 - 1 - log c_ii^2]
    + 1/2 sum_{i > j} c_ij^2.

    factor: L with P = L L^T, (..., d, d). goal: K with Q = K K^T, (..., d, d).
    """
    both = torch.linalg.solve_triangular(factor, goal, upper=False).tril(-1)
    start, end = (each.diagonal(dim1=-2, dim2=-1) for each in (factor, goal))
    gaps = ratio_gap(end.square(), start.square(), (end - start) * (end + start))
    return 0.5 * (gaps.sum(-1) + both.square().sum((-2, -1)))


def half_log_det(factor: Tensor) -> Tensor:
    """1/2 log det(L L^T)."""
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def inverse_from(factor: Tensor) -> Tensor:
    """(L L^T)^-1 for L (..., d, d). The forward derivative of torch.cholesky_inverse is wrong (torch 2.13)."""
    if factor.shape[-1] <= SMALL:
        half = invert_or_nan(factor)
    else:
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        half = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return half.mT @ half
