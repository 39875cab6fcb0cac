"""One operator per part of the vector: layers, over parameters that lie anywhere, or consecutive parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.ground.pure import compute_exactly
from natgrad.ground.spaces import Space
from natgrad.ground.typed_torch import join_diagonally, split_tensor
from natgrad.layers import Layout, UnitLayout
from natgrad.operators.base import Operator, combine_facts, list_all
from natgrad.operators.kronecker import KroneckerOperator, KroneckerSolve
from natgrad.operators.shared_rows import Units


class Arranged(Operator):
    """One operator per layer, in the coordinates of a space of parameters.

    Args:
        space: The space of the parameters, of size n.
        parts: Pairs of a layout and an operator on the layer's matrix flattened row-major. Together they cover every
            name of the space exactly once.

    Raises:
        ValueError: If they do not, or if an operator's size is not its layout's.
    """

    def __init__(self, space: Space, parts: Sequence[tuple[Layout | UnitLayout, Operator]]) -> None:
        covered = [name for layout, _ in parts for name in layout.names]
        if sorted(covered) != sorted(space):
            raise ValueError(f"parts cover {sorted(covered)}, expected each of {sorted(space)} once")
        for layout, operator in parts:
            if operator.size != torch.Size(layout.matrix_shape).numel():
                raise ValueError(f"the operator of {layout.names} is {operator!r}, expected size {layout.matrix_shape}")
        self.space, self.parts = space, tuple(parts)
        self.size, self.dtype, self.device = space.size, space.dtype, space.device
        self.facts = combine_facts(*(operator.facts for _, operator in parts))

    def mv(self, vector: Tensor) -> Tensor:
        # views in the space's own dtype: a parameter in half precision must not round the product
        views = {name: vector[b.start : b.stop].reshape(b.shape) for name, b in self.space.blocks.items()}
        images: dict[str, Tensor] = {}
        for layout, operator in self.parts:
            images |= layout.split(operator.mv(layout.join(views).reshape(-1)).reshape(layout.matrix_shape))
        return self.space.flatten(images)

    def root(self) -> Tensor | None:
        roots = list_all(operator.root() for _, operator in self.parts)
        if roots is None:
            return None
        columns = torch.zeros(self.size, sum(root.shape[1] for root in roots), dtype=self.dtype, device=self.device)
        stop = 0
        for place, root in zip(self._places(), roots, strict=True):
            start, stop = stop, stop + root.shape[1]
            columns[place, start:stop] = root
        return columns

    @property
    def closed_form(self) -> bool:
        return all(operator.closed_form for _, operator in self.parts)

    def inverse(self, damping: float = 0.0) -> Arranged | None:
        inverses = list_all(operator.inverse(damping) for _, operator in self.parts)
        if inverses is None:
            return None
        return Arranged(self.space, [(part[0], inverse) for part, inverse in zip(self.parts, inverses, strict=True)])

    def diagonal(self) -> Tensor:
        entries = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for place, (_, operator) in zip(self._places(), self.parts, strict=True):
            entries[place] = operator.diagonal()
        return entries

    def trace(self) -> Tensor:
        return torch.stack([operator.trace() for _, operator in self.parts]).sum()

    def _places(self) -> list[Tensor]:
        """Where every entry of a layer's matrix lies in the vector, layer by layer."""
        entries = torch.arange(self.size, device=self.device)
        views = {name: entries[b.start : b.stop].view(b.shape) for name, b in self.space.blocks.items()}
        return [layout.join(views).reshape(-1) for layout, _ in self.parts]


# One operator per consecutive part of the vector


@compute_exactly
class BlockOperator(Operator, packed_as="Block"):
    """diag(G_1, ..., G_k), each on the next entries of the vector.

    Args:
        blocks: G_1, ..., G_k, at least one, of one dtype, device and unit (`nats`).

    Raises:
        ValueError: If there is no block, or if they differ in dtype, device or unit.
    """

    state = ("blocks",)

    def __init__(self, blocks: Sequence[Operator]) -> None:
        if not blocks:
            raise ValueError("blocks is empty, expected at least one operator")
        if len({(block.dtype, block.device) for block in blocks}) > 1:
            kinds = sorted({f"{block.dtype} on {block.device}" for block in blocks})
            raise ValueError(f"blocks are of {kinds}, expected one dtype on one device")
        self.blocks = tuple(blocks)
        self.sizes = [block.size for block in blocks]
        self.size, self.dtype, self.device = sum(self.sizes), blocks[0].dtype, blocks[0].device
        self.facts = combine_facts(*(block.facts for block in blocks))

    def mv(self, vector: Tensor) -> Tensor:
        return torch.cat([b.mv(part) for b, part in zip(self.blocks, split_tensor(vector, self.sizes), strict=True)])

    def mm(self, block: Tensor) -> Tensor:
        return torch.cat([b.mm(part) for b, part in zip(self.blocks, split_tensor(block, self.sizes), strict=True)])

    def root(self) -> Tensor | None:
        roots = list_all(block.root() for block in self.blocks)
        return None if roots is None else join_diagonally(roots)

    @property
    def closed_form(self) -> bool:
        return all(block.closed_form for block in self.blocks)

    def inverse(self, damping: float = 0.0) -> BlockOperator | None:
        inverses = list_all(block.inverse(damping) for block in self.blocks)
        return None if inverses is None else BlockOperator(inverses)

    def diagonal(self) -> Tensor:
        return torch.cat([block.diagonal() for block in self.blocks])

    def trace(self) -> Tensor:
        return torch.stack([block.trace() for block in self.blocks]).sum()

    def dense(self) -> Tensor:
        return join_diagonally(block.dense() for block in self.blocks)


# blocks that are alike as one operator with a leading axis

STACKED = (KroneckerOperator, KroneckerSolve, Units)


def stack_operators(operators: Sequence[Operator]) -> Operator | None:
    """diag(G_1, ..., G_k) of Kronecker products, or of units, of one shape as one operator; None for anything else.

    Args:
        operators: The blocks.
    """
    first = operators[0]
    if not all(type(op) is type(first) and isinstance(op, STACKED) for op in operators):
        return None
    parts = [op.pack() for op in operators]
    tensors = {name: [part[name] for part in parts] for name, value in parts[0].items() if isinstance(value, Tensor)}
    kinds = [[(t.shape, t.dtype, t.device) for t in (part[name] for name in tensors)] for part in parts]
    alike = all(op.facts == first.facts and kind == kinds[0] for op, kind in zip(operators, kinds, strict=True))
    if not alike or not {t.dim() for t, *_ in tensors.values()} <= {2, 3} or first.facts.indefinite:
        return None
    joined = {name: torch.cat([t if t.dim() == 3 else t.unsqueeze(0) for t in each]) for name, each in tensors.items()}
    return type(first).unpack(parts[0] | joined)


def split_operator(stack: Operator, count: int) -> list[Operator]:
    """The blocks that `stack_operators` made one of, on views.

    Args:
        stack: What that returned.
        count: How many blocks it was made of.
    """
    parts = stack.pack()
    tensors = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
    rows = {name: split_tensor(value, len(value) // count) for name, value in tensors.items()}
    flat = {name: not isinstance(stack, Units) and len(value) == count for name, value in tensors.items()}
    return [
        type(stack).unpack(parts | {name: row[i].squeeze(0) if flat[name] else row[i] for name, row in rows.items()})
        for i in range(count)
    ]
