"""A layer's parameters as one matrix: joined from the modules' tensors, and split into them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """A layer's parameters as one matrix per group, (groups, outputs, inputs [+ 1]): the bias is the last column.

    Args:
        weight: The weight's name; None where the layer has none or it is not trained.
        bias: The bias's name; None likewise.
        groups: The number of groups, each with a matrix of its own.
        outputs: Of one group.
        inputs: Of one group, without the bias; 0 without a weight.
        shape: Of the weight as the module stores it.
        bias_shape: Of the bias as the module stores it.
        transposed: True if the weight is stored as (groups * channels, outputs, ...), as in transposed convolutions,
            where each group has so many input channels. Then `inputs` = channels * taps.
    """

    weight: str | None
    bias: str | None
    groups: int
    outputs: int
    inputs: int
    shape: tuple[int, ...] = ()
    bias_shape: tuple[int, ...] = (-1,)
    transposed: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, weight first."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(groups, outputs, columns)."""
        return self.groups, self.outputs, self.inputs + (self.bias is not None)

    @property
    def is_stored(self) -> bool:
        """True if the weight is stored as the matrix itself: one group, (outputs, inputs)."""
        return self.groups == 1 and not self.transposed and self.shape in ((), (self.outputs, self.inputs))

    @cached_property
    def places(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] | None:
        """Sizes, strides and offset of each tensor in the memory of its matrix; None where `split` copies."""
        if self.transposed and self.groups > 1:
            return None
        parts = self.split(torch.empty(self.matrix_shape, device="meta"))
        return {name: (tuple(p.shape), p.stride(), int(p.storage_offset())) for name, p in parts.items()}

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The layer's matrix, shape (groups, outputs, columns).

        Args:
            tensors: The layer's tensors by name, in the modules' shapes.
        """
        parts = []
        if self.weight is not None:
            parts.append(self._matrix(tensors[self.weight]))
        if self.bias is not None:
            parts.append(tensors[self.bias].reshape(self.groups, self.outputs, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """The layer's tensors by name, in the modules' shapes.

        Args:
            matrix: Shape (groups, outputs, columns).
        """
        parts = {}
        if self.weight is not None:
            parts[self.weight] = self._store_matrix(matrix[..., : self.inputs])
        if self.bias is not None:
            parts[self.bias] = matrix[..., -1].reshape(self.bias_shape)
        return parts

    def _matrix(self, weight: Tensor) -> Tensor:
        if not self.transposed:
            return weight.reshape(self.groups, self.outputs, self.inputs)
        channels = self.shape[0] // self.groups
        return weight.reshape(self.groups, channels, self.outputs, -1).transpose(1, 2).flatten(2)

    def _store_matrix(self, matrix: Tensor) -> Tensor:
        if self.transposed:
            channels = self.shape[0] // self.groups
            matrix = matrix.reshape(self.groups, self.outputs, channels, -1).transpose(1, 2)
        return matrix.reshape(self.shape)
