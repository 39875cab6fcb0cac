"""A metric in blocks: a pass into running averages, these into damped inverses, and what both say of a vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from natgrad.ground.constants import FEWEST_ROWS, MOMENTS, RAISES
from natgrad.ground.exchanges import Sums
from natgrad.ground.pure import leaves
from natgrad.ground.typed_torch import list_numbers, read_scalars, split_tensor
from natgrad.ground.whole_tensors import gather_whole, zeros_whole
from natgrad.layers import Layer, Layout, Seen
from natgrad.operators import (
    DiagonalOperator,
    Operator,
    pack_operator,
    split_operator,
    stack_operators,
    unpack_operator,
)
from natgrad.optim.guard import Guard, are_finite
from natgrad.optim.processes import ArrivingSums, Cost, Owners, cost_of
from natgrad.optim.reading import Reading
from natgrad.optim.state import Block, Hearing, Stack, single
from natgrad.rules import Parts, Rule, inner_product
from natgrad.structures import Layerwise, Statistics, accumulate_statistics, accumulate_weight

ROUND_OFF = 1e-12
"""Of one: units that differ by less are the same."""

# a pass into the averages


class Count(NamedTuple):
    """What all processes saw of a block in a pass: rows of the loss, and examples times positions."""

    rows: float
    positions: float


@dataclass(frozen=True)
class BatchUpdate:
    """What the passes since the last step made of the averages. It is bound with the step that it was for."""

    blocks: Mapping[str, Block]  # by key
    hearing: Hearing  # which layers are trusted, and the source of labels
    guard: Guard  # what is known of the batches
    taken: int = 0  # passes in it
    # what those of these passes weigh that told of a block, by key, and all of them; and the rows of all
    reached: Mapping[str, float] = field(default_factory=dict[str, float])
    weight: float = 0.0
    rows: float = 0.0
    # a part of the last one, to measure a step with; None where nothing is to be measured
    sample: Reading | None = None
    part: float = 1.0  # of the rows that a pass must have, as it came sooner or later than it was due
    density: float = 0.0  # of the first of these passes (`Reading`); 0 before it
    bad: bool = False  # True if a pass came to nothing
    # True if that was for a layer's inputs: the step is left out too, since the gradient would stay in the mean
    far: bool = False

    def fail(self, bad: bool = True, far: bool = False) -> BatchUpdate:
        """The same after a pass that came to nothing. A batch counts once as a failure."""
        if not bad:
            return self
        guard = replace(self.guard, failures=self.guard.failures + (not self.bad))
        return replace(self, guard=guard, bad=True, far=self.far or far)


@dataclass(frozen=True)
class Averages:
    """How passes become averages."""

    structure: Layerwise  # the statistics of a layer, and the operator that they make
    named: Mapping[str, Tensor]  # the parameters
    owners: Owners  # who holds which block

    def start(self, update: BatchUpdate, reading: Reading) -> Callable[[], BatchUpdate]:
        """`take`, with several processes while other work goes on. What comes back waits for it."""
        if self.owners.is_shared and self.structure.adds:
            return self._send(update, reading)
        taken = self.take(update, reading)
        return lambda: taken

    def take(self, update: BatchUpdate, reading: Reading) -> BatchUpdate:
        """A reading into the averages, weighted by its rows; where it is not fit (`Guard`), nothing of it.

        Further ones of a step weigh as their targets do in the step's gradient, which a summed loss counts.

        Layer after layer, and the reading is emptied: its activations go as their moments come.
        """
        fit, far, guard = update.guard.accept_inputs(reading.layers, reading.squares)
        update = replace(update, guard=guard, density=update.density or reading.density)
        if not self._agree(fit):
            return update.fail(far=far)
        blocks = self._assign(update.blocks, reading)
        fresh = list[tuple[Block, Statistics, Count]]()
        for block, passed, count in self._weigh(reading, update):
            decay = self._decay(update, block.key)
            before, sums = self._totals(blocks, block), self.owners.sums(block.key)
            # totals <- decay totals + what this pass gives; the average is that / weight (Martens & Grosse, section 5)
            if isinstance(passed, Seen):
                before = self.owners.share_past(block.key, before, self.structure.needs_past(passed))
                totals = self.structure.advance(passed, before, decay, sums)
            else:
                totals = accumulate_statistics(before, sums.total(passed), decay)
            fresh.append((block, totals, count))
        sound = are_finite([totals.values() if self.owners.holds(block.key) else () for block, totals, _ in fresh])
        for fits, (block, totals, count) in zip(sound, fresh, strict=True):
            if fits:  # an eigendecomposition may have failed
                self._average(blocks, block, totals, self._decay(update, block.key), count)
        fine = all(sound)
        if self.owners.apart:
            fine = self._agree(fine)
        counted = {block.key: count.rows for block, _, count in fresh}
        return self._add(update, reading, blocks, counted, fine).fail(not fine)

    def _decay(self, update: BatchUpdate, key: str) -> float:
        """What a block's past counts beside a pass: micro-batches of one step count alike."""
        return 1.0 if key in update.reached else self.structure.decay

    def _send(self, update: BatchUpdate, reading: Reading) -> Callable[[], BatchUpdate]:
        """`take` with several processes, whose parts are on their way when it returns."""
        fit, far, guard = update.guard.accept_inputs(reading.layers, reading.squares)
        update = replace(update, guard=guard, density=update.density or reading.density)
        blocks, coming = self._assign(update.blocks, reading), dict[str, tuple[Block, Count]]()

        def deliver(key: str, fresh: Statistics) -> None:
            block, count = coming.pop(key)
            decay = self._decay(update, key)
            before = self._totals(blocks, block) if self.owners.holds(key) else None
            totals = accumulate_statistics(before, fresh, decay)
            if not self.owners.holds(key) or are_finite([totals.values()])[0]:
                self._average(blocks, block, totals, decay, count)

        sums = ArrivingSums(self.owners.processes, self.structure.symmetric, deliver, fit)
        of = self.owners.of if self.owners.apart else {}
        few = Sums(add_few=self.owners.processes.sum_entries)
        for block, passed, count in self._weigh(reading, update):
            coming[block.key] = block, count
            if isinstance(passed, Seen):
                passed = self.structure.statistics(passed.add_by(few), None, self._decay(update, block.key))
            sums.send(block.key, passed, of.get(block.key))
        counted = {key: count.rows for key, (_, count) in coming.items()}
        sums.finish()

        def wait() -> BatchUpdate:
            return self._add(update, reading, blocks, counted, True) if sums.wait() else update.fail(far=far)

        return wait

    def _add(
        self, update: BatchUpdate, reading: Reading, blocks: dict[str, Block], counted: Mapping[str, float], fine: bool
    ) -> BatchUpdate:
        """The update with a pass that told so many rows of these blocks."""
        reached = {**update.reached, **{key: update.reached.get(key, 0.0) + rows for key, rows in counted.items()}}
        weight = update.weight + reading.density / update.density * reading.all_rows
        rows, taken = update.rows + reading.all_rows, update.taken + fine
        return replace(update, blocks=blocks, taken=taken, reached=reached, weight=weight, rows=rows)

    def complete(self, update: BatchUpdate, before: Mapping[str, Block]) -> BatchUpdate:
        """The update of a whole step: rows of parts, and processes, that did not use a block have zero derivatives.

        A step weighs as its rows beside those before it, where its parts were counted in units of the first one.
        """
        unit = update.rows / update.weight if update.weight else 1.0
        blocks = dict[str, Block]()
        for key, weight in update.reached.items():
            block = update.blocks.get(key)
            if block is None or block.totals is None or not block.weight:
                continue
            if weight < update.weight:
                blocks[key] = block = replace(block, weight=block.weight + update.weight - weight)
            if abs(unit - 1) > ROUND_OFF:
                blocks[key] = self._count_rows(block, before, unit)
        # the same mapping where none changed: stacks are arranged anew for another one
        return replace(update, blocks={**update.blocks, **blocks}) if blocks else update

    def _count_rows(self, block: Block, before: Mapping[str, Block], unit: float) -> Block:
        """The block with what this step gave times a unit, where it adds up to what was there before."""
        if block.totals is None or not (self.structure.adds or block.layer is None):
            return block
        past, share = self._totals(before, block), (1 - unit) * self.structure.decay
        scaled = {key: unit * total for key, total in block.totals.items()}
        totals, weight = accumulate_statistics(past, scaled, share), unit * block.weight
        return replace(block, totals=totals, weight=weight + (share * before[block.key].weight if past else 0.0))

    def _weigh(self, reading: Reading, update: BatchUpdate) -> Iterator[tuple[Block, Seen | Statistics, Count]]:
        """What was seen of each block, weighted by rows, and what all processes saw. Layers leave the reading."""
        rows, weight, times = float(reading.rows), reading.weight, reading.density / update.density
        while reading.layers:
            seen = reading.layers.pop()
            of_all, positions = reading.weights.get(seen.key, rows), reading.positions.get(seen.key, math.inf)
            needed = max(FEWEST_ROWS, update.part * self.structure.rows_needed(seen.layer))
            # where examples are not told apart all positions count once, whatever their targets do
            passed = seen.thin(needed).count_times(times * rows, weight, 1.0 if seen.pooled else times)
            yield Block(seen.layer.layout, seen.layer), passed, Count(times * of_all, positions)
        for name, squares in reading.squares.items():
            count = Count(times * reading.weights.get(name, rows), math.inf)
            yield Block(single(name, self.named[name])), {"squares": times * rows * weight * squares}, count

    def _average(
        self,
        blocks: MutableMapping[str, Block],
        fresh: Block,
        totals: Statistics,
        decay: float,
        count: Count,
    ) -> None:
        """One block's new totals, and what they are divided by."""
        key = fresh.key
        if key not in blocks or (blocks[key].layer is None) != (fresh.layer is None):
            # new, or of a layer and a parameter by turns: blocks that shared a parameter with it are forgotten
            for rival in [k for k, b in blocks.items() if set(b.layout.names) & set(fresh.layout.names)]:
                del blocks[rival]
            blocks[key] = fresh
        if not self.owners.holds(key):
            return
        block = blocks[key]
        known = block.totals is not None
        weight = accumulate_weight(block.weight if known else None, decay, float(count.rows))
        positions, readings = block.positions, block.readings
        if math.isfinite(count.positions):  # a further micro-batch of the same step is no reading of its own
            positions = decay * positions + count.positions if readings else count.positions
            readings = decay * readings + (decay < 1) if readings else 1.0
        blocks[key] = replace(block, totals=totals, weight=weight, positions=positions, readings=readings)

    def _totals(self, blocks: Mapping[str, Block], fresh: Block) -> Statistics | None:
        """The sums so far of a block, if it was one of a layer, or of a parameter without one, before too."""
        block = blocks.get(fresh.key)
        if block is None or (block.layer is None) != (fresh.layer is None) or block.totals is None:
            return None
        return dict(block.totals)

    # owners

    def _assign(self, blocks: Mapping[str, Block], reading: Reading) -> dict[str, Block]:
        """An owner for every block of the reading; the blocks without what is another's now."""
        layouts = [(seen.key, seen.layer.layout, seen.layer) for seen in reading.layers]
        layouts += [(name, single(name, self.named[name]), None) for name in reading.squares]
        fresh = {key: self.cost(layout, layer) for key, layout, layer in layouts if self.owners.is_new(key)}
        return self.share_out(blocks, fresh)

    def share_out(self, blocks: Mapping[str, Block], costs: Mapping[str, Cost]) -> dict[str, Block]:
        """An owner for these blocks. The numbers of another's are forgotten."""
        self.owners.assign(costs, max(next(iter(self.named.values())).element_size(), 4))
        if not self.owners.apart:
            return dict(blocks)
        return {
            key: block if self.owners.holds(key) else Block(block.layout, block.layer, fresh=block.fresh)
            for key, block in blocks.items()
        }

    def cost(self, layout: Layout, layer: Layer | None) -> Cost:
        """What a block costs."""
        return cost_of(layout, None if layer is None else self.structure.inverted_sizes(layer))

    def _agree(self, fine: bool) -> bool:
        """Whether all processes find their parts fine."""
        return fine if self.owners.processes.size == 1 else not self._sum([float(not fine)])[0]

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        processes = self.owners.processes
        return list_numbers(processes.sum(torch.tensor(numbers, dtype=torch.float64, device=processes.device)))

    # the averages as operators

    def operator(self, block: Block) -> Operator:
        """The block of the metric, on the layer's matrix flattened row-major."""
        assert block.totals is not None
        if block.layer is None:
            return DiagonalOperator((block.totals["squares"] / block.weight).reshape(-1))
        return self.structure.operator(block.layer, dict(block.totals), block.weight)

    def kind(self, block: Block) -> str:
        """What a block got, for reports."""
        if block.layer is None:
            return "Diagonal"
        known = block.totals is not None  # another process may have them
        return self.structure.kind(dict(block.totals or {})) if known else type(self.structure).__name__

    def mean_eigenvalues(self, blocks: Mapping[str, Block]) -> dict[str, float]:
        """Of every block that this process holds, by one read of the device."""
        held = {key: block for key, block in blocks.items() if self.owners.holds(key) and block.weight}
        means = [self.operator(block).mean_eigenvalue() for block in held.values()]
        return dict(zip(held, read_scalars(means), strict=True))

    def mean_over_blocks(self, blocks: Mapping[str, Block], means: Mapping[str, float]) -> float:
        """The mean eigenvalue over all blocks that are trained, of all processes."""
        total = size = 0.0
        for key, mean in means.items():
            layout = blocks[key].layout
            if any(self.named[name].requires_grad for name in layout.names):
                entries = math.prod(layout.matrix_shape)
                total, size = total + mean * entries, size + entries
        if self.owners.apart:
            total, size = self._sum([total, size])
        return total / size if size else 0.0

    # inverses

    def invert(
        self,
        blocks: Mapping[str, Block],
        level_of: Callable[[Block], float] | None,
        inverts: bool,
        shaper: Rule | None,
        keys: Collection[str],
    ) -> tuple[dict[str, Block], int]:
        """The blocks, those of these keys with new damped inverses, and how many failed and keep their last good ones.

        level_of: a block -> its damping; None where nothing is damped. inverts: False where no inverse is needed.
        shaper: a rule whose directions need more of a block.
        """
        blocks, levels, tried = dict(blocks), dict[str, float](), dict[str, Block]()
        for key in [key for key in blocks if key in keys]:
            block = blocks[key]
            blocks[key] = block = replace(block, fresh=False) if block.fresh else block
            if self.owners.solves(key) and block.weight:
                level = 0.0 if level_of is None else level_of(block)  # lambda of the block
                if level_of is None or level > 0:  # else no derivative has reached it yet
                    levels[key] = level
        solved = self.invert_alike(blocks, levels) if inverts else {}
        prepared = {} if shaper is None else self.prepare_alike({key: blocks[key] for key in levels}, shaper)
        for key, level in levels.items():
            tried[key] = self.invert_block(blocks[key], level, inverts, shaper, solved.get(key), prepared.get(key))
            self.owners.done += self.owners.costs[key].work
        sound = are_finite([numbers_of(block) for block in tried.values()])
        fresh = dict[str, Block]()
        for key, fits in zip(tried, sound, strict=True):
            block = tried[key] if fits else self.climb(blocks[key], levels[key], inverts, shaper)
            if block is not None:
                fresh[key] = block
        failures = len(tried) - len(fresh)
        if self.owners.is_shared:
            failures = int(self._sum([float(failures)])[0])
        return {**blocks, **self.share_inverses(fresh, blocks)}, failures

    def share_inverses(self, fresh: Mapping[str, Block], blocks: Mapping[str, Block]) -> dict[str, Block]:
        """The blocks that were inverted: where every process keeps all, those of the others too."""
        if not self.owners.is_shared or self.owners.apart:
            return dict(fresh)
        trees = {
            key: [None if b.inverse is None else pack_operator(b.inverse), dict(b.prepared), b.level]
            for key, b in fresh.items()
        }
        inverted = dict[str, Block]()
        for key, (packed, prepared, level) in self.owners.share_trees(trees, blocks).items():
            inverse = None if packed is None else unpack_operator(packed)
            inverted[key] = replace(blocks[key], inverse=inverse, prepared=prepared, level=level)
        return inverted

    def invert_alike(self, blocks: Mapping[str, Block], levels: Mapping[str, float]) -> dict[str, Operator]:
        """(G + damping I)^-1 of the blocks that are alike and can be inverted as one, each kind at once."""
        alike, inverses = dict[Any, list[str]](), dict[str, Operator]()
        for key in levels:
            block = blocks[key]
            if block.layer is not None and block.totals is not None:
                alike.setdefault(describe_totals(block.totals), []).append(key)
        for keys in alike.values():
            if len(keys) < 2:
                continue
            stack = stack_operators([self.operator(blocks[key]) for key in keys])
            if stack is None:
                continue
            damping = torch.tensor([levels[key] for key in keys], dtype=stack.dtype, device=stack.device)
            try:
                inverse = stack.invert_each(damping)
            except RuntimeError:  # torch.linalg.LinAlgError is one: each by itself
                continue
            if inverse is not None:
                inverses |= zip(keys, split_operator(inverse, len(keys)), strict=True)
        return inverses

    def invert_block(
        self,
        block: Block,
        level: float,
        inverts: bool,
        shaper: Rule | None,
        inverse: Operator | None = None,
        prepared: Mapping[str, Tensor] | None = None,
        raised: float = 1.0,
    ) -> Block:
        """The block with (G + damping I)^-1, and with what a rule prepares; NaN for both where they cannot be computed.

        inverse, prepared: where they are known already. raised: what the damping of the inverse is multiplied by.
        TypeError where G has no closed-form inverse, or one that cannot be kept (`Operator.pack`).
        """
        try:
            if inverts and inverse is None:
                # here lambda joins G; K-FAC's factors take pi sqrt(lambda) and sqrt(lambda) / pi (section 6.3)
                inverse = self.operator(block).inverse(raised * level)
            if prepared is None:
                prepared = {} if shaper is None else self.prepare(block, level, shaper)
        except RuntimeError:  # torch.linalg.LinAlgError is one
            return replace(block, level=math.nan)
        if inverts and inverse is None:
            operator = self.operator(block)
            raise TypeError(f"the structure gave {operator!r}, whose inverse({level:g}) is None: a block needs one")
        # as a checkpoint would bring it back
        inverse = None if inverse is None else unpack_operator(pack_operator(inverse))
        return replace(block, inverse=inverse, level=level, prepared=prepared or block.prepared)

    def prepare_alike(self, blocks: Mapping[str, Block], shaper: Rule) -> dict[str, Mapping[str, Tensor]]:
        """What the rule's directions need of the inputs of blocks, whose moments are matrices of one size, at once."""
        alike, prepared = dict[Any, list[str]](), dict[str, Mapping[str, Tensor]]()
        for key, block in blocks.items():
            if block.totals is not None:
                alike.setdefault((block.mean_positions, describe_totals(block.totals)), []).append(key)
        for keys in alike.values():
            largest = max(total.numel() for total in (blocks[keys[0]].totals or {}).values())
            many = max(1, MOMENTS // largest)
            for part in (keys[i : i + many] for i in range(0, len(keys), many)):
                known = [pair for key in part if (pair := self.inputs(blocks[key])) is not None]
                moments = [moment for moment, tokens in known if moment.dim() > 1 and not tokens]
                if len(moments) < max(2, len(part)):
                    continue
                shape = moments[0].shape  # what a rule does with the groups of a layer it does with these
                stack = torch.stack(moments).view(-1, *shape[-2:])
                try:
                    roots = shaper.prepare_inputs(stack, False, blocks[part[0]].mean_positions)
                except RuntimeError:  # torch.linalg.LinAlgError is one: each by itself
                    continue
                rows = {n: t.view(len(part), *shape[:-2], *t.shape[1:]).unbind() for n, t in (roots or {}).items()}
                prepared |= {key: {n: row[i] for n, row in rows.items()} for i, key in enumerate(part) if rows}
        return prepared

    def prepare(self, block: Block, level: float, shaper: Rule) -> dict[str, Tensor]:
        """What the rule's directions need of a block: of its inputs where they are known, else of its metric."""
        known = self.inputs(block)
        prepared = None if known is None else shaper.prepare_inputs(*known, block.mean_positions)
        return shaper.prepare(self.operator(block), level) if prepared is None else prepared

    def inputs(self, block: Block) -> tuple[Tensor, bool] | None:
        """The second moment of a layer's inputs, and True for tokens; None where it is not known."""
        if block.layer is None or block.totals is None:
            return None
        return self.structure.inputs(block.layer, dict(block.totals), block.weight)

    def climb(self, block: Block, level: float, inverts: bool, shaper: Rule | None) -> Block | None:
        """The block with an inverse of more damping, up to 1e4 times; None where nothing helps."""
        for raised in RAISES[1:] if inverts else ():
            candidate = self.invert_block(block, level, inverts, shaper, raised=raised)
            if are_finite([numbers_of(candidate)])[0]:
                return candidate
        return None

    # vectors

    def matrix(self, block: Block, parts: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Parts of a block as its layer's matrix; a parameter without a part counts as zero."""
        return block.layout.join(
            {n: parts[n] if n in parts else zeros_whole(self.named[n], dtype) for n in block.layout.names}
        )

    def solve(self, stack: Stack, mean: Tensor) -> Tensor:
        """(G + damping I)^-1 m for the matrices of a stack; a parameter without a gradient has zeros."""
        inverses = [block.inverse for block in stack.blocks] if stack.inverse is None else [stack.inverse]
        rows, solved = split_tensor(mean, len(mean) // len(inverses)), list[Tensor]()
        for inverse, row in zip(inverses, rows, strict=True):
            assert inverse is not None
            solved.append(inverse.mv(row.to(inverse.dtype).reshape(-1)).view(row.shape))
        return solved[0] if len(solved) == 1 else torch.cat(solved)

    def forms(self, blocks: Mapping[str, Block], step: Parts, levels: Mapping[str, float]) -> dict[str, Tensor]:
        """d^T (G + damping I) d by the first name of every block that moves, by one product each."""
        forms = dict[str, Tensor]()
        for key, block in blocks.items():
            first, parts = block.layout.names[0], {n: step[n] for n in block.layout.names if n in step.parts}
            if parts and self.owners.holds(key):
                operator = self.operator(block)
                flat = self.matrix(block, parts, operator.dtype).to(operator.dtype).reshape(-1)
                forms[first] = inner_product(flat, operator.mv(flat) + levels[first] * flat)
        firsts = [block.layout.names[0] for block in blocks.values()]
        return self.owners.share_scalars(forms, firsts, next(iter(step.parts.values())))


@dataclass(frozen=True)
class KnownScale:
    """A part of a metric as a damping sees it."""

    nats: Any  # per example in one unit of the mean loss
    mean_eigenvalue: Callable[[], float]  # trace over n


def describe_totals(totals: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What is equal of blocks whose totals can be stacked."""
    return tuple((name, total.shape, total.dtype, total.device) for name, total in totals.items())


def numbers_of(block: Block) -> list[Tensor]:
    """All that an inversion made."""
    inverse = [] if block.inverse is None else list(leaves(pack_operator(block.inverse)))
    return [*inverse, *block.prepared.values(), torch.tensor(0.0 if block.level is None else block.level)]


def robust_inverse(operator: Operator, damping: float) -> Operator | None:
    """(G + damping I)^-1, or with more damping where that is not finite, up to 1e4 times.

    Args:
        operator: G, one block of a metric.
        damping: In units of G.

    Returns:
        The inverse; None if nothing helps.

    Raises:
        TypeError: If G has no closed-form inverse, or one that cannot be kept (`Operator.pack`).
    """
    for raise_by in RAISES:
        try:
            inverse = operator.inverse(damping * raise_by)
        except RuntimeError:  # torch.linalg.LinAlgError is one
            continue
        if inverse is None:
            raise TypeError(f"the structure gave {operator!r}, whose inverse({damping:g}) is None: a block needs one")
        if are_finite([leaves(pack_operator(inverse))])[0]:
            return inverse
    return None


# gradients

FULL = (torch.float32, torch.float64)


def dense(p: Tensor) -> Tensor:
    """p.grad, dense, at least in float32."""
    assert p.grad is not None
    gradient = p.grad.to_dense() if p.grad.is_sparse else gather_whole(p.grad)
    return gradient if gradient.dtype in FULL else gradient.to(torch.promote_types(gradient.dtype, torch.float32))


@dataclass(frozen=True)
class Penalised(Mapping[str, Tensor]):
    """The gradients of loss + l2 / 2 |theta|^2 by name, each made when it is asked for."""

    gradients: Mapping[str, Tensor]
    named: Mapping[str, Tensor]
    strengths: Mapping[str, float] = field(default_factory=dict[str, float])

    def __getitem__(self, name: str) -> Tensor:
        strength, gradient = self.strengths.get(name, 0.0), self.gradients[name]
        return torch.add(gradient, self.named[name], alpha=strength) if strength else gradient

    def __iter__(self) -> Iterator[str]:
        return iter(self.gradients)

    def __len__(self) -> int:
        return len(self.gradients)


def join_scalars(scalars: Mapping[str, Tensor]) -> Tensor:
    """Scalar tensors, which may lie apart, in their order: shape (k,)."""
    parts = list(scalars.values())
    return torch.stack([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)


def sum_scalars(scalars: Mapping[str, Tensor]) -> Tensor:
    """The sum of scalar tensors, which may lie apart."""
    return join_scalars(scalars).sum()
