"""A metric in blocks between steps: running averages, damped inverses, and the direction that they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from natgrad.layers import Layer, Seen
from natgrad.operators import DiagonalOperator, Layout, Operator, unpack_operator
from natgrad.optim.block_owners import Cost, Owners, cost_of
from natgrad.optim.distributed import Ranks
from natgrad.optim.input_sizes import InputSizes
from natgrad.optim.inverses import Block, Inverted, Prepare, give_back, invert_block, single
from natgrad.optim.readings import SOME, Reading, agree_on_parts
from natgrad.optim.running_averages import change, count_positions, mean_positions, renew_entry
from natgrad.pure import map_tensors
from natgrad.rules import Parts, inner_product
from natgrad.structures import Layerwise, Statistics, accumulate_statistics, accumulate_weight, exchanging
from natgrad.typed_torch import list_numbers
from natgrad.whole_tensors import zeros_whole

ENTRIES = ("totals", "weight", "positions", "readings", "inverse", "level", "prepared", "shape")
OWNED = (*ENTRIES, "mean", "count")
"""What a process remembers of its own blocks alone, where their numbers are their owners'."""
Count = tuple[float, float]  # rows of the loss, and a layer's examples times positions, of all processes
MISFIT = "the statistics in state_dict do not fit the block of {}"


@dataclass(frozen=True)
class Whole:
    """All blocks together, as a damping of the whole metric asks for them, of one moment's averages."""

    blocks: BlockAverages
    nats: float

    def mean_eigenvalue(self) -> Tensor:
        """Over all blocks, made once."""
        return self._mean

    @cached_property
    def _mean(self) -> Tensor:
        return torch.as_tensor(self.blocks.mean_eigenvalue(), dtype=torch.float64)


class BlockAverages:
    """The blocks of a structure. Their numbers live in an optimizer's state, under each block's first parameter.

    There: `totals` and `weight` of the running averages, the packed `inverse`, and the damping `level` it is made with.
    """

    def __init__(
        self,
        structure: Layerwise,
        named: Mapping[str, Tensor],
        state: MutableMapping[Tensor, dict[str, Any]],
        owners: Owners | None = None,
    ) -> None:
        self.structure, self.named, self.state = structure, named, state
        self.all: dict[str, Block] = {}
        self.owners, self.inputs = Owners(Ranks()) if owners is None else owners, InputSizes()
        self._changes: list[Tensor] = []
        self._taken, self._compares = False, True  # whether there was an update since `settle`; if changes matter
        self.fresh = set[str]()  # keys of blocks that were not inverted since they were made
        self.work = 0.0  # n^3 summed over all inversions of this process
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

    def start(self, reading: Reading, decay: float) -> Callable[[], bool]:
        """`take`, with several processes while other work goes on. What comes back waits for it."""
        if self.owners.is_shared and self.structure.adds:
            return self._send(reading, decay)
        taken = self.take(reading, decay)
        return lambda: taken

    def take(self, reading: Reading, decay: float) -> bool:
        """A reading into the averages, weighted by its rows; where it is not fit (`InputSizes`), nothing of it.

        Layer after layer, so that old and new averages are never all there at once. The reading is emptied.
        """
        if not agree_on_parts(self.inputs.accept(reading), reading):
            return False
        taken = self._taken = True
        self._assign(reading)
        for seen, count in self._weigh_layers(reading):
            before = self.owners.share_past(seen.key, self._totals(seen.key), self.structure.needs_past(seen))
            with exchanging(*self.owners.exchange(seen.key)):
                totals = self.structure.statistics(seen, before, decay)
                taken &= self._average(seen.key, Block(seen.layer.layout, seen.layer), totals, decay, count)
        for name, squares, count in self._weigh_squares(reading):
            with exchanging(*self.owners.exchange(name)):
                totals = accumulate_statistics(self._totals(name, layered=False), squares, decay)
                taken &= self._average(name, Block(single(name, self.named[name]), None), totals, decay, count)
        return taken if not self.owners.apart else not bool(self._sum([0.0 if taken else 1.0])[0])

    def _send(self, reading: Reading, decay: float) -> Callable[[], bool]:
        """`take` with several processes, whose parts are on their way when it returns."""
        self._assign(reading)
        coming = dict[str, tuple[Block, Count]]()

        def deliver(key: str, fresh: Statistics) -> None:
            block, count = coming.pop(key)
            before = self._totals(key, layered=block.layer is not None) if self.owners.holds(key) else None
            self._average(key, block, accumulate_statistics(before, fresh, decay), decay, count)
            self._taken = True

        sums = self.owners.open_sums(self.structure.symmetric, deliver, self.inputs.accept(reading))
        of = self.owners.of if self.owners.apart else {}
        for seen, count in self._weigh_layers(reading):
            coming[seen.key] = Block(seen.layer.layout, seen.layer), count
            with exchanging(None, add_up=self.owners.ranks.sum_entries):
                sums.send(seen.key, self.structure.statistics(seen, None, decay), of.get(seen.key))
        for name, squares, count in self._weigh_squares(reading):
            coming[name] = Block(single(name, self.named[name]), None), count
            sums.send(name, squares, of.get(name))
        sums.finish()
        return sums.wait

    def _weigh_layers(self, reading: Reading) -> Iterator[tuple[Seen, Count]]:
        """The layers' passes, weighted by rows, and what all processes saw. They are taken out of the reading."""
        share, weight, self._compares = float(reading.rows), reading.weight, reading.part == 1  # as it was due
        for seen in (reading.layers.pop() for _ in range(len(reading.layers))):
            rows, positions = reading.weights.get(seen.key, share), reading.positions.get(seen.key, math.inf)
            needed = max(SOME, reading.part * self.structure.rows_needed(seen.layer))
            yield seen.thin(needed).count_times(share, weight), (rows, positions)

    def _weigh_squares(self, reading: Reading) -> Iterator[tuple[str, Statistics, Count]]:
        """The same of the parameters without a layer."""
        share, weight = float(reading.rows), reading.weight
        for name, squares in reading.squares.items():
            yield name, {"squares": share * weight * squares}, (reading.weights.get(name, share), math.inf)

    def _assign(self, reading: Reading) -> None:
        """An owner for every block of the reading."""
        costs = {one.key: self._cost(one.layer.layout, one.layer) for one in reading.layers}
        costs |= {name: self._cost(single(name, self.named[name]), None) for name in reading.squares}
        self._share_out(costs)

    def _share_out(self, costs: Mapping[str, Cost]) -> None:
        """An owner for these blocks. What is another's now, is forgotten."""
        self.owners.assign(costs, max(next(iter(self.named.values())).element_size(), 4))
        self._forget_others()

    def _forget_others(self) -> None:
        """Forget the numbers of blocks that other processes alone hold."""
        for key, block in self.all.items():
            if not self.owners.holds(key):
                block.inverse = None
                for name in block.layout.names:
                    for entry in OWNED:
                        self.state[self.named[name]].pop(entry, None)

    def _cost(self, layout: Layout, layer: Layer | None) -> Cost:
        return cost_of(layout, None if layer is None else self.structure.inverted_sizes(layer))

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        """Numbers of this process, added up over those that blocks are shared out over."""
        ranks = self.owners.near
        return list_numbers(ranks.sum(torch.tensor(numbers, dtype=torch.float64, device=ranks.device)))

    def _average(self, key: str, block: Block, totals: Statistics, decay: float, count: Count) -> bool:
        """One block's new totals, unless something in them is not finite: an eigendecomposition may have failed."""
        if not self.owners.holds(key):
            self._find_block(key, block)
            return True
        if not all(bool(torch.isfinite(t.sum())) for t in totals.values()):
            return False
        numbers = self.of(self._find_block(key, block))
        weight = accumulate_weight(numbers["weight"] if "totals" in numbers else None, decay, float(count[0]))
        if "totals" in numbers and self._compares:
            self._changes.append(change(numbers["totals"], totals, numbers["weight"] / weight))
        numbers.update(totals=renew_entry(numbers, "totals", totals), weight=weight)
        count_positions(numbers, count[1], decay)
        return True

    def drift(self) -> float | None:
        """How much the updates since `settle` changed the averages, the mean over blocks; None if there was none.

        Of structures whose numbers do not compare entry by entry nothing is said.
        """
        if not (self.structure.sums and self.structure.compares):
            return None
        changes = torch.stack(self._changes).nan_to_num(nan=1.0).clamp(max=1) if self._changes else torch.zeros(0)
        if self.owners.apart:
            if not self._taken:
                return None
            total, count = self._sum([float(changes.sum()), float(len(changes))])
            return total / count if count else None
        return float(changes.mean()) if self._changes else None

    def settle(self) -> None:
        """Forget the changes that `drift` told."""
        self._changes, self._taken = [], False

    def mean_eigenvalue(self) -> float:
        """Over all blocks that are trained, of today's averages."""
        trained = [block for block in self if any(self.named[name].requires_grad for name in block.layout.names)]
        operators = (self.operator(block) for block in trained if self.owners.holds(self.key_of(block)))
        pairs = [(float(one.mean_eigenvalue()), one.size) for one in operators]  # one after another: they are copies
        total, size = sum(mean * n for mean, n in pairs), float(sum(n for _, n in pairs))
        if self.owners.apart:
            total, size = self._sum([total, size])
        return total / size if size else 0.0

    def invert(
        self,
        level_of: Callable[[Block, Operator], float],
        inverts: bool,
        prepare: Prepare | None,
        keys: Collection[str] | None = None,
    ) -> tuple[dict[str, Inverted], int]:
        """Damped inverses from today's averages by key, and the number of those that failed. Nothing is written.

        Args:
            level_of: A block and its operator -> its damping.
            inverts: False where no inverse is needed.
            prepare: A rule's, where its directions need more; None otherwise.
            keys: Of the blocks that are inverted; None for all.
        """
        found, failures = dict[str, Inverted](), 0
        for key, block in self.all.items():
            if not self.owners.solves(key) or (keys is not None and key not in keys):
                continue
            operator = self.operator(block)
            level = level_of(block, operator)
            if not level > 0:  # nothing was seen of this block yet: no derivative reached it
                continue
            made = invert_block(operator, level, inverts, prepare, mean_positions(self.of(block)))
            self.work += self._cost(block.layout, block.layer).work
            if made is None:
                failures += 1
            else:
                found[key] = made
        if self.owners.is_shared:
            failures = int(self._sum([float(failures)])[0])
        return self.owners.share_inverses(found, list(self.all)), failures

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
        if block.layer is None:
            return "Diagonal"
        totals = self.of(block).get("totals")  # another process may have them
        return type(self.structure).__name__ if totals is None else self.structure.kind(totals)

    def key_of(self, block: Block) -> str:
        """The key of a block, as owners know it."""
        return block.layout.names[0] if block.layer is None else block.layer.key

    def matrix(self, block: Block, parts: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Parts of a block as its layer's matrix; a parameter without a part counts as zero."""
        return block.layout.join(
            {n: parts[n] if n in parts else zeros_whole(self.named[n], dtype) for n in block.layout.names}
        )

    def direction(
        self, block: Block, inverse: Operator, means: Mapping[str, Tensor], rates: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """d = (G + damping I)^-1 m by name, and d^T m by name, under the first for all parameters that share a rate.

        A parameter without a gradient counts as one whose gradient is zero, and does not move.
        """
        names = block.layout.names
        matrix = self.matrix(block, means, inverse.dtype).to(inverse.dtype)
        solved = inverse.mv(matrix.reshape(-1)).view(block.layout.matrix_shape)
        found = give_back(block.layout, solved, means)
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
        for key, block in self.all.items():
            first, parts = block.layout.names[0], {n: step[n] for n in block.layout.names if n in step.parts}
            if parts and self.owners.holds(key):
                operator = self.operator(block)
                flat = self.matrix(block, parts, operator.dtype).to(operator.dtype).reshape(-1)
                found[first] = inner_product(flat, operator.mv(flat) + levels[first] * flat)
        firsts = [block.layout.names[0] for block in self]
        return self.owners.share_scalars(found, firsts, next(iter(step.parts.values())))

    def list_names(self) -> dict[str, list[str]]:
        """Key -> names: what `rebuild` needs besides the optimizer's state."""
        return {key: list(block.layout.names) for key, block in self.all.items()}

    def rebuild(self, saved: Mapping[str, list[str]], layers: Mapping[tuple[str, ...], Layer], inputs: Any) -> None:
        """The blocks of a checkpoint. layers: the trusted ones, by their names. inputs: the sizes of what layers saw.

        Raises:
            ValueError: If a block's numbers are missing, or are not those of such a block.
        """
        self.all, self.inputs = {}, InputSizes.load(inputs)
        known = {key: layers.get(tuple(names)) for key, names in saved.items() if self.named.keys() >= set(names)}
        layouts = {key: self._layout(saved[key], layer) for key, layer in known.items()}
        self._share_out({key: self._cost(layout, known[key]) for key, layout in layouts.items()})
        for key, names in saved.items():
            if self._has_no_gradient(names):  # torch.distributed.checkpoint leaves their state behind
                continue
            try:
                block = self.all[key] = Block(self._layout(names, layer := layers.get(tuple(names))), layer)
                if "totals" not in self.of(block) and not self.owners.holds(key):
                    continue
                block.inverse = unpack_operator(self.of(block)["inverse"]) if "inverse" in self.of(block) else None
                sizes = {one.size for one in (self.operator(block), block.inverse) if one is not None}
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise ValueError(f"{MISFIT.format(names)}: {type(error).__name__}, {error}") from error
            if sizes != {math.prod(block.layout.matrix_shape)}:
                raise ValueError(f"{MISFIT.format(names)}, of {math.prod(block.layout.matrix_shape)} entries: {sizes}")
        self._forget_others()

    def _layout(self, names: Sequence[str], layer: Layer | None) -> Layout:
        return single(names[0], self.named[names[0]]) if layer is None else layer.layout

    def _has_no_gradient(self, names: Sequence[str]) -> bool:
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
            self.fresh.add(key)
        return self.all[key]
