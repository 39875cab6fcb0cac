"""Tensors of one shape as one, with a leading axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as (k, ...): without a copy where they lie one behind the other, as `unbind` left them."""
    first, last = tensors[0], tensors[-1]
    if first is last:
        return first.unsqueeze(0)
    size, start = first.numel() * first.itemsize, first.data_ptr()
    places = list(range(start, start + len(tensors) * size, size)) if size else []
    if (
        [t.data_ptr() for t in tensors] == places
        and all(t.is_contiguous() for t in tensors)
        and first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()  # and so all between them
    ):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(tensors))
