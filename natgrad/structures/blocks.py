"""Blocks of the metric itself, one per tensor, per row, or per unit of several tensors, for any metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.ground.checks import check_share
from natgrad.ground.spaces import ParameterBlock, Params, Space
from natgrad.layers import UnitLayout
from natgrad.operators import Arranged, Layout, Operator, Units
from natgrad.structures.base import Memory, OperatorStructure, accumulate_total, accumulate_weight

Cut = tuple[Layout | UnitLayout, Tensor]
"""A layout, and where the entries of its blocks lie in the vector, shape (blocks, side)."""


@dataclass(frozen=True)
class Blocks(OperatorStructure):
    """One block of G per parameter tensor, exactly; with rows=True, one per row of a matrix; with units, one per unit.

    Needs nothing of the model but its metric: for functions log_p(params, x), score and ratio metrics, tensors that no
    layer holds. A tensor of one dimension is one block; with rows=True, each of its entries is one. A unit has slices
    of several tensors: a hidden unit of a network the row of weights that it reads by, its bias, and the column of the
    next layer's weights that it is read by. Memory: d^2 numbers per block of d, and the metric's root (n, r) while it
    is taken apart (chunk_size in the metric bounds that).

    Args:
        decay: Weight of the past in the running average over steps, in [0, 1). The average is corrected for its start.
        rows: True for one block per row of the tensors that no units have.
        largest: Blocks with more rows are refused, since d^2 numbers are kept of each.
        units: Groups of tensors, name -> the dimension that counts the units: `({"W": 0, "V": 1},)` has a block for
            row j of W with column j of V.

    Raises:
        ValueError: For a decay outside [0, 1), or a name in two groups; at the first step, for a block beyond
            `largest`, and for a name or a dimension that does not exist.

    Reference:
        Le Roux, Manzagol & Bengio 2008 for blocks; per unit: Ollivier 2015.

    Example:
        >>> metric = ng.score_metric(lambda p, x: -(1 + (x @ p["W"].mT).square() @ p["V"].mT).sqrt().sum(-1))
        >>> params = {"W": torch.randn(2, 3), "V": torch.rand(4, 2)}
        >>> G, _ = ng.Blocks(units=({"W": 0, "V": 1},)).update(None, metric, params, torch.randn(5, 3))
        >>> [tuple(part.matrices.shape) for _, part in G.parts]
        [(2, 7, 7)]
    """

    decay: float = 0.0
    rows: bool = False
    largest: int = 4096
    units: tuple[Mapping[str, int], ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        check_share("decay", self.decay)
        if isinstance(self.units, Mapping):
            object.__setattr__(self, "units", (self.units,))
        named = [name for group in self.units for name in group]
        if len(set(named)) < len(named) or not all(self.units):
            raise ValueError(f"units is {self.units!r}, expected groups of tensors, each tensor in one of them")

    def average(self, memory: Memory | None, operator: Operator, params: Params) -> tuple[Operator, Memory]:
        space, names = Space(params), list(params)
        cuts = self._cut(space)
        totals, weight = self._read_blocks(operator, cuts), 1.0
        if self.decay and memory and memory["names"] == names:  # else the first step, or parameters came or went
            totals, weight = self._average_totals(totals, memory)
        parts = [
            (layout, Units(totals[layout.names[0]] / weight).declare(**vars(operator.facts))) for layout, _ in cuts
        ]
        return Arranged(space, parts), {"names": names, "totals": totals, "weight": weight} if self.decay else {}

    def _average_totals(self, fresh: dict[str, Tensor], memory: Memory) -> tuple[dict[str, Tensor], float]:
        """The running totals and their weight; a pass that is not finite leaves them as they were."""
        before = memory["totals"]
        if not all(bool(torch.isfinite(total).all()) for total in fresh.values()):
            return before, memory["weight"]
        totals = {name: accumulate_total(before[name], each, self.decay, reuse=True) for name, each in fresh.items()}
        return totals, accumulate_weight(memory["weight"], self.decay)

    def _cut(self, space: Space) -> list[Cut]:
        """Where the blocks lie: those of units first, then those of the tensors that are left."""
        entries = torch.arange(space.size, device=space.device)
        views = {name: entries[b.start : b.stop].view(b.shape) for name, b in space.blocks.items()}
        cuts = list[Cut]()
        for group in self.units:
            layout = _layout_of_units(group, space)
            cuts.append((layout, layout.join(views).squeeze(0)))
        named = {name for group in self.units for name in group}
        for name, block in space.blocks.items():
            if name not in named:
                count = block.shape[0] if self.rows and block.shape else 1
                cuts.append((layout_of(block), views[name].reshape(count, block.size // max(count, 1))))
        for layout, places in cuts:
            if places.shape[1] > self.largest:
                raise ValueError(
                    f"{layout.names[0]!r} has a block of {places.shape[1]} rows, more than largest={self.largest}: "
                    "take rows=True, another structure such as ng.Kronecker(), or a larger bound"
                )
        return cuts

    def _read_blocks(self, operator: Operator, cuts: list[Cut]) -> dict[str, Tensor]:
        """By the first name of each layout, (k, d, d)."""
        root = operator.root()
        if root is None:
            return {layout.names[0]: _read_by_products(operator, places) for layout, places in cuts}
        return {layout.names[0]: _multiply_rows(root, layout, places) for layout, places in cuts}


def _multiply_rows(root: Tensor, layout: Layout | UnitLayout, places: Tensor) -> Tensor:
    """U_k U_k^T of each block's rows of the root, (k, d, d)."""
    if isinstance(layout, Layout):
        start = int(places[0, 0]) if places.numel() else 0
        rows = root[start : start + places.numel()].view(*places.shape, -1)
    elif root.stride(0) < root.stride(1):  # a root by columns: its entries are picked where they lie side by side
        rows = root.mT[:, places].permute(1, 2, 0)
    else:
        rows = root[places]
    return rows @ rows.mT


def _read_by_products(operator: Operator, places: Tensor) -> Tensor:
    """Blocks of an operator without a root, (k, d, d): one product per column of a block."""
    unit = torch.zeros(operator.size, dtype=operator.dtype, device=operator.device)
    columns = []
    for own in places:
        for place in own:
            unit[place] = 1
            columns.append(operator.mv(unit)[own])
            unit[place] = 0
    blocks = torch.stack(columns).view(*places.shape, places.shape[1])
    return (blocks + blocks.mT) / 2


def _layout_of_units(group: Mapping[str, int], space: Space) -> UnitLayout:
    for name, dim in group.items():
        if name not in space.blocks or not 0 <= dim < len(space.blocks[name].shape):
            known = {each: tuple(block.shape) for each, block in space.blocks.items()}
            raise ValueError(f"units has {name!r} along dimension {dim}, expected one of {known} and a dimension of it")
    shapes = tuple(tuple(space.blocks[name].shape) for name in group)
    return UnitLayout(tuple(group), tuple(group.values()), shapes)


def layout_of(block: ParameterBlock) -> Layout:
    """A tensor alone, as one row."""
    return Layout(block.name, None, 1, 1, block.size, tuple(block.shape))
