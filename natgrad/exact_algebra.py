"""Norms, determinants and solutions of linear systems by operations whose derivatives of every order are right.

In torch 2.13 two nested forward derivatives of `det`, `slogdet`, `logdet`, `linalg.solve` and `cholesky_inverse` are
wrong by up to their own size, and nothing says so, and so are those of `linalg.lu_solve` under `torch.func.vmap`; those
of `linalg.inv` and of the pivots of `linalg.lu_factor` are right. Norms under two of them and then a backward pass end
in an error.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from natgrad.lapack import invert_or_nan
from natgrad.typed_torch import torch_linalg, torch_plain, torch_returns


def measure_length(x: Tensor, dim: Any = None, *, keepdim: bool = False, order: float = 2) -> Tensor:
    """(sum |x|^p)^(1/p) along axes, with derivatives of zero where it is zero, as torch has them.

    x: Any shape, real or complex.
    """
    squares = x.real.square() + x.imag.square() if x.is_complex() else x.square()
    powers = squares if order == 2 else x.abs().pow(order)
    total = powers.sum(dim=tuple(range(x.dim())) if dim is None else dim, keepdim=keepdim)
    zero = total == 0
    size = torch.where(zero, torch.ones_like(total), total)
    return (size.sqrt() if order == 2 else size.pow(1 / order)) * (~zero).to(total.dtype)


def is_written(order: Any) -> bool:
    """Whether a norm of this order is written out here."""
    return isinstance(order, (int, float)) and 1 <= order < math.inf


def vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> Tensor:
    """`torch.linalg.vector_norm`."""
    if not is_written(ord) or out is not None:
        return torch_linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype, out=out)
    return measure_length(x if dtype is None else x.to(dtype), dim, keepdim=keepdim, order=ord)


def linalg_norm(
    A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, out: Any = None, dtype: Any = None
) -> Tensor:
    """`torch.linalg.norm`."""
    single = isinstance(dim, int) or (dim is None and A.dim() == 1)
    if out is None and (ord is None or single):
        return vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
    return torch_linalg.norm(A, ord, dim, keepdim, out=out, dtype=dtype)


def norm(
    input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Tensor:
    """`torch.norm` and `torch.Tensor.norm`."""
    order = 2 if p in (None, "fro") else p
    if out is not None or not is_written(order):
        return torch_plain.norm(input, p, dim, keepdim, out, dtype)
    return vector_norm(input, order, dim, keepdim, dtype=dtype)


def normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Tensor:
    """`torch.nn.functional.normalize`."""
    if out is not None or not is_written(p):
        return torch.nn.functional.normalize(input, p, dim, eps, out)
    return input / measure_length(input, dim, keepdim=True, order=p).clamp(min=eps)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """`torch.nn.functional.cosine_similarity`."""
    left: Tensor
    right: Tensor
    left, right = torch_plain.broadcast_tensors(x1, x2)
    first, second = (measure_length(one, dim, keepdim=True).clamp(min=eps) for one in (left, right))
    return (left / first * (right / second)).sum(dim)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """`torch.nn.functional.glu`, which has no second forward derivative."""
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


def factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The pivots of Gaussian elimination, shape (..., n), and the sign of the rows' exchanges, shape (...)."""
    factors, places, _ = torch_linalg.lu_factor_ex(matrix)
    own = torch.arange(1, matrix.shape[-1] + 1, device=matrix.device)
    turns = (places != own).sum(-1) % 2
    return factors.diagonal(dim1=-2, dim2=-1), 1 - 2 * turns


def det(A: Tensor) -> Tensor:
    """`torch.linalg.det`."""
    pivots, sign = factor(A)
    return sign * pivots.prod(-1)


def slogdet(A: Tensor) -> Any:
    """`torch.linalg.slogdet`."""
    pivots, sign = factor(A)
    size = pivots.abs()
    signs = pivots / size if pivots.is_complex() else pivots.detach().sign()
    return torch_returns.linalg_slogdet((sign * signs.prod(-1), size.log().sum(-1)))


def logdet(input: Tensor) -> Tensor:
    """`torch.logdet`: NaN where the determinant is negative."""
    sign, log = slogdet(input)
    if sign.is_complex():
        return log + sign.log()
    return torch.where(sign < 0, torch.nan, log)


def solve(A: Tensor, B: Tensor, *, left: bool = True, out: Any = None) -> Tensor:
    """`torch.linalg.solve`, by the inverse; NaN where A is singular."""
    inverse = invert_or_nan(A)
    if B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1]):
        found = (inverse @ B.unsqueeze(-1)).squeeze(-1)
    else:
        found = inverse @ B if left else B @ inverse
    return found if out is None else out.resize_(found.shape).copy_(found)


def cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:
    """`torch.cholesky_inverse`."""
    eye = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device).expand_as(input)
    half = torch_linalg.solve_triangular(input.triu() if upper else input.tril(), eye, upper=upper)
    return half @ half.mH if upper else half.mH @ half


EXACT: dict[Any, Any] = {
    torch_plain.norm: norm,
    torch_plain.Tensor.norm: norm,
    torch_linalg.norm: linalg_norm,
    torch_linalg.vector_norm: vector_norm,
    torch.nn.functional.normalize: normalize,
    torch.nn.functional.cosine_similarity: cosine_similarity,
    torch.cosine_similarity: cosine_similarity,
    torch.nn.functional.glu: glu,
    torch.det: det,
    Tensor.det: det,
    torch_linalg.det: det,
    torch.slogdet: slogdet,
    Tensor.slogdet: slogdet,
    torch_linalg.slogdet: slogdet,
    torch.logdet: logdet,
    Tensor.logdet: logdet,
    torch_linalg.solve: solve,
    torch.cholesky_inverse: cholesky_inverse,
    Tensor.cholesky_inverse: cholesky_inverse,
}
"""What torch calls -> what is called in its place where derivatives of higher order are taken."""
