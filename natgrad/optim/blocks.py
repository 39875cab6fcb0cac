"""A metric in blocks between steps: running averages, damped inverses, and the direction that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.operators import Diagonal, Layout, Operator
from natgrad.optim.inverses import packed, robust_inverse, unpacked
from natgrad.optim.reading import Reading
from natgrad.structures import Layerwise
from natgrad.structures.exchange import exchanging
from natgrad.structures.layers import Layer
from natgrad.structures.layerwise import Statistics, accumulated

ENTRIES = ("totals", "weight", "inverse", "level")


@dataclass
class Block:
    """One layer, or one parameter without a layer: its matrix, and its damped inverse once there is one."""

    layout: Layout
    layer: Layer | None
    inverse: Operator | None = None


class Blocks:
    """The blocks of a structure. Their numbers live in an optimizer's state, under each block's first parameter.

    There: `totals` and `weight` of the running averages, the packed `inverse`, and the damping `level` it is made with.
    """

    def __init__(
        self, structure: Layerwise, named: Mapping[str, Tensor], state: MutableMapping[Tensor, dict[str, Any]]
    ) -> None:
        self.structure, self.named, self.state = structure, named, state
        self.all: dict[str, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter(self.all.values())

    def of(self, block: Block) -> dict[str, Any]:
        """The block's numbers."""
        return self.state[self.named[block.layout.names[0]]]

    def take(self, reading: Reading, decay: float) -> bool:
        """A reading into the averages, weighted by its rows: as a whole, or not at all where it is not finite."""
        share = float(reading.rows)
        fresh: list[tuple[str, Block, Statistics]] = []
        with exchanging(reading.exchange):
            for seen in reading.layers:
                total = self.structure.statistics(seen.counted(share), self._totals(seen.key), decay)
                fresh.append((seen.key, Block(seen.layer.layout, seen.layer), total))
            for name, squares in reading.squares.items():
                total = accumulated(self._totals(name), {"squares": share * squares}, decay)
                fresh.append((name, Block(single(name, self.named[name]), None), total))
        # one pass over each, no copy: a sum with an infinity or a NaN in it is not finite
        if not all(bool(torch.isfinite(t.sum())) for _, _, total in fresh for t in total.values()):
            return False
        for key, block, total in fresh:
            numbers = self.of(self._known(key, block))
            rows = float(reading.weights.get(key, share))
            weight = decay * numbers["weight"] + rows if "totals" in numbers else rows
            numbers.update(totals=total, weight=weight)
        return True

    def invert(self, damping: Callable[[str], float]) -> int:
        """Damped inverses from today's averages; the number of those that failed and keep their last good one.

        damping: of a parameter, by name, in units of the block's mean eigenvalue.
        """
        failures = 0
        for block in self:
            operator, numbers = self.operator(block), self.of(block)
            level = damping(block.layout.names[0]) * float(operator.mean_eigenvalue())
            if not level > 0:  # nothing was seen of this block yet: no derivative reached it
                continue
            inverse = robust_inverse(operator, level)
            if inverse is None:
                failures += 1
                continue
            block.inverse = inverse
            numbers.update(inverse=packed(inverse), level=level)
        return failures

    def operator(self, block: Block) -> Operator:
        """The block of the metric, on the layer's matrix flattened row-major."""
        numbers = self.of(block)
        if block.layer is None:
            return Diagonal((numbers["totals"]["squares"] / numbers["weight"]).reshape(-1))
        return self.structure.operator(block.layer, numbers["totals"], numbers["weight"])

    def direction(self, block: Block, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(G + damping I)^-1 m by name. A parameter without a gradient counts as one whose gradient is zero."""
        assert block.inverse is not None
        whole = {
            n: means[n] if n in means else torch.zeros_like(self.named[n], dtype=block.inverse.dtype)
            for n in block.layout.names
        }
        matrix = block.layout.join(whole).to(block.inverse.dtype)
        solved = block.inverse.mv(matrix.reshape(-1)).view(block.layout.matrix_shape)
        return {name: part for name, part in block.layout.split(solved).items() if name in means}

    def saved(self) -> dict[str, list[str]]:
        """Key -> names: what `rebuild` needs besides the optimizer's state."""
        return {key: list(block.layout.names) for key, block in self.all.items()}

    def rebuild(self, saved: Mapping[str, list[str]], layers: Mapping[tuple[str, ...], Layer]) -> None:
        """The blocks of a checkpoint. layers: the trusted ones, by their names."""
        self.all = {}
        for key, names in saved.items():
            layer = layers.get(tuple(names))
            layout = single(names[0], self.named[names[0]]) if layer is None else layer.layout
            block = self.all[key] = Block(layout, layer)
            if "inverse" in self.of(block):
                block.inverse = unpacked(self.of(block)["inverse"])

    def _totals(self, key: str) -> Statistics | None:
        block = self.all.get(key)
        return None if block is None else self.of(block).get("totals")

    def _known(self, key: str, block: Block) -> Block:
        """The block under this key, made if it is new; blocks that shared a parameter with it are forgotten."""
        if key not in self.all:
            others = [k for k, b in self.all.items() if set(b.layout.names) & set(block.layout.names)]
            for other in others:
                numbers = self.of(self.all.pop(other))
                for entry in ENTRIES:
                    numbers.pop(entry, None)
            self.all[key] = block
        return self.all[key]


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Inner product of two tensors, without a copy where they lie in one piece."""
    return torch.dot(first.reshape(-1).to(second.dtype), second.reshape(-1))


def single(name: str, p: Tensor) -> Layout:
    """The layout of a parameter without a layer."""
    return Layout(name, None, 1, 1, p.numel(), tuple(p.shape))
