"""Row gradients of layers, read from one forward pass and its output derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from natgrad.ground.spaces import Params
from natgrad.ground.typed_torch import split_tensor
from natgrad.layers import Seen

BLOCK = 256  # rows of a Gram matrix at a time
ALL = slice(None)


class Part(Protocol):
    """Some parameters' part of U (n, r): r row gradients, in whatever form is cheapest."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that it is of."""
        ...

    def add_gram(self, total: Tensor) -> None:
        """total += U^T U of this part, in the lower triangle only.

        total: (r, r), changed in place.
        """
        ...

    def rows(self, which: slice = ALL) -> dict[str, Tensor]:
        """The row gradients written out, shape (r, size) by name."""
        ...

    def squares(self) -> dict[str, Tensor]:
        """Sums of squares over the rows, shape (size,) by name."""
        ...

    def mv(self, weights: Tensor) -> dict[str, Tensor]:
        """The combination of the rows, shape (size,) by name.

        weights: Of the rows, (r,).
        """
        ...

    def rmv(self, tangents: dict[str, Tensor]) -> Tensor:
        """Every row's inner product with a tangent, shape (r,)."""
        ...


@dataclass(frozen=True)
class Outer:
    """A linear layer seen once per example: row (x, c) of the weight is delta_xc (x) a_x, of the bias delta_xc.

    There are r = b k rows.

    Args:
        inputs: a, shape (b, d).
        deltas: Shape (b, k, o).
        weight: The weight's name; None where it is not in the space.
        bias: The bias's name; None where it is not in the space.
    """

    inputs: Tensor
    deltas: Tensor
    weight: str | None
    bias: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def add_gram(self, total: Tensor) -> None:
        b, k, o = self.deltas.shape
        if o == 1:  # delta is a number per row: one product of width d instead of two
            Explicit.of(self.rows()).add_gram(total)
            return
        flat = self.deltas.reshape(b * k, o)
        # a column of ones is the bias's input
        inputs = self.inputs if self.weight else self.inputs[:, :0]
        inputs = torch.cat([inputs, inputs.new_ones(b, 1)], dim=1) if self.bias else inputs
        for start, stop in blocks(b, max(1, BLOCK // k)):
            like = inputs[start:stop] @ inputs[:stop].mT
            pairs = flat[start * k : stop * k] @ flat[: stop * k].mT
            corner = total[start * k : stop * k, : stop * k].view(stop - start, k, stop, k)
            corner.addcmul_(pairs.view(stop - start, k, stop, k), like.view(stop - start, 1, stop, 1))

    def rows(self, which: slice = ALL) -> dict[str, Tensor]:
        b, k, _ = self.deltas.shape
        start, stop, _ = which.indices(b * k)
        inputs, deltas = (tensor[start // k : stop // k] for tensor in (self.inputs, self.deltas))
        outer = torch.einsum("xko,xd->xkod", deltas, inputs) if self.weight else None
        found = {self.weight: outer, self.bias: deltas}
        return {n: v.reshape(stop - start, -1) for n, v in found.items() if n is not None and v is not None}

    def squares(self) -> dict[str, Tensor]:
        squared = self.deltas.square().sum(1)  # (b, o)
        return self._name_parts(squared.mT @ self.inputs.square() if self.weight else None, squared.sum(0))

    def mv(self, weights: Tensor) -> dict[str, Tensor]:
        b, k, _ = self.deltas.shape
        combined = (weights.view(b, k, 1) * self.deltas).sum(1)  # not einsum: its batched product is slower for k = 1
        return self._name_parts(combined.mT @ self.inputs if self.weight else None, combined.sum(0))

    def rmv(self, tangents: dict[str, Tensor]) -> Tensor:
        image = torch.zeros(1, 1, dtype=self.deltas.dtype, device=self.deltas.device)
        if self.weight:
            image = self.inputs @ tangents[self.weight].mT
        if self.bias:
            image = image + tangents[self.bias]
        return (self.deltas * image.unsqueeze(1)).sum(2).reshape(-1)

    def _name_parts(self, weight: Tensor | None, bias: Tensor) -> dict[str, Tensor]:
        found = {self.weight: weight, self.bias: bias}
        return {name: value.reshape(-1) for name, value in found.items() if name is not None and value is not None}


@dataclass(frozen=True)
class Explicit:
    """Row gradients written out.

    Args:
        matrix: Shape (r, total size of the named parameters).
        sizes: Name -> number of entries, in the order of the columns.
    """

    matrix: Tensor
    sizes: dict[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @staticmethod
    def of(rows: dict[str, Tensor]) -> Explicit:
        """The parts by name, side by side.

        rows: Name -> (r, size).
        """
        return Explicit(torch.cat(list(rows.values()), dim=1), {name: part.shape[1] for name, part in rows.items()})

    def add_gram(self, total: Tensor) -> None:
        for start, stop in blocks(len(self.matrix), BLOCK):
            total[start:stop, :stop].addmm_(self.matrix[start:stop], self.matrix[:stop].mT)

    def rows(self, which: slice = ALL) -> dict[str, Tensor]:
        return dict(zip(self.sizes, split_tensor(self.matrix[which], list(self.sizes.values()), dim=1), strict=True))

    def squares(self) -> dict[str, Tensor]:
        return self._name_parts(self.matrix.square().sum(0))

    def mv(self, weights: Tensor) -> dict[str, Tensor]:
        return self._name_parts(weights @ self.matrix)

    def rmv(self, tangents: dict[str, Tensor]) -> Tensor:
        return self.matrix @ torch.cat([tangents[name].reshape(-1) for name in self.sizes])

    def _name_parts(self, vector: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.sizes, split_tensor(vector, list(self.sizes.values())), strict=True))


def cross_gram(one: Outer, other: Outer) -> Tensor:
    """Inner products of one process's row gradients with another's, of the same linear layer: (r, r')."""
    (b, k, o), (c, _, _) = one.deltas.shape, other.deltas.shape
    like = one.inputs @ other.inputs.mT if one.weight else one.inputs.new_zeros(b, c)
    like = like + 1 if one.bias else like  # a column of ones is the bias's input
    pairs = one.deltas.reshape(b * k, o) @ other.deltas.reshape(c * k, o).mT
    return (pairs.view(b, k, c, k) * like.view(b, 1, c, 1)).view(b * k, c * k)


def add_cross_gram(one: Part, other: Part, total: Tensor) -> None:
    """total += inner products of some row gradients with others, over the parameters that both parts have.

    total: (r, s), changed in place.
    """
    if isinstance(one, Outer) and isinstance(other, Outer):
        alike = (one.weight, one.bias, one.inputs.shape[1]) == (other.weight, other.bias, other.inputs.shape[1])
        if alike and one.deltas.shape[2] == other.deltas.shape[2] > 1:
            total += cross_gram(one, other)
            return
    shared = [name for name in one.names if name in other.names]
    if shared:
        left, right = one.rows(), other.rows()
        total.addmm_(torch.cat([left[n] for n in shared], 1), torch.cat([right[n] for n in shared], 1).mT)


def part_of(seen: Seen) -> Part:
    """A layer's rows from its pass, whose deltas are one per cotangent of an example."""
    layout, a = seen.layer.layout, seen.activations
    deltas = torch.stack(seen.deltas, dim=1)  # (b, k, t, G, o)
    if layout.is_stored and a.shape[1] == 1:
        return Outer(a[:, 0, 0, : layout.inputs], deltas[:, :, 0, 0], layout.weight, layout.bias)
    rows = torch.einsum("xktgo,xtgd->xkgod", deltas, a).flatten(0, 1)
    return Explicit.of({name: part.flatten(1) for name, part in torch.vmap(layout.split)(rows).items()})


def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) over `count` rows; blocks of a symmetric product stay in the cache and skip its upper half."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


def fresh_point(leaves: Params) -> dict[str, Tensor]:
    """The parameters as leaves of a new graph."""
    return {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
