"""Dimensions that are too large for one factor, cut into equal pieces: a factor becomes block-diagonal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LONG, SLENDER, NARROW = 2048, 10, 256
"""Rows, and times the other factor's, above which blocks of a factor have at most the last number of rows."""


@dataclass(frozen=True)
class Room:
    """How much memory one factor may take.

    Args:
        largest: Rows of a block, >= 1.
        budget: Bytes of all its blocks, >= 1024.

    Raises:
        ValueError: For smaller numbers, or numbers that are no integers.
    """

    largest: int
    budget: int

    def __post_init__(self) -> None:
        for name, least, unit in (("largest", 1, "rows"), ("budget", 2**10, "bytes")):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}, expected a number of {unit}, an integer >= {least}")

    def pieces(self, size: int, itemsize: int, other: int) -> int:
        """How many blocks, as few as fit: k blocks of n / k rows take n^2 / k numbers. n of them are a diagonal.

        The inverse of a factor takes n^3 operations, and a pass of its layer n m for each row of a batch: of a factor
        that is long and much longer than m, as that of a head of 4000 words on 64 features, only narrow blocks cost
        less than the pass.

        Args:
            size: n, the factor's rows.
            itemsize: Bytes of one number.
            other: m, the rows of the layer's other factor.
        """
        most = min(self.largest, NARROW) if size > max(LONG, SLENDER * other) else self.largest
        fitting = max(math.ceil(size / most), math.ceil(size * size * itemsize / self.budget))
        each = math.ceil(size / min(max(fitting, 1), max(size, 1)))
        return math.ceil(size / max(each, 1))


def cut(tensor: Tensor, pieces: int) -> Tensor:
    """(b, t, 1, n) -> (b, t, k, s) with k s >= n, the last piece filled up with zeros."""
    size = tensor.shape[-1]
    each = math.ceil(size / pieces)
    return functional.pad(tensor, (0, each * pieces - size)).unflatten(-1, (pieces, each)).squeeze(2)


def diagonal_like(diagonal: Tensor, factor: Tensor) -> Tensor:
    """diag(n) in the shape of a factor (n, n), or of its blocks (..., s, s)."""
    filled = functional.pad(diagonal, (0, factor.shape[:-1].numel() - len(diagonal)))
    return torch.diag_embed(filled.view(factor.shape[:-1]))
