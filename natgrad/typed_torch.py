"""Calls of torch whose types torch leaves out, with their types: below it nothing is of unknown type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

torch_linalg: Any = torch.linalg
"""torch.linalg, of which torch declares no types."""


def measure_norm(
    x: Tensor, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """|x|, the Euclidean norm: a scalar tensor, or one along `dim`.

    Args:
        x: Any shape.
        dim: What is summed over; None: everything.
        keepdim: Whether `dim` stays, with size 1.
        dtype: To measure in; None: that of x.
    """
    return torch_linalg.vector_norm(x, dim=dim, keepdim=keepdim, dtype=dtype)


def split_tensor(x: Tensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """The tensor in parts of these sizes along `dim`: views.

    Args:
        x: Any shape.
        sizes: Of the parts, or of all of them (the last may be shorter).
        dim: Along which.
    """
    cut: Callable[..., tuple[Tensor, ...]] = getattr(x, "split")  # noqa: B009 (torch's own signature is not complete)
    return cut(sizes if isinstance(sizes, int) else list(sizes), dim=dim)


def join_diagonally(blocks: Iterable[Tensor]) -> Tensor:
    """diag(B_1, ..., B_k) of matrices, zeros elsewhere.

    Args:
        blocks: Matrices, or a tensor of them along its first dimension.
    """
    join: Callable[..., Tensor] = getattr(torch, "block_diag")  # noqa: B009
    return join(*blocks)
