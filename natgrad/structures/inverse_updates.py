"""A running average of a metric, or its inverse, when U U^T joins: functions of tensors, batched over leading axes.

Everywhere G (..., n, n), U (..., n, r), and G <- (1 - rate) G + rate U U^T (Karakida, Okada & Amari 2016, eq. 3).
"""

from __future__ import annotations

import torch
from torch import Tensor


def average_metric(matrix: Tensor, root: Tensor, rate: float, *, out: Tensor | None = None) -> Tensor:
    """Eq. 3 itself: (1 - rate) G + rate U U^T, in O(n^2 r).

    Args:
        matrix: G, shape (..., n, n).
        root: U, shape (..., n, r).
        rate: Weight of U U^T, in (0, 1).
        out: Where to write; `matrix` itself for an update in place. Default: a new tensor.
    """
    return _plus_outer(matrix, root, 1 - rate, rate, out)


def adapt_inverse(
    inverse: Tensor, root: Tensor, rate: float, *, image: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Eq. 4: G^-1 after the update, to first order in rate: (1 + rate) G^-1 - rate (G^-1 U)(G^-1 U)^T, in O(n^2 r).

    Positive definite exactly where `stays_positive` is true.

    Args:
        inverse: G^-1, shape (..., n, n).
        root: U, shape (..., n, r).
        rate: Weight of U U^T, in (0, 1).
        image: G^-1 U, shape (..., n, r), where it is known.
        out: As for `average_metric`.
    """
    image = inverse @ root if image is None else image
    return _plus_outer(inverse, image, 1 + rate, -rate, out)


def stays_positive(inverse: Tensor, root: Tensor, rate: float, *, image: Tensor | None = None) -> Tensor:
    """True where eq. 4 leaves G^-1 positive definite: rate * lambda_max(U^T G^-1 U) < 1 + rate, shape (...,).

    By a Cholesky factorisation of (1 + rate) I - rate U^T G^-1 U, (r, r), which exists on the same condition.
    False where anything is not finite.

    Args:
        inverse: G^-1, shape (..., n, n).
        root: U, shape (..., n, r).
        rate: Weight of U U^T, in (0, 1).
        image: G^-1 U, shape (..., n, r), where it is known.
    """
    gram = root.mT @ (inverse @ root if image is None else image)
    found = torch.linalg.cholesky_ex(_shift(-rate * gram, 1 + rate))
    return (found.info == 0) & torch.isfinite(found.L.diagonal(dim1=-2, dim2=-1)).all(-1)


def woodbury_inverse(
    inverse: Tensor, root: Tensor, rate: float, *, image: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """G^-1 after the update, exactly: [G^-1 - G^-1 U ((1 - rate) / rate I + U^T G^-1 U)^-1 U^T G^-1] / (1 - rate).

    O(n^2 r + r^3). Always positive definite. Not finite where the (r, r) matrix cannot be factorised.

    Args:
        inverse: G^-1, shape (..., n, n).
        root: U, shape (..., n, r).
        rate: Weight of U U^T, in (0, 1).
        image: G^-1 U, shape (..., n, r), where it is known.
        out: As for `average_metric`.
    """
    image = inverse @ root if image is None else image
    small = torch.linalg.cholesky_ex(_shift(root.mT @ image, (1 - rate) / rate))
    lower = torch.where((small.info == 0)[..., None, None] & torch.isfinite(small.L), small.L, torch.nan)
    half = torch.linalg.solve_triangular(lower.mT, image, upper=True, left=False)  # G^-1 U L^-T
    return _plus_outer(inverse, half, 1 / (1 - rate), -1 / (1 - rate), out)


def compress_root(root: Tensor) -> Tensor:
    """A root of the same U U^T with at most n columns: R^T of U^T = Q R, in O(n^2 r)."""
    return root if root.shape[-1] <= root.shape[-2] else torch.linalg.qr(root.mT, mode="r").R.mT


def _plus_outer(matrix: Tensor, factor: Tensor, keep: float, weight: float, out: Tensor | None) -> Tensor:
    """keep A + weight F F^T. One pass over A; in place that is all the memory that moves."""
    if matrix.dim() == 2:
        return torch.addmm(matrix, factor, factor.mT, beta=keep, alpha=weight, out=out)
    shape, n = matrix.shape, matrix.shape[-1]
    flat, columns = matrix.reshape(-1, n, n), factor.reshape(-1, n, factor.shape[-1])
    target = None if out is None else out.view(-1, n, n)
    return torch.baddbmm(flat, columns, columns.mT, beta=keep, alpha=weight, out=target).view(shape)


def _shift(matrix: Tensor, shift: float) -> Tensor:
    """A + shift I for (..., r, r), in place."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift)
    return matrix
