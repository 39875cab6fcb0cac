"""Layers as matrices: a metric made of one operator per layer, over parameters that lie anywhere in the vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.operators.base import Operator
from natgrad.spaces import Space


@dataclass(frozen=True)
class Layout:
    """A layer's parameters as one matrix per group, (groups, outputs, inputs [+ 1]): the bias is the last column.

    weight, bias: names, None where the layer has none or it is not trained; inputs is 0 without a weight.
    transposed: the weight is stored (groups * inputs' channels, outputs, ...), as in transposed convolutions; then
    `inputs` = channels * taps.   shape, bias_shape: of weight and bias as the module stores them.
    """

    weight: str | None
    bias: str | None
    groups: int
    outputs: int
    inputs: int
    shape: tuple[int, ...] = ()
    bias_shape: tuple[int, ...] = (-1,)
    transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, weight first."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """(groups, outputs, columns)."""
        return self.groups, self.outputs, self.inputs + (self.bias is not None)

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The layer's tensors, by name -> (groups, outputs, columns)."""
        parts = []
        if self.weight is not None:
            parts.append(self._matrix(tensors[self.weight]))
        if self.bias is not None:
            parts.append(tensors[self.bias].reshape(self.groups, self.outputs, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """(groups, outputs, columns) -> the layer's tensors by name, in the modules' shapes."""
        found = {}
        if self.weight is not None:
            found[self.weight] = self._stored(matrix[..., : self.inputs])
        if self.bias is not None:
            found[self.bias] = matrix[..., -1].reshape(self.bias_shape)
        return found

    def _matrix(self, weight: Tensor) -> Tensor:
        if not self.transposed:
            return weight.reshape(self.groups, self.outputs, self.inputs)
        channels = self.shape[0] // self.groups
        return weight.reshape(self.groups, channels, self.outputs, -1).transpose(1, 2).flatten(2)

    def _stored(self, matrix: Tensor) -> Tensor:
        if self.transposed:
            channels = self.shape[0] // self.groups
            matrix = matrix.reshape(self.groups, self.outputs, channels, -1).transpose(1, 2)
        return matrix.reshape(self.shape)


class Arranged(Operator):
    """One operator per layer, in the coordinates of a space of parameters.

    space: the parameters.   parts: (layout, operator on the layer's matrix flattened row-major), together covering
    every name of the space exactly once. ValueError if they do not, or if an operator's size is not its layout's.
    """

    def __init__(self, space: Space, parts: Sequence[tuple[Layout, Operator]]) -> None:
        covered = [name for layout, _ in parts for name in layout.names]
        if sorted(covered) != sorted(space):
            raise ValueError(f"parts cover {sorted(covered)}, expected each of {sorted(space)} once")
        for layout, operator in parts:
            if operator.size != torch.Size(layout.matrix_shape).numel():
                raise ValueError(f"the operator of {layout.names} is {operator!r}, expected size {layout.matrix_shape}")
        self.space, self.parts = space, tuple(parts)
        self.size, self.dtype, self.device = space.size, space.dtype, space.device
        self.inherit(*(operator for _, operator in parts))

    def mv(self, vector: Tensor) -> Tensor:
        # views in the space's own dtype: a parameter in half precision must not round the product
        views = {name: vector[b.start : b.stop].reshape(b.shape) for name, b in self.space.blocks.items()}
        found: dict[str, Tensor] = {}
        for layout, operator in self.parts:
            found |= layout.split(operator.mv(layout.join(views).reshape(-1)).reshape(layout.matrix_shape))
        return self.space.flatten(found)

    def root(self) -> Tensor | None:
        roots = [operator.root() for _, operator in self.parts]
        known = [root for root in roots if root is not None]
        if len(known) < len(roots):
            return None
        found = torch.zeros(self.size, sum(root.shape[1] for root in known), dtype=self.dtype, device=self.device)
        stop = 0
        for place, root in zip(self._places(), known, strict=True):
            start, stop = stop, stop + root.shape[1]
            found[place, start:stop] = root
        return found

    @property
    def closed_form(self) -> bool:
        return all(operator.closed_form for _, operator in self.parts)

    def inverse(self, damping: float = 0.0) -> Arranged | None:
        inverses = [(layout, operator.inverse(damping)) for layout, operator in self.parts]
        known = [(layout, inverse) for layout, inverse in inverses if inverse is not None]
        return self._with(known) if len(known) == len(inverses) else None

    def diagonal(self) -> Tensor:
        found = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for place, (_, operator) in zip(self._places(), self.parts, strict=True):
            found[place] = operator.diagonal()
        return found

    def trace(self) -> Tensor:
        return torch.stack([operator.trace() for _, operator in self.parts]).sum()

    def _with(self, parts: Sequence[tuple[Layout, Operator]]) -> Arranged:
        return Arranged(self.space, parts)

    def _places(self) -> list[Tensor]:
        """Where every entry of a layer's matrix lies in the vector, layer by layer."""
        entries = torch.arange(self.size, device=self.device)
        views = {name: entries[b.start : b.stop].view(b.shape) for name, b in self.space.blocks.items()}
        return [layout.join(views).reshape(-1) for layout, _ in self.parts]
