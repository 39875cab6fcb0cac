"""Processors that differ in what their LAPACK does with a matrix that has no inverse: it raises, or it returns inf.

`pretend(kind, monkeypatch)` replaces what torch.linalg offers. Which matrices are bad is judged by singular values, the
same for both kinds; what comes out for good ones stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

KINDS = ("raises", "returns inf")
REAL = {name: getattr(torch.linalg, name) for name in ("inv_ex", "solve_ex", "cholesky_ex", "eigh", "svdvals")}
both_processors = pytest.mark.parametrize("kind", KINDS)


def pretend(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, torch.linalg is that of a processor of this kind, plain functions and `_ex` ones alike."""
    for name in ("inv", "solve", "cholesky"):
        real = REAL[f"{name}_ex"]
        monkeypatch.setattr(torch.linalg, name, _plain(kind, real))
        monkeypatch.setattr(torch.linalg, f"{name}_ex", _wrap_kind(kind, real))
    monkeypatch.setattr(torch.linalg, "eigh", _decomposing(kind))
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda matrix, **options: _decomposing(kind)(matrix, **options)[0])


def bad(matrix: Tensor) -> Tensor:
    """Which matrices (..., n, n) are singular to working precision, not finite, or have an inverse that overflows."""
    if not matrix.numel():
        return torch.zeros(matrix.shape[:-2], dtype=torch.bool)
    finite = torch.isfinite(matrix).all(-1).all(-1)
    sizes = REAL["svdvals"](torch.where(finite[..., None, None], matrix, 0.0))
    info = torch.finfo(matrix.dtype)
    return ~finite | (sizes[..., -1] <= matrix.shape[-1] * info.eps * sizes[..., 0]) | (sizes[..., -1] < 1 / info.max)


def _visible(value: Tensor) -> bool:
    return torch.func.debug_unwrap(value) is value


def _wrap_kind(kind: str, real: Callable) -> Callable:
    def call(matrix: Tensor, *others: Any, **options: Any) -> Any:
        found, info = real(matrix, *others, **options)
        if not _visible(found) or not bool((wrong := _wrong(real, matrix)).any()):
            return _Pair(found, info)
        spread = wrong[..., None, None] if found.dim() >= wrong.dim() + 2 else wrong[..., None]
        if kind == "raises":  # what stands there is no answer: something that looks like one
            return _Pair(torch.where(spread, 1.0, found), torch.where(wrong, 1, info))
        return _Pair(torch.where(spread, torch.inf, found), torch.where(wrong, 0, info))

    return call


def _wrong(real: Callable, matrix: Tensor) -> Tensor:
    wrong = bad(matrix.detach())
    return wrong | (real(matrix.detach()).info != 0) if real is REAL["cholesky_ex"] else wrong


def _plain(kind: str, real: Callable) -> Callable:
    def call(matrix: Tensor, *others: Any, **options: Any) -> Tensor:
        if kind == "raises" and _visible(matrix) and bool(_wrong(real, matrix).any()):
            raise torch.linalg.LinAlgError("a raw message of LAPACK")
        return _wrap_kind(kind, real)(matrix, *others, **options)[0]

    return call


def _decomposing(kind: str) -> Callable:
    def call(matrix: Tensor, **options: Any) -> Any:
        if kind == "raises" and _visible(matrix) and not bool(torch.isfinite(matrix).all()):
            raise torch.linalg.LinAlgError("a raw message of LAPACK")
        return REAL["eigh"](matrix, **options)

    return call


class _Pair(tuple):
    """What the `_ex` functions return: a result and its info, by name too."""

    def __new__(cls, *parts: Tensor) -> _Pair:
        return super().__new__(cls, parts)

    L = inverse = result = property(lambda self: self[0])
    info = property(lambda self: self[1])
