"""Block-diagonal metrics: one operator per consecutive part of the vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.ground.typed_torch import join_diagonally, split_tensor
from natgrad.operators.base import Operator
from natgrad.operators.facts import combine_facts


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
        roots = [block.root() for block in self.blocks]
        known = [root for root in roots if root is not None]
        return join_diagonally(known) if len(known) == len(roots) else None

    @property
    def closed_form(self) -> bool:
        return all(block.closed_form for block in self.blocks)

    def inverse(self, damping: float = 0.0) -> BlockOperator | None:
        inverses = [block.inverse(damping) for block in self.blocks]
        known = [inverse for inverse in inverses if inverse is not None]
        return BlockOperator(known) if len(known) == len(inverses) else None

    def diagonal(self) -> Tensor:
        return torch.cat([block.diagonal() for block in self.blocks])

    def trace(self) -> Tensor:
        return torch.stack([block.trace() for block in self.blocks]).sum()

    def dense(self) -> Tensor:
        return join_diagonally(block.dense() for block in self.blocks)
