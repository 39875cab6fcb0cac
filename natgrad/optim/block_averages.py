"""A metric in blocks between steps: running averages, damped inverses, and the direction that they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from natgrad.layers.kinds import Layer
from natgrad.layers.moments import Seen
from natgrad.operators import DiagonalOperator, Layout, Operator, pack_operator, unpack_operator
from natgrad.optim.block_owners import LocalOwner
from natgrad.optim.inverses import robust_inverse
from natgrad.optim.pass_statistics import Reading
from natgrad.optim.running_averages import change, renew_entry
from natgrad.pure import map_tensors
from natgrad.rules import Parts, inner_product
from natgrad.structures import Layerwise
from natgrad.structures.layerwise import Statistics, accumulate_statistics
from natgrad.structures.process_sums import exchanging

ENTRIES = ("totals", "weight", "inverse", "level", "prepared", "shape")
MISFIT = "the statistics in state_dict do not fit the block of {}"
HEADROOM = 1e-6  # of the largest number: running averages add up

Prepare = Callable[[Operator, float], dict[str, Tensor]]


@dataclass
class Block:
    """One layer, or one parameter without a layer: its matrix, and its damped inverse once there is one."""

    layout: Layout
    layer: Layer | None
    inverse: Operator | None = None


@dataclass(frozen=True)
class Inverted:
    """A block as it was inverted, not written yet.

    Attributes:
        operator: The damped inverse; None where the rule needs none.
        packed: The same as tensors.
        level: Its damping.
        prepared: What the rule's `prepare` made of the block's metric.
    """

    operator: Operator | None
    packed: dict[str, Any]
    level: float
    prepared: dict[str, Tensor]


@dataclass(frozen=True)
class Whole:
    """All blocks together, as a damping of the whole metric asks for them, of one moment's averages."""

    blocks: Blocks
    nats: float

    def mean_eigenvalue(self) -> Tensor:
        """Over all blocks, made once."""
        return self._mean

    @cached_property
    def _mean(self) -> Tensor:
        return torch.as_tensor(self.blocks.mean_eigenvalue(), dtype=torch.float64)


class Blocks:
    """The blocks of a structure. Their numbers live in an optimizer's state, under each block's first parameter.

    There: `totals` and `weight` of the running averages, the packed `inverse`, and the damping `level` it is made with.
    """

    def __init__(
        self, structure: Layerwise, named: Mapping[str, Tensor], state: MutableMapping[Tensor, dict[str, Any]]
    ) -> None:
        self.structure, self.named, self.state = structure, named, state
        self.all: dict[str, Block] = {}
        self.owner = LocalOwner()
        self._changes: list[Tensor] = []
        self._kinds: dict[str, tuple[torch.dtype, torch.device]] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter(self.all.values())

    def of(self, block: Block) -> dict[str, Any]:
        """The block's numbers."""
        return self.state[self.named[block.layout.names[0]]]

    def follow_parameters(self) -> None:
        """Bring what is remembered to the dtypes and devices of the parameters, after `model.double()` and the like.

        Of half-precision parameters it is float32.
        """
        before, self._kinds = self._kinds, {name: (p.dtype, p.device) for name, p in self.named.items()}
        changed = [name for name, kind in before.items() if self._kinds.get(name, kind) != kind]
        for p in (self.named[name] for name in changed):
            dtype = torch.promote_types(p.dtype, torch.float32)
            moved = map_tensors(
                self.state.get(p, {}),
                lambda t, p=p, dtype=dtype: t.to(p.device, dtype if t.is_floating_point() else t.dtype),
            )
            self.state[p].update(moved)
        for block in self if changed else ():
            if "inverse" in self.of(block):
                block.inverse = unpack_operator(self.of(block)["inverse"])

    def take(self, reading: Reading, decay: float) -> bool:
        """A reading into the averages, weighted by its rows; where it is not finite or near overflow, nothing of it.

        Layer after layer, so that the old and the new averages are never all there at once; the reading is emptied on
        the way, from its end, as the first layers of a network tend to be the largest.
        """
        if not agree_on_parts(sound(reading), reading):
            return False
        share, taken = float(reading.rows), True
        with exchanging(reading.exchange):
            while reading.layers:
                seen = reading.layers.pop().count_times(share)
                taken &= self._take_layer(seen, decay, float(reading.weights.get(seen.key, share)))
            for name, squares in reading.squares.items():
                total = accumulate_statistics(self._totals(name, layered=False), {"squares": share * squares}, decay)
                rows = float(reading.weights.get(name, share))
                taken &= self._average(name, Block(single(name, self.named[name]), None), total, decay, rows)
        return taken

    def _take_layer(self, seen: Seen, decay: float, rows: float) -> bool:
        totals = self.structure.statistics(seen, self._totals(seen.key), decay)
        return self._average(seen.key, Block(seen.layer.layout, seen.layer), totals, decay, rows)

    def _average(self, key: str, block: Block, totals: Statistics, decay: float, rows: float) -> bool:
        """One block's new totals, unless something in them is not finite: an eigendecomposition may have failed."""
        if not all(bool(torch.isfinite(t.sum())) for t in totals.values()):
            return False
        numbers = self.of(self._find_block(key, block))
        weight = decay * numbers["weight"] + rows if "totals" in numbers else rows
        if "totals" in numbers:
            self._changes.append(change(numbers["totals"], totals, numbers["weight"] / weight))
        numbers.update(totals=renew_entry(numbers, "totals", totals), weight=weight)
        return True

    def drift(self) -> float | None:
        """How much the updates since `settle` changed the averages, the mean over blocks; None if there was none.

        Of structures whose statistics are no sums nothing is said: their numbers do not compare entry by entry.
        """
        if not self._changes or not self.structure.sums:
            return None
        return float(torch.stack(self._changes).nan_to_num(nan=1.0).clamp(max=1).mean())

    def settle(self) -> None:
        """Forget the changes that `drift` told."""
        self._changes = []

    def mean_eigenvalue(self) -> float:
        """Over all blocks that are trained, of today's averages."""
        trained = [block for block in self if any(self.named[name].requires_grad for name in block.layout.names)]
        operators = [self.operator(block) for block in trained]
        size = sum(one.size for one in operators)
        return sum(float(one.mean_eigenvalue()) * one.size for one in operators) / size if size else 0.0

    def invert(
        self, level_of: Callable[[Block, Operator], float], inverts: bool, prepare: Prepare | None
    ) -> tuple[dict[str, Inverted], int]:
        """Damped inverses from today's averages by key, and the number of those that failed. Nothing is written.

        Args:
            level_of: A block and its operator -> its damping.
            inverts: False where no inverse is needed.
            prepare: A rule's, where its directions need more; None otherwise.
        """
        found, failures = dict[str, Inverted](), 0
        for key, block in self.all.items():
            operator = self.operator(block)
            level = level_of(block, operator)
            if not level > 0:  # nothing was seen of this block yet: no derivative reached it
                continue
            made = invert_block(operator, level, inverts, prepare)
            if made is None:
                failures += 1
            else:
                found[key] = made
        return found, failures

    def keep(self, inverses: Mapping[str, Inverted]) -> None:
        """Write new inverses; blocks without one keep their last good one. A second time changes nothing."""
        for key, found in inverses.items():
            block = self.all[key]
            numbers = self.of(block)
            numbers["level"] = found.level
            if found.prepared:
                numbers["prepared"] = renew_entry(numbers, "prepared", found.prepared)
            if found.operator is not None:
                numbers["inverse"] = renew_entry(numbers, "inverse", found.packed)
                block.inverse = unpack_operator(numbers["inverse"])
            else:
                numbers.pop("inverse", None)
                block.inverse = None

    def keep_shapes(self, shapes: Mapping[str, dict[str, Tensor]]) -> None:
        """Write what the rule remembers of blocks, by key."""
        for key, memory in shapes.items():
            self.of(self.all[key])["shape"] = memory

    def last_inverted(self, block: Block) -> Inverted | None:
        """A block as it was inverted last; None before that."""
        numbers = self.of(block)
        if "level" not in numbers:
            return None
        return Inverted(block.inverse, numbers.get("inverse", {}), numbers["level"], numbers.get("prepared", {}))

    def operator(self, block: Block) -> Operator:
        """The block of the metric, on the layer's matrix flattened row-major."""
        numbers = self.of(block)
        if block.layer is None:
            return DiagonalOperator((numbers["totals"]["squares"] / numbers["weight"]).reshape(-1))
        return self.structure.operator(block.layer, numbers["totals"], numbers["weight"])

    def kind(self, block: Block) -> str:
        """What a block got, for reports."""
        return "Diagonal" if block.layer is None else self.structure.kind(self.of(block)["totals"])

    def matrix(self, block: Block, parts: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Parts of a block as its layer's matrix; a parameter without a part counts as zero."""
        return self.owner.gather(block.layout, parts, lambda name: torch.zeros_like(self.named[name], dtype=dtype))

    def direction(
        self, block: Block, inverse: Operator, means: Mapping[str, Tensor], rates: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """d = (G + damping I)^-1 m by name, and d^T m by name, under the first for all parameters that share a rate.

        A parameter without a gradient counts as one whose gradient is zero, and does not move.
        """
        names = block.layout.names
        matrix = self.matrix(block, means, inverse.dtype).to(inverse.dtype)
        solved = inverse.mv(matrix.reshape(-1)).view(block.layout.matrix_shape)
        found = self.owner.give_back(block.layout, solved, means)
        if len(found) == len(names) and len({rates[n] for n in names}) == 1:  # the usual case, without copies
            return found, {names[0]: inner_product(matrix, solved)}
        return found, {name: inner_product(means[name], part) for name, part in found.items()}

    def forms(self, step: Parts, levels: Mapping[str, float]) -> dict[str, Tensor]:
        """d^T (G + damping I) d by the first name of every block that moves, by one product each.

        Args:
            step: d.
            levels: Damping by name.
        """
        found = dict[str, Tensor]()
        for block in self:
            first, parts = block.layout.names[0], {n: step[n] for n in block.layout.names if n in step.parts}
            if parts:
                operator = self.operator(block)
                flat = self.matrix(block, parts, operator.dtype).to(operator.dtype).reshape(-1)
                found[first] = inner_product(flat, operator.mv(flat) + levels[first] * flat)
        return found

    def list_names(self) -> dict[str, list[str]]:
        """Key -> names: what `rebuild` needs besides the optimizer's state."""
        return {key: list(block.layout.names) for key, block in self.all.items()}

    def rebuild(self, saved: Mapping[str, list[str]], layers: Mapping[tuple[str, ...], Layer]) -> None:
        """The blocks of a checkpoint. layers: the trusted ones, by their names.

        Raises:
            ValueError: If a block's numbers are missing, or are not those of such a block.
        """
        self.all = {}
        for key, names in saved.items():
            if self._frozen(names):  # torch.distributed.checkpoint leaves their state behind
                continue
            try:
                block = self.all[key] = Block(self._layout(names, layer := layers.get(tuple(names))), layer)
                block.inverse = unpack_operator(self.of(block)["inverse"]) if "inverse" in self.of(block) else None
                sizes = {one.size for one in (self.operator(block), block.inverse) if one is not None}
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise ValueError(f"{MISFIT.format(names)}: {type(error).__name__}, {error}") from error
            if sizes != {math.prod(block.layout.matrix_shape)}:
                raise ValueError(f"{MISFIT.format(names)}, of {math.prod(block.layout.matrix_shape)} entries: {sizes}")

    def _layout(self, names: Sequence[str], layer: Layer | None) -> Layout:
        return single(names[0], self.named[names[0]]) if layer is None else layer.layout

    def _frozen(self, names: Sequence[str]) -> bool:
        """Whether what a block's numbers lay under is not trained any more, and has none."""
        first = self.named.get(names[0])
        return first is not None and not first.requires_grad and "totals" not in self.state.get(first, {})

    def _totals(self, key: str, layered: bool = True) -> Statistics | None:
        return self.of(self.all[key]).get("totals") if self._holds(key, layered) else None

    def _holds(self, key: str, layered: bool) -> bool:
        """Whether there is a block under this key, of a layer or of a parameter without one."""
        return key in self.all and (self.all[key].layer is not None) == layered

    def _find_block(self, key: str, block: Block) -> Block:
        """The block under this key, made if it is new; blocks that shared a parameter with it are forgotten.

        One that was a layer's, and is a parameter's of the same name now, is new too.
        """
        if not self._holds(key, block.layer is not None):
            others = [k for k, b in self.all.items() if set(b.layout.names) & set(block.layout.names)]
            for other in others:
                numbers = self.of(self.all.pop(other))
                for entry in ENTRIES:
                    numbers.pop(entry, None)
            self.all[key] = block
        return self.all[key]


def invert_block(operator: Operator, level: float, inverts: bool, prepare: Prepare | None) -> Inverted | None:
    """A block's damped inverse, and what a rule prepares; None where numbers fail."""
    inverse = robust_inverse(operator, level) if inverts else None
    if inverts and inverse is None:
        return None
    try:
        prepared = {} if prepare is None else prepare(operator, level)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        return None
    if not all(bool(torch.isfinite(t.sum())) for t in prepared.values()):
        return None
    tensors = {} if inverse is None else pack_operator(inverse)
    return Inverted(None if inverse is None else unpack_operator(tensors), tensors, level, prepared)


def sound(reading: Reading) -> bool:
    """Whether no second moment of the reading can overflow, sums of many such readings included.

    Every entry of a factor is at most the squared norm of its side, every entry of a block the product of both.
    """
    norms = [squares.sum().sqrt() for squares in reading.squares.values()]
    for seen in reading.layers:
        for part in getattr(seen, "parts", (seen,)):
            sides = [norm(deltas) for deltas in part.deltas]
            sides = [torch.stack(sides).norm()] + ([] if part.by_token else [norm(part.activations)])
            norms += [*sides, torch.stack(sides).prod()]
    if not norms:
        return True
    largest = min(torch.finfo(n.dtype).max for n in norms)
    # in one synchronisation; comparisons with a NaN are false
    return bool((torch.stack([n.double() for n in norms]).square() <= HEADROOM * largest).all())


def agree_on_parts(fine: bool, reading: Reading) -> bool:
    """Whether all processes find their parts of a reading fine."""
    if reading.exchange is None:
        return fine
    like = next(iter(reading.squares.values()), None)
    like = reading.layers[0].activations if like is None else like
    return not bool(reading.exchange({"bad": torch.tensor(float(not fine), device=like.device)})["bad"])


def norm(tensor: Tensor) -> Tensor:
    """Root of the sum of squares, a scalar tensor."""
    return torch.linalg.vector_norm(tensor)


def single(name: str, p: Tensor) -> Layout:
    """The layout of a parameter without a layer."""
    return Layout(name, None, 1, 1, p.numel(), tuple(p.shape))
