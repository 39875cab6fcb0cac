"""What a unit has of several tensors as one row: a row of one matrix with a column of the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitLayout:
    """Several tensors as one matrix (1, units, columns): row j holds slice j of each, along its own dimension.

    Args:
        names: Of the tensors.
        dims: The dimension of each tensor that counts the units.
        shapes: Of the tensors.

    Raises:
        ValueError: If the tensors have unlike numbers of units.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        counts = {name: shape[dim] for name, dim, shape in zip(self.names, self.dims, self.shapes, strict=True)}
        if len(set(counts.values())) > 1:
            raise ValueError(f"units has {counts} along the given dimensions, expected one number of units")

    @property
    def _sides(self) -> list[tuple[int, tuple[int, ...]]]:
        return list(zip(self.dims, self.shapes, strict=True))

    @cached_property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(1, units, columns)."""
        units = self.shapes[0][self.dims[0]]
        numbers = sum(torch.Size(shape).numel() for shape in self.shapes)
        return 1, units, numbers // max(units, 1)

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The matrix, shape (1, units, columns).

        Args:
            tensors: By name, in their own shapes.
        """
        units = self.matrix_shape[1]
        dims = zip(self.names, self.dims, strict=True)
        return torch.cat([tensors[name].movedim(dim, 0).reshape(units, -1) for name, dim in dims], 1).unsqueeze(0)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """The tensors by name, in their own shapes.

        Args:
            matrix: Shape (1, units, columns).
        """
        moved = [torch.Size((shape[dim], *shape[:dim], *shape[dim + 1 :])) for dim, shape in self._sides]
        parts = matrix[0].split([size[1:].numel() for size in moved], dim=1)
        return {
            name: part.reshape(size).movedim(0, dim)
            for name, part, size, dim in zip(self.names, parts, moved, self.dims, strict=True)
        }
