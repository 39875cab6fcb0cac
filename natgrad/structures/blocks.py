"""Blocks of the metric itself, one per tensor or one per row of it, for any metric with a root or products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.checks import check_share
from natgrad.metrics import Metric
from natgrad.operators import Arranged, Layout, Operator, Units
from natgrad.pure import RandomState
from natgrad.spaces import ParameterBlock, Params, Space
from natgrad.structures.base import Memory, Structure
from natgrad.structures.running_average import accumulate_total, accumulate_weight


@dataclass(frozen=True)
class Blocks(Structure):
    """One block of G per parameter tensor, exactly; or, with rows=True, one per row of every matrix (its units).

    Needs nothing of the model but its metric: for functions log_p(params, x), score and ratio metrics, tensors that no
    layer holds. A tensor of one dimension is one block; with rows=True, each of its entries is one. Memory: d^2 numbers
    per block of d, and the metric's root (n, r) while it is taken apart (chunk_size in the metric bounds that).

    Args:
        decay: Weight of the past in the running average over steps, in [0, 1). The average is corrected for its start.
        rows: True for one block per row.
        largest: Blocks with more rows are refused, since d^2 numbers are kept of each.

    Raises:
        ValueError: For a decay outside [0, 1); at the first step, for a block beyond `largest`.

    Reference:
        Le Roux, Manzagol & Bengio 2008 for blocks; per unit: Ollivier 2015.
    """

    decay: float = 0.0
    rows: bool = False
    largest: int = 4096

    def __post_init__(self) -> None:
        check_share("decay", self.decay)

    def update(
        self, memory: Memory | None, metric: Metric, params: Params, inputs: Any, *, random: RandomState | None = None
    ) -> tuple[Operator, Memory]:
        space, names = Space(params), list(params)
        for block in space.blocks.values():
            self._check(block)
        operator = metric.at(params, inputs, random=random)
        totals, weight = self._blocks(operator, space), 1.0
        if self.decay and memory and memory["names"] == names:  # else the first step, or parameters came or went
            totals, weight = self._average_totals(totals, memory)
        parts = [
            (layout_of(block), Units(totals[name] / weight).declare(**vars(operator.facts)))
            for name, block in space.blocks.items()
        ]
        return Arranged(space, parts), {"names": names, "totals": totals, "weight": weight} if self.decay else {}

    def _average_totals(self, fresh: dict[str, Tensor], memory: Memory) -> tuple[dict[str, Tensor], float]:
        """The running totals and their weight; a pass that is not finite leaves them as they were."""
        before = memory["totals"]
        if not all(bool(torch.isfinite(total).all()) for total in fresh.values()):
            return before, memory["weight"]
        totals = {name: accumulate_total(before[name], each, self.decay, reuse=True) for name, each in fresh.items()}
        return totals, accumulate_weight(memory["weight"], self.decay)

    def _check(self, block: ParameterBlock) -> None:
        side = self._count(block)[1]
        if side > self.largest:
            raise ValueError(
                f"{block.name!r} has a block of {side} rows, more than largest={self.largest}: take rows=True, another "
                "structure such as ng.Kronecker(), or a larger bound"
            )

    def _count(self, block: ParameterBlock) -> tuple[int, int]:
        """How many blocks a tensor has, and their side."""
        count = block.shape[0] if self.rows and block.shape else 1
        return count, block.size // max(count, 1)

    def _blocks(self, operator: Operator, space: Space) -> dict[str, Tensor]:
        """Per tensor, (k, d, d)."""
        root = operator.root()
        if root is None:
            return {name: self._by_products(operator, block) for name, block in space.blocks.items()}
        found = {}
        for name, block in space.blocks.items():
            rows = root[block.start : block.stop].view(*self._count(block), -1)
            found[name] = rows @ rows.mT
        return found

    def _by_products(self, operator: Operator, block: ParameterBlock) -> Tensor:
        """A tensor's blocks of an operator without a root: one product per column of a block."""
        count, side = self._count(block)
        unit = torch.zeros(operator.size, dtype=operator.dtype, device=operator.device)
        columns = []
        for i in range(block.start, block.stop):
            unit[i] = 1
            start = block.start + (i - block.start) // side * side
            columns.append(operator.mv(unit)[start : start + side])
            unit[i] = 0
        found = torch.stack(columns).view(count, side, side)
        return (found + found.mT) / 2


def layout_of(block: ParameterBlock) -> Layout:
    """A tensor alone, as one row."""
    return Layout(block.name, None, 1, 1, block.size, tuple(block.shape))
