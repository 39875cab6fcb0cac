"""Calls of torch whose types torch leaves out, with their types: below it nothing is of unknown type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import islice
from typing import Any, ParamSpec, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
T = TypeVar("T")

torch_linalg: Any = torch.linalg
"""torch.linalg, of which torch declares no types."""
torch_plain: Any = torch
"""torch itself, for its functions of partly unknown types."""
torch_returns: Any = torch.return_types
"""torch.return_types, of which torch declares some alone."""
torch_distributed: Any = distributed
"""torch.distributed, of whose collectives torch declares no types."""


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """True for a mapping, whose keys are then taken for strings."""
    return isinstance(value, Mapping)


def list_numbers(x: Tensor) -> list[Any]:
    """The entries as numbers, in lists as deep as the tensor."""
    return cast("Any", x).tolist()


def read_scalars(scalars: Iterable[Tensor]) -> list[float]:
    """Scalar tensors, which may lie apart, as numbers: by one read of the device."""
    known = list(scalars)
    if len({(scalar.dtype, scalar.device) for scalar in known}) > 1:
        known = [scalar.to(known[0].device, torch.float64) for scalar in known]
    return list_numbers(torch.stack(known)) if known else []


def read_tensors(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The entries of each tensor, wherever it lies, as a flat list: all by one read of the device."""
    flat = [t.reshape(-1) for t in tensors]
    if len({(t.dtype, t.device) for t in flat}) > 1:
        flat = [t.to(flat[0].device, torch.float64) for t in flat]
    numbers = iter(list_numbers(torch.cat(flat)) if flat else [])
    return [list(islice(numbers, len(t))) for t in flat]


def hook_gradient(x: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Call the hook with the tensor's gradient once it is there."""
    return cast("Any", x).register_hook(hook)


def keep_uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which compiled code calls as it is written."""
    return cast("Any", torch.compiler).disable(function)


def call_uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which compiled code calls as it is written: traced, a loss took minutes and warned from within.

    The compiler is loaded at the first such call alone.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        plain = keep_uncompiled(function) if torch.compiler.is_compiling() else function
        return plain(*args, **kwargs)

    return call


def measure_norm(
    x: Tensor, dim: int | tuple[int, ...] | None = None, *, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """|x|, the Euclidean norm: a scalar tensor, or one along `dim`."""
    return torch_linalg.vector_norm(x, dim=dim, keepdim=keepdim, dtype=dtype)


def measure_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norms of many tensors, scalar tensors: by one call."""
    return list(torch_plain._foreach_norm(tensors)) if tensors else []


Map = Callable[[Tensor], Tensor]
"""A function of a tensor, such as v -> G v."""


def as_tensor_like(value: object, like: Tensor) -> Tensor:
    """A number, sequence or tensor in the dtype and on the device of another tensor.

    `torch.as_tensor(.1).to(like)` would round the number to float32 on its way to float64.
    """
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def split_tensor(x: Tensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """The tensor in parts of these sizes along `dim`: views."""
    return cast("Any", x).split(sizes if isinstance(sizes, int) else list(sizes), dim=dim)


def join_diagonally(blocks: Iterable[Tensor]) -> Tensor:
    """diag(B_1, ..., B_k) of matrices, zeros elsewhere."""
    return torch_plain.block_diag(*blocks)
