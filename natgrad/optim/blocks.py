"""A metric in blocks: a pass into the averages, the averages into damped inverses, and what both say of a vector.

Every function takes blocks and gives blocks; nothing is written. Where several processes share blocks out, `owners`
says who holds which, and brings what the others need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from natgrad.layers import Layer, Layout, Seen
from natgrad.operators import DiagonalOperator, Operator, pack_operator, unpack_operator
from natgrad.optim.block_owners import Cost, Owners, cost_of
from natgrad.optim.guard import RAISES, Guard
from natgrad.optim.readings import SOME, Reading, agree_on_parts
from natgrad.optim.state import Block, GradientMean, Hearing, single
from natgrad.pure import leaves
from natgrad.rules import Parts, inner_product
from natgrad.structures import Layerwise, Statistics, accumulate_statistics, accumulate_weight, exchanging
from natgrad.typed_torch import list_numbers
from natgrad.whole_tensors import gather_whole, zeros_whole

Prepare = Callable[[Operator, float, float], dict[str, Tensor]]


# a pass into the averages


class Count(NamedTuple):
    """What all processes saw of a block in a pass: rows of the loss, and examples times positions."""

    rows: float
    positions: float


@dataclass(frozen=True)
class BatchUpdate:
    """What the passes since the last step made of the averages. It is bound with the step that it was for.

    Attributes:
        blocks: By key.
        hearing: Which layers are trusted, and the source of labels.
        guard: What is known of the batches.
        taken: Passes in it.
        sample: A part of the last one, to measure a step with; None where nothing is to be measured.
        changes: How much the averages of each block changed.
        part: Of the rows that a pass must have, as it came sooner or later than it was due.
        bad: True if a pass came to nothing.
        far: True if that was for a layer's inputs: the step is left out too, since the gradient would stay in the mean.
    """

    blocks: Mapping[str, Block]
    hearing: Hearing
    guard: Guard
    taken: int = 0
    sample: Reading | None = None
    changes: tuple[Tensor, ...] = ()
    part: float = 1.0
    bad: bool = False
    far: bool = False

    def fail(self, bad: bool = True, far: bool = False) -> BatchUpdate:
        """The same after a pass that came to nothing. A batch counts once as a failure."""
        if not bad:
            return self
        guard = replace(self.guard, failures=self.guard.failures + (not self.bad))
        return replace(self, guard=guard, bad=True, far=self.far or far)


@dataclass(frozen=True)
class Averages:
    """How passes become averages.

    Args:
        structure: The statistics of a layer, and the operator that they make.
        named: The parameters.
        owners: Who holds which block.
    """

    structure: Layerwise
    named: Mapping[str, Tensor]
    owners: Owners

    def start(self, update: BatchUpdate, reading: Reading, decay: float) -> Callable[[], BatchUpdate]:
        """`take`, with several processes while other work goes on. What comes back waits for it."""
        if self.owners.is_shared and self.structure.adds:
            return self._send(update, reading, decay)
        taken = self.take(update, reading, decay)
        return lambda: taken

    def take(self, update: BatchUpdate, reading: Reading, decay: float) -> BatchUpdate:
        """A reading into the averages, weighted by its rows; where it is not fit (`Guard`), nothing of it.

        Layer after layer, and the reading is emptied: its activations go as their moments come.
        """
        fit, far, guard = update.guard.accept_inputs(reading.layers, reading.squares)
        update = replace(update, guard=guard)
        if not agree_on_parts(fit, reading):
            return update.fail(far=far)
        blocks, changes, fine = self._assign(update.blocks, reading), list(update.changes), True
        compares = changes if reading.part == 1 else None  # a reading of fewer rows changes more by chance
        for seen, count in self._weigh_layers(reading):
            past = self._totals(blocks, seen.key)
            before = self.owners.share_past(seen.key, past, self.structure.needs_past(seen))
            with exchanging(*self.owners.exchange(seen.key)):
                totals = self.structure.statistics(seen, before, decay)
            fine &= self._average(blocks, Block(seen.layer.layout, seen.layer), totals, decay, count, compares)
        for name, squares, count in self._weigh_squares(reading):
            with exchanging(*self.owners.exchange(name)):
                totals = accumulate_statistics(self._totals(blocks, name, layered=False), squares, decay)
            fine &= self._average(blocks, Block(single(name, self.named[name])), totals, decay, count, compares)
        if self.owners.apart:
            fine = not bool(self._sum([0.0 if fine else 1.0])[0])
        taken = replace(update, blocks=blocks, changes=tuple(changes), taken=update.taken + fine)
        return taken.fail(not fine)

    def _send(self, update: BatchUpdate, reading: Reading, decay: float) -> Callable[[], BatchUpdate]:
        """`take` with several processes, whose parts are on their way when it returns."""
        fit, far, guard = update.guard.accept_inputs(reading.layers, reading.squares)
        update = replace(update, guard=guard)
        blocks, changes = self._assign(update.blocks, reading), list(update.changes)
        compares, coming = changes if reading.part == 1 else None, dict[str, tuple[Block, Count]]()

        def deliver(key: str, fresh: Statistics) -> None:
            block, count = coming.pop(key)
            before = self._totals(blocks, key, block.layer is not None) if self.owners.holds(key) else None
            totals = accumulate_statistics(before, fresh, decay)
            self._average(blocks, block, totals, decay, count, compares)

        sums = self.owners.open_sums(self.structure.symmetric, deliver, fit)
        of = self.owners.of if self.owners.apart else {}
        for seen, count in self._weigh_layers(reading):
            coming[seen.key] = Block(seen.layer.layout, seen.layer), count
            with exchanging(None, add_up=self.owners.ranks.sum_entries):
                sums.send(seen.key, self.structure.statistics(seen, None, decay), of.get(seen.key))
        for name, squares, count in self._weigh_squares(reading):
            coming[name] = Block(single(name, self.named[name])), count
            sums.send(name, squares, of.get(name))
        sums.finish()

        def wait() -> BatchUpdate:
            if not sums.wait():
                return update.fail(far=far)
            return replace(update, blocks=blocks, changes=tuple(changes), taken=update.taken + 1)

        return wait

    def _weigh_layers(self, reading: Reading) -> Iterator[tuple[Seen, Count]]:
        """The layers' passes, weighted by rows, and what all processes saw. They are taken out of the reading."""
        share, weight = float(reading.rows), reading.weight
        for seen in (reading.layers.pop() for _ in range(len(reading.layers))):
            rows, positions = reading.weights.get(seen.key, share), reading.positions.get(seen.key, math.inf)
            needed = max(SOME, reading.part * self.structure.rows_needed(seen.layer))
            yield seen.thin(needed).count_times(share, weight), Count(rows, positions)

    def _weigh_squares(self, reading: Reading) -> Iterator[tuple[str, Statistics, Count]]:
        """The same of the parameters without a layer."""
        share, weight = float(reading.rows), reading.weight
        for name, squares in reading.squares.items():
            count = Count(reading.weights.get(name, share), math.inf)
            yield name, {"squares": share * weight * squares}, count

    def _average(
        self,
        blocks: MutableMapping[str, Block],
        fresh: Block,
        totals: Statistics,
        decay: float,
        count: Count,
        changes: list[Tensor] | None,
    ) -> bool:
        """One block's new totals, unless something in them is not finite: an eigendecomposition may have failed."""
        key, layered = fresh.key, fresh.layer is not None
        if self.owners.holds(key) and not all(bool(torch.isfinite(t.sum())) for t in totals.values()):
            return False
        if key not in blocks or (blocks[key].layer is not None) != layered:
            # new, or of a layer and a parameter by turns: blocks that shared a parameter with it are forgotten
            for other in [k for k, b in blocks.items() if set(b.layout.names) & set(fresh.layout.names)]:
                del blocks[other]
            blocks[key] = fresh
        if not self.owners.holds(key):
            return True
        block = blocks[key]
        known = block.totals is not None
        weight = accumulate_weight(block.weight if known else None, decay, float(count.rows))
        if block.totals is not None and changes is not None:
            changes.append(measure_change(block.totals, totals, block.weight / weight if weight else 1.0))
        positions, readings = block.positions, block.readings
        if math.isfinite(count.positions):  # a further micro-batch of the same step is no reading of its own
            positions = decay * positions + count.positions if readings else count.positions
            readings = decay * readings + (decay < 1) if readings else 1.0
        blocks[key] = replace(block, totals=totals, weight=weight, positions=positions, readings=readings)
        return True

    def _totals(self, blocks: Mapping[str, Block], key: str, layered: bool = True) -> Statistics | None:
        """The sums so far of a layer's block, or of that of a parameter without one."""
        block = blocks.get(key)
        if block is None or (block.layer is not None) != layered or block.totals is None:
            return None
        return dict(block.totals)

    # owners

    def _assign(self, blocks: Mapping[str, Block], reading: Reading) -> dict[str, Block]:
        """An owner for every block of the reading; the blocks without what is another's now."""
        costs = {one.key: self.cost(one.layer.layout, one.layer) for one in reading.layers}
        costs |= {name: self.cost(single(name, self.named[name]), None) for name in reading.squares}
        return self.share_out(blocks, costs)

    def share_out(self, blocks: Mapping[str, Block], costs: Mapping[str, Cost]) -> dict[str, Block]:
        """An owner for these blocks. The numbers of another's are forgotten."""
        self.owners.assign(costs, max(next(iter(self.named.values())).element_size(), 4))
        return {
            key: block if self.owners.holds(key) else Block(block.layout, block.layer, fresh=block.fresh)
            for key, block in blocks.items()
        }

    def cost(self, layout: Layout, layer: Layer | None) -> Cost:
        """What a block costs."""
        return cost_of(layout, None if layer is None else self.structure.inverted_sizes(layer))

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        ranks = self.owners.ranks
        return list_numbers(ranks.sum(torch.tensor(numbers, dtype=torch.float64, device=ranks.device)))

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

    def drift(self, update: BatchUpdate) -> float | None:
        """How much an update changed the averages, the mean over blocks; None where nothing is known.

        Of structures whose numbers do not compare entry by entry nothing is said.
        """
        if not (self.structure.sums and self.structure.compares):
            return None
        changes = torch.stack(update.changes).nan_to_num(nan=1.0).clamp(max=1) if update.changes else torch.zeros(0)
        if not self.owners.apart:
            return float(changes.mean()) if update.changes else None
        if not update.taken:
            return None
        total, count = self._sum([float(changes.sum()), float(len(changes))])
        return total / count if count else None

    def mean_eigenvalue(self, blocks: Mapping[str, Block]) -> float:
        """Over all blocks that are trained."""
        trained = [b for b in blocks.values() if any(self.named[name].requires_grad for name in b.layout.names)]
        operators = (self.operator(block) for block in trained if self.owners.holds(block.key) and block.weight)
        pairs = [(float(one.mean_eigenvalue()), one.size) for one in operators]  # one after another: they are copies
        total, size = sum(mean * n for mean, n in pairs), float(sum(n for _, n in pairs))
        if self.owners.apart:
            total, size = self._sum([total, size])
        return total / size if size else 0.0

    # inverses

    def invert(
        self,
        blocks: Mapping[str, Block],
        level_of: Callable[[Block, Operator], float],
        inverts: bool,
        prepare: Prepare | None,
        keys: Collection[str],
    ) -> tuple[dict[str, Block], int]:
        """The blocks, those of these keys with new damped inverses, and how many failed and keep their last good ones.

        level_of: a block and its operator -> its damping. inverts: False where no inverse is needed. prepare: the
        rule's, where its directions need more.
        """
        fresh, failures = dict[str, Block](), 0
        blocks = {key: replace(block, fresh=False) if key in keys else block for key, block in blocks.items()}
        for key, block in blocks.items():
            if key not in keys or not self.owners.solves(key) or not block.weight:
                continue
            operator = self.operator(block)
            level = level_of(block, operator)
            if not level > 0:  # nothing was seen of this block yet: no derivative reached it
                continue
            inverted = invert_block(block, operator, level, inverts, prepare)
            self.owners.done += self.cost(block.layout, block.layer).work
            if inverted is None:
                failures += 1
            else:
                fresh[key] = inverted
        if self.owners.is_shared:
            failures = int(self._sum([float(failures)])[0])
        return {**blocks, **self.owners.share_inverses(fresh, blocks)}, failures

    # vectors

    def matrix(self, block: Block, parts: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Parts of a block as its layer's matrix; a parameter without a part counts as zero."""
        return block.layout.join(
            {n: parts[n] if n in parts else zeros_whole(self.named[n], dtype) for n in block.layout.names}
        )

    def direction(
        self, block: Block, means: Mapping[str, Tensor], rates: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """d = (G + damping I)^-1 m by name, and d^T m by name, under the first for all parameters that share a rate.

        A parameter without a gradient counts as one whose gradient is zero, and does not move.
        """
        inverse, names = block.inverse, block.layout.names
        assert inverse is not None
        matrix = self.matrix(block, means, inverse.dtype).to(inverse.dtype)
        solved = inverse.mv(matrix.reshape(-1)).view(block.layout.matrix_shape)
        parts = give_back(block.layout, solved, means)
        if len(parts) == len(names) and len({rates[n] for n in names}) == 1:  # the usual case, without copies
            return parts, {names[0]: inner_product(matrix, solved)}
        return parts, {name: inner_product(means[name], part) for name, part in parts.items()}

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
class WholeMetric:
    """All blocks together, as a damping of the whole metric asks for them: what knows nats and its mean eigenvalue."""

    averages: Averages
    blocks: Mapping[str, Block]
    nats: float

    def mean_eigenvalue(self) -> Tensor:
        """Over all blocks, made once."""
        return self._mean

    @cached_property
    def _mean(self) -> Tensor:
        return torch.as_tensor(self.averages.mean_eigenvalue(self.blocks), dtype=torch.float64)


def invert_block(
    block: Block, operator: Operator, level: float, inverts: bool, prepare: Prepare | None
) -> Block | None:
    """The block with its damped inverse, and with what a rule prepares; None where numbers fail."""
    inverse = robust_inverse(operator, level) if inverts else None
    if inverts and inverse is None:
        return None
    try:
        prepared = {} if prepare is None else prepare(operator, level, block.mean_positions)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        return None
    if not all(bool(torch.isfinite(t.sum())) for t in prepared.values()):
        return None
    kept = None if inverse is None else unpack_operator(pack_operator(inverse))  # as a checkpoint would bring it back
    return replace(block, inverse=kept, level=level, prepared=prepared or block.prepared)


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
        if all(bool(torch.isfinite(t.sum())) for t in leaves(pack_operator(inverse))):
            return inverse
    return None


def measure_change(old: Mapping[str, Tensor], new: Mapping[str, Tensor], share: float) -> Tensor:
    """|M' - M| / |M| in Frobenius norm, the largest over a block's moments; by inner products, without a copy.

    share: the old totals' weight over the new ones', so that M' - M is new - old / share, up to a factor.
    """
    largest = [torch.zeros((), dtype=torch.float64)]
    for key in {"left", "right", "squares", "blocks"} & old.keys() & new.keys():
        if old[key].shape == new[key].shape:
            before = inner_product(old[key], old[key]).double()
            moved = (
                share**2 * inner_product(new[key], new[key]).double()
                - 2 * share * inner_product(new[key], old[key]).double()
                + before
            )
            largest.append(torch.where(before > 0, moved.clamp(min=0) / before, 0).sqrt().to(largest[0].device))
    return torch.stack(largest).max()


def give_back(layout: Layout, solved: Tensor, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """What was solved, by name, for those that have a part here."""
    return {name: part for name, part in layout.split(solved).items() if name in names}


# gradients


def dense(p: Tensor) -> Tensor:
    """p.grad, dense, at least in float32."""
    assert p.grad is not None
    gradient = p.grad.to_dense() if p.grad.is_sparse else gather_whole(p.grad)
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def add_penalty(gradient: Tensor, p: Tensor, l2: float) -> Tensor:
    """The gradient of loss + l2 / 2 |theta|^2."""
    return torch.add(gradient, p, alpha=l2) if l2 else gradient


@dataclass(frozen=True)
class Penalised(Mapping[str, Tensor]):
    """The gradients of loss + l2 / 2 |theta|^2 by name, each made when it is asked for."""

    gradients: Mapping[str, Tensor]
    named: Mapping[str, Tensor]
    strengths: Mapping[str, float] = field(default_factory=dict[str, float])

    def __getitem__(self, name: str) -> Tensor:
        return add_penalty(self.gradients[name], self.named[name], self.strengths.get(name, 0.0))

    def __iter__(self) -> Iterator[str]:
        return iter(self.gradients)

    def __len__(self) -> int:
        return len(self.gradients)


def average_gradient(mean: GradientMean | None, gradient: Tensor, decay: float) -> tuple[Tensor, GradientMean | None]:
    """The gradient's running mean, corrected for its start, and what to keep of it."""
    if decay == 0:
        return gradient, None
    count = 1 if mean is None else mean.count + 1
    value = (1 - decay) * gradient if mean is None else mean.value.lerp(gradient, 1 - decay)
    weight = 1 - decay**count
    # late in a run the weights add up to 1, and nothing is copied
    whole = 1 - weight < torch.finfo(value.dtype).eps / 4
    return (value if whole else value / weight), GradientMean(value, count)


def sum_scalars(scalars: Mapping[str, Tensor]) -> Tensor:
    """The sum of scalar tensors, which may lie apart."""
    parts = list(scalars.values())
    return torch.stack([one.to(parts[0].device) for one in parts]).sum() if parts else torch.zeros(())
