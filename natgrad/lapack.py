"""Inverse, solution, Cholesky factor and eigenvectors that do not depend on what LAPACK does with a bad matrix.

For a singular matrix it raises on one processor and returns inf on another, for NaN too. Here both are NaN, for that
matrix of a batch alone (`..._or_nan`: for trials), or a ValueError that the caller words (`require_...`: for what a
user gave). Nothing else in natgrad calls `torch.linalg.inv`, `solve`, `cholesky`, `eigh` and the like.
"""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.typed_torch import torch_linalg


def invert_or_nan(matrix: Tensor) -> Tensor:
    """A^-1 for (..., n, n); NaN throughout for each matrix of the batch that has none, or is not finite.

    With gradients, and within torch.func. `torch.linalg.inv` raises for a singular matrix on one processor and returns
    inf on another; so do `solve` and `cholesky`.
    """
    found, info = torch_linalg.inv_ex(matrix)
    sound = (info == 0) & _finite(matrix) & _finite(found)
    return torch.where(sound[..., None, None], found, torch.nan)


def solve_or_nan(matrix: Tensor, rhs: Tensor, *, left: bool = True) -> Tensor:
    """A^-1 B for (..., n, n) and B (..., n, k) or (n,), or B A^-1; NaN where A is singular or not finite.

    A solution that overflows is NaN, that vector alone. With gradients, and within torch.func; but vmap of the forward
    derivative of torch.linalg.solve is wrong (torch 2.13).
    """
    if rhs.dim() == 1:
        return solve_or_nan(matrix, rhs.unsqueeze(-1)).squeeze(-1)
    rhs = rhs[(None,) * (matrix.dim() - rhs.dim())]  # torch reads (b, n) beside (b, n, n) as one vector per matrix
    found, info = torch_linalg.solve_ex(matrix, rhs, left=left)
    sound = ((info == 0) & _finite(matrix))[..., None, None]
    whole = torch.isfinite(found.detach()).all(-2 if left else -1, keepdim=True)
    return torch.where(sound & whole, found, torch.nan)


def factor_or_nan(matrix: Tensor) -> Tensor:
    """L (..., n, n) with L L^T = A, read from A's lower triangle; NaN throughout where A is not positive definite.

    A pivot L_ii^2 that is round-off of A_ii is none: that of torch.ones(2, 2), which is singular, comes out as 0 or as
    eps, depending on the processor. With gradients, and within torch.func. No jitter: see `cholesky` for the ladder.
    """
    found, sound = _factor(matrix)
    return torch.where(sound[..., None, None], found, torch.nan)


def invert_factor_or_nan(matrix: Tensor) -> Tensor:
    """L^-1 (..., n, n) for A = L L^T, so that A^-1 = L^-T L^-1; NaN throughout where A is not positive definite."""
    lower = factor_or_nan(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch_linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)


def resolvent(matrix: Tensor, shift: float) -> Tensor:
    """(A + shift I)^-1 for positive semi-definite A (..., n, n), by one Cholesky factor; nothing is checked."""
    shifted = matrix.clone(memory_format=torch.contiguous_format)
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
    if not shifted.is_cpu:
        return torch.cholesky_inverse(torch_linalg.cholesky_ex(shifted).L)
    # the transpose, which is the same matrix, has the order of columns that LAPACK writes: no further copies
    info = torch.empty(matrix.shape[:-2], dtype=torch.int32)
    lower, _ = torch_linalg.cholesky_ex(shifted.mT, out=(shifted.mT, info))
    return torch.cholesky_inverse(lower, out=lower)


def is_positive_definite(matrix: Tensor) -> Tensor:
    """Which symmetric matrices have the factor of `factor_or_nan`, (..., n, n) -> (...)."""
    return _factor(matrix.detach())[1]


def _factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    found, info = torch_linalg.cholesky_ex(matrix)
    pivots = found.detach().diagonal(dim1=-2, dim2=-1).square()
    roundoff = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * matrix.detach().diagonal(dim1=-2, dim2=-1)
    return found, (info == 0) & ((pivots > roundoff) & (pivots < torch.inf)).all(-1)


def require_inverse(matrix: Tensor, message: str) -> Tensor:
    """`invert_or_nan`. ValueError(message) where that is not finite; within torch.func it stays NaN."""
    return _require(invert_or_nan(matrix), message)


def require_solution(matrix: Tensor, rhs: Tensor, message: str) -> Tensor:
    """`solve_or_nan`. ValueError(message) where that is not finite and rhs is; within torch.func it stays NaN."""
    found = solve_or_nan(matrix, rhs)
    return found if is_concrete(rhs) and not all_finite(rhs.detach()) else _require(found, message)


def require_factor(matrix: Tensor, message: str) -> Tensor:
    """`factor_or_nan`. ValueError(message) where that is not finite; within torch.func it stays NaN."""
    return _require(factor_or_nan(matrix), message)


def _require(found: Tensor, message: str) -> Tensor:
    if is_concrete(found) and not all_finite(found.detach()):
        raise ValueError(message)
    return found


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (..., n), ascending, and eigenvectors (..., n, n) of symmetric matrices; in float64 if LAPACK fails.

    It may fail without a word: eigenvectors of a finite matrix (785, 785) of rank 16 came out as NaN in float32.
    NaN throughout for a matrix that is not finite, for that one of a batch. Half precision is computed in float32.
    """
    if matrix.dtype != widen_dtype(matrix.dtype):
        values, vectors = eigh(matrix.float())
        return values.to(matrix.dtype), vectors.to(matrix.dtype)
    if is_concrete(matrix) and all_finite(matrix.detach()):
        return _decompose(matrix)
    fine = _finite(matrix)[..., None]
    values, vectors = _decompose(torch.where(fine.unsqueeze(-1), matrix, 0.0))
    return torch.where(fine, values, torch.nan), torch.where(fine.unsqueeze(-1), vectors, torch.nan)


def _decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return _try_decomposing(matrix, matrix) or _try_decomposing(matrix.double(), matrix) or _decompose_each(matrix)


def _try_decomposing(matrix: Tensor, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues and eigenvectors in the dtype of `like`; None where LAPACK gives up, or gives NaN."""
    try:
        values, vectors = torch_linalg.eigh(matrix)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        return None
    if is_concrete(vectors) and not all_finite(vectors.detach()):
        return None
    return values.to(like.dtype), vectors.to(like.dtype)


def _decompose_each(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A batch one by one, and NaN for a matrix that LAPACK decomposes in no dtype."""
    if matrix.dim() == 2:
        return torch.full_like(matrix[0], torch.nan), torch.full_like(matrix, torch.nan)
    pairs = [_decompose(block) for block in matrix.flatten(0, -3)]
    values, vectors = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return values.view(matrix.shape[:-1]), vectors.view(matrix.shape)


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (n, r), sizes (r,) and V^T (r, k) with A = U diag(sizes) V^T, r = min(n, k).

    In float64 if LAPACK fails, NaN if it fails there too or A (n, k) is not finite.
    """
    for dtype in (matrix.dtype, torch.float64) if all_finite(matrix) else ():
        try:
            left, sizes, right = torch_linalg.svd(matrix.to(dtype), full_matrices=False)
        except RuntimeError:
            continue
        if all_finite(left):
            return left.to(matrix.dtype), sizes.to(matrix.dtype), right.to(matrix.dtype)
    (n, k), r = matrix.shape, min(matrix.shape)
    lost = matrix.new_full((n + k + 1, r), torch.nan)
    return lost[:n], lost[n], lost[n + 1 :].mT


def fit_or_nan(matrix: Tensor, rhs: Tensor) -> Tensor:
    """argmin |A X - B| of least norm, for A (..., n, k) and B (..., n, m); NaN where either is not finite."""
    fine = (_finite(matrix) & _finite(rhs))[..., None, None]
    found = torch_linalg.lstsq(torch.where(fine, matrix, 0.0), torch.where(fine, rhs, 0.0)).solution
    return torch.where(fine, found, torch.nan)


def is_concrete(value: Tensor) -> bool:
    """Whether the numbers are there to look at: not within a transform of torch.func."""
    return torch.func.debug_unwrap(value) is value


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite.

    A sum shows that in one pass; `isfinite` takes four and costs 25 times as much (14.7 ms against .6 for 2.8 million
    entries). Only where the sum itself overflows are the entries looked at.
    """
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _finite(matrix: Tensor) -> Tensor:
    """Which matrices have finite entries only, (..., n, k) -> (...)."""
    return (matrix.detach() * 0).sum((-2, -1)) == 0  # inf and NaN times 0 are NaN; isfinite takes twice as long


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to factorise in: float32 for half precision, which LAPACK does not have."""
    return torch.promote_types(dtype, torch.float32)
