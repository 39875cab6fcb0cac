"""The metric's blocks: running averages, damped inverses, and which process holds which of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from natgrad.ground.pure import leaves, map_tensors
from natgrad.ground.typed_torch import list_numbers, split_tensor, torch_distributed
from natgrad.ground.whole_tensors import gather_whole, naming_lost, wait_for_all, zeros_whole
from natgrad.layers import Layer, Layout, Seen
from natgrad.operators import (
    DiagonalOperator,
    Operator,
    pack_operator,
    split_products,
    stack_products,
    unpack_operator,
)
from natgrad.optim.guard import RAISES, Guard, are_finite
from natgrad.optim.processes import Ranks, send_tree
from natgrad.optim.reading import SOME, Reading, agree_on_parts
from natgrad.optim.state import OWNED, Block, Hearing, State, single
from natgrad.rules import Parts, Rule, inner_product
from natgrad.structures import Layerwise, Statistics, accumulate_statistics, accumulate_weight, exchanging

BUCKET = 2**25
"""Bytes of a message, about: what comes while one is full goes into the next."""
AHEAD = 2**28
"""Bytes that are on their way at most. Then a process waits for the first of them, whose memory it frees."""
STRIPS = 4
"""Strips of rows that a symmetric matrix is sent in, each up to its diagonal block: 5/8 of its entries."""
SMALL = 64
"""Rows of a symmetric matrix below which it is sent as it is: strips would take longer than its bytes."""

FULL = (torch.float32, torch.float64)

Wait = Callable[[], Tensor]


@dataclass
class Message:
    """Entries of one dtype and device for one owner, or for all.

    Attributes:
        kind: The owner (None: all), the dtype and the device.
        entries: Block, entry, the shape that comes out, and its numbers in this message.
        parts: What is sent, in pieces that follow one another.
        numbers: How many there are.
    """

    kind: tuple[int | None, torch.dtype, torch.device]
    entries: list[tuple[str, str, torch.Size, int]] = field(default_factory=list[tuple[str, str, torch.Size, int]])
    parts: list[Tensor] = field(default_factory=list[Tensor])
    numbers: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return self.numbers * self.kind[1].itemsize

    def pack(self) -> Tensor:
        """All parts in one flat tensor; they are let go."""
        flat = torch.empty(self.numbers, dtype=self.kind[1], device=self.kind[2])
        for part, place in zip(self.parts, split_tensor(flat, [p.numel() for p in self.parts]), strict=True):
            place.view(part.shape).copy_(part)
        self.parts.clear()
        return flat


class ArrivingSums:
    """Statistics of one pass on their way to all processes, or to their blocks' owners.

    All processes send the same blocks in the same order. Waiting sends nothing: each may do that when it likes.

    Args:
        ranks: The processes.
        symmetric: The entries whose matrices are symmetric: a part of them is sent.
        deliver: Takes a block's sums, once they are known to be good.
        fine: Whether this process's own part is finite.
    """

    def __init__(
        self,
        ranks: Ranks,
        symmetric: frozenset[str],
        deliver: Callable[[str, dict[str, Tensor]], None],
        fine: bool,
    ) -> None:
        self.ranks, self.symmetric, self.deliver = ranks, symmetric, deliver
        self.bad = start_sum(ranks, torch.tensor(float(not fine), device=ranks.device), "scalars")
        self.taken: bool | None = None
        self.open: dict[Any, Message] = {}
        self.going: deque[tuple[Message, Wait]] = deque()
        self.missing: dict[str, tuple[list[str], dict[str, Tensor]]] = {}

    def send(self, key: str, fresh: Mapping[str, Tensor], owner: int | None) -> None:
        """Send a block's part, with those that come after it."""
        self.missing[key] = list(fresh), {}
        for name, tensor in fresh.items():
            kind = owner, tensor.dtype, tensor.device
            message = self.open.setdefault(kind, Message(kind))
            parts = list(cut_strips(tensor)) if name in self.symmetric else [tensor]
            numbers = sum(part.numel() for part in parts)
            message.entries.append((key, name, tensor.shape, numbers))
            message.parts += parts
            message.numbers += numbers
            if message.size >= BUCKET:
                self._start(self.open.pop(kind))

    def finish(self) -> None:
        """Send what is left."""
        while self.open:
            self._start(self.open.pop(next(iter(self.open))))

    def wait(self) -> bool:
        """Deliver all that is on its way; False where some part was not finite: then nothing is delivered."""
        while self.going:
            self._receive()
        return self._is_good()

    def _start(self, message: Message) -> None:
        self.going.append((message, start_sum(self.ranks, message.pack(), "statistics", message.kind[0])))
        while sum(bucket.size for bucket, _ in self.going) > AHEAD and len(self.going) > 1:
            self._receive()

    def _receive(self) -> None:
        message, wait = self.going.popleft()
        flat = wait()
        if not self._is_good():
            return
        parts = split_tensor(flat, [numbers for *_, numbers in message.entries])
        for (key, name, shape, _), part in zip(message.entries, parts, strict=True):
            names, tensors = self.missing[key]
            tensors[name] = join_strips(part, shape) if name in self.symmetric else part.clone().view(shape)
            if len(tensors) == len(names):  # entries of several dtypes come one after the other
                self.deliver(key, {n: tensors[n] for n in names})
                del self.missing[key]

    def _is_good(self) -> bool:
        if self.taken is None:
            self.taken = not bool(self.bad())
        return self.taken


def start_sum(ranks: Ranks, tensor: Tensor, kind: str, owner: int | None = None) -> Wait:
    """Start `ranks.sum` of a tensor, which is written over. What comes back waits for it."""
    ranks.count(kind, tensor)
    with naming_lost(ranks.group):
        if owner is None:
            work: Any = torch_distributed.all_reduce(tensor, group=ranks.group, async_op=True)
        else:
            work = torch_distributed.reduce(tensor, group=ranks.group, group_dst=owner, async_op=True)

    def wait() -> Tensor:
        with naming_lost(ranks.group):
            work.wait()
        return tensor

    return wait


def list_strips(shape: Sequence[int]) -> list[tuple[int, int]]:
    """First and last row, excluded, of the strips of a symmetric matrix (..., n, n); one strip of a small one."""
    n = shape[-1] if len(shape) > 1 else 0
    count = STRIPS if n >= SMALL else 1
    return [(n * i // count, n * (i + 1) // count) for i in range(count)]


def cut_strips(matrix: Tensor) -> Iterator[Tensor]:
    """The rows of symmetric matrices (..., n, n) in a few strips, each without what lies right of its diagonal block.

    Views of them: nothing is copied.
    """
    if matrix.dim() < 2:
        yield matrix
        return
    for first, last in list_strips(matrix.shape):
        yield matrix[..., first:last, :last]


def join_strips(flat: Tensor, shape: torch.Size) -> Tensor:
    """The symmetric matrices whose strips follow one another.

    shape: (..., n, n); a vector's comes back as it is.
    """
    if len(shape) < 2:
        return flat.clone().view(shape)
    matrix, lead, start = flat.new_empty(shape), shape[:-2], 0
    for first, last in list_strips(shape):
        size = lead.numel() * (last - first) * last
        strip = flat[start : start + size].view(*lead, last - first, last)
        matrix[..., first:last, :last] = strip
        matrix[..., :first, first:last] = strip[..., :first].mT
        start += size
    return matrix


# Which process solves which block: by modelled cost, the dearest first to whoever has the least to do

Exchange = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Solve = Callable[[Callable[[], Tensor], Tensor], Tensor]
BUDGET = 2**32
"""Bytes of state that a process keeps with `share="auto"` before the state is shared out."""
WAYS = ("auto", "speed", "memory")


@dataclass(frozen=True)
class Cost:
    """What a block takes.

    Args:
        work: The sum of n^3 over the matrices that are inverted; its entries where nothing is.
        state: Numbers that are remembered between steps.
    """

    work: float
    state: float


@dataclass
class Owners:
    """Every block has an owner, who alone inverts it.

    Attributes:
        ranks: The processes.
        share: "speed" sends the inverses to all, so that nothing is sent between updates; "memory" leaves a block's
            statistics, inverse and mean gradient with its owner, who sends its direction at every step; "auto" is one
            of them, by the budget.
        budget: Most bytes of state per process with "speed", where share is "auto".
        costs: By block.
        of: The owner's number by block.
        done: Sum of n^3 over all inversions that this process made so far.
    """

    ranks: Ranks
    share: str = "auto"
    budget: int = BUDGET
    costs: dict[str, Cost] = field(default_factory=dict[str, Cost])
    of: dict[str, int] = field(default_factory=dict[str, int])
    done: float = 0.0

    @property
    def is_shared(self) -> bool:
        """True if there is somebody to share with."""
        return self.ranks.size > 1

    @property
    def apart(self) -> bool:
        """True if a block's numbers are its owner's alone."""
        return self.is_shared and self.share == "memory"

    def solves(self, key: str) -> bool:
        """Whether this process inverts a block."""
        return not self.is_shared or self.of.get(key, 0) == self.ranks.rank

    def holds(self, key: str) -> bool:
        """Whether this process remembers a block's numbers."""
        return not self.apart or self.solves(key)

    def assign(self, costs: Mapping[str, Cost], itemsize: int) -> None:
        """Give blocks that have no owner yet to one. All processes call this with the same blocks."""
        fresh = {key: cost for key, cost in costs.items() if key not in self.of}
        self.costs |= fresh
        if not self.is_shared or not fresh:
            return
        if self.share == "auto":
            state = itemsize * sum(cost.state for cost in self.costs.values())
            self.share = "memory" if state > self.budget else "speed"
        self.of |= balance(fresh, self.costs, self.of, self.ranks.size, self.share == "memory")

    def load(self, saved: Mapping[str, Any] | None) -> Owners:
        """The same with the owners of an older checkpoint of one process's part, if that is of as many processes."""
        fresh = replace(self, costs={}, of={})
        if saved and saved["size"] == self.ranks.size:
            fresh.share, fresh.of = saved["share"], dict(saved["of"])
        return fresh

    # statistics

    def exchange(self, key: str) -> tuple[Exchange | None, Solve | None, Exchange | None]:
        """How a block's statistics are added up, how what its owner alone computes comes to all; `exchanging`'s own."""
        if not self.is_shared:
            return None, None, None
        owner = self.of[key]
        return partial(self._sum_statistics, owner), partial(self._solve, owner), self.ranks.sum_entries

    def share_past(self, key: str, own: Statistics | None, needed: bool) -> Statistics | None:
        """A block's totals so far: where its owner alone remembers them and all need them, from it to all."""
        if not (self.apart and needed):
            return own
        return send_tree(self.ranks, own, self.of[key], "statistics")

    def open_sums(
        self, symmetric: frozenset[str], deliver: Callable[[str, dict[str, Tensor]], None], fine: bool
    ) -> ArrivingSums:
        """Statistics of a pass that are sent in messages of many blocks."""
        return ArrivingSums(self.ranks, symmetric, deliver, fine)

    def _sum_statistics(self, owner: int, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums for all processes, or for the owner alone."""
        return self.ranks.sum_entries(fresh, owner if self.apart else None)

    def _solve(self, owner: int, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        solution = make().contiguous() if self.ranks.rank == owner else torch.empty_like(like).contiguous()
        return self.ranks.broadcast(solution, owner, "statistics")

    # inverses

    def share_inverses(self, fresh: Mapping[str, Block], blocks: Mapping[str, Block]) -> dict[str, Block]:
        """With "speed": every block that was inverted, from their owners, one message each.

        The owners' own take the same way: products round by how a matrix lies in memory, and the processes would drift
        apart.
        """
        if not self.is_shared or self.apart:
            return dict(fresh)
        all_blocks = dict[str, Block]()
        for owner in range(self.ranks.size):
            mine = {key: fresh[key] for key in blocks if self.of[key] == owner and key in fresh}
            tree = {
                key: [None if b.inverse is None else pack_operator(b.inverse), dict(b.prepared), b.level]
                for key, b in mine.items()
            }
            for key, (packed, prepared, level) in send_tree(self.ranks, tree, owner, "inverses").items():
                inverse = None if packed is None else unpack_operator(packed)
                all_blocks[key] = replace(blocks[key], inverse=inverse, prepared=prepared, level=level)
        return {key: all_blocks[key] for key in blocks if key in all_blocks}

    # with "memory": what owners found, for all

    def share_scalars(self, scalars: Mapping[str, Any], names: Iterable[str], like: Tensor) -> dict[str, Tensor]:
        """Scalars of which every process has some, by name; without those that nobody has."""
        known = list(names)
        if not self.apart:
            return dict(scalars)
        table = torch.zeros(2, len(known), dtype=torch.float64, device=like.device)
        for i, name in enumerate(known):
            if name in scalars:
                table[0, i], table[1, i] = 1.0, torch.as_tensor(scalars[name]).double()
        there, values = self.ranks.sum(table, "scalars")
        present = [name for name, flag in zip(known, list_numbers(there), strict=True) if flag]
        return {name: values[i].to(like.dtype) for i, name in enumerate(known) if name in set(present)}

    def share_directions(
        self,
        gradients: Mapping[str, Tensor],
        steps: Mapping[str, Tensor],
        slopes: Mapping[str, Tensor],
        levels: Mapping[str, float],
        keys: Mapping[str, str],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
        """The directions, slopes and damping of all blocks by name, from their owners."""
        like = next(iter(gradients.values()))
        all_slopes = self.share_scalars(dict(slopes), keys, like)
        damping = self.share_scalars(dict(levels), keys, like.new_zeros((), dtype=torch.float64))
        moved = self.share_scalars(dict.fromkeys(steps, 1.0), keys, like)
        directions = self.share_parts(dict(steps), {name: gradients[name] for name in moved}, keys)
        return directions, all_slopes, {name: float(level) for name, level in damping.items()}

    def share_parts(
        self, directions: Mapping[str, Tensor], like: Mapping[str, Tensor], keys: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Directions, from the owners to all, in one message of each."""
        results = dict[str, Tensor]()
        for owner in range(self.ranks.size):
            names = [name for name in like if self.of[keys[name]] == owner]
            for kind in dict.fromkeys((like[name].dtype, like[name].device) for name in names):
                those = [name for name in names if (like[name].dtype, like[name].device) == kind]
                sizes = [like[name].numel() for name in those]
                if owner == self.ranks.rank:
                    flat = torch.cat([directions[name].to(kind[0]).reshape(-1) for name in those])
                else:
                    flat = torch.empty(sum(sizes), dtype=kind[0], device=kind[1])
                parts = split_tensor(self.ranks.broadcast(flat, owner, "directions"), sizes)
                results |= {n: part.clone().view_as(like[n]) for n, part in zip(those, parts, strict=True)}
        return {name: results[name] for name in like}


def balance(
    fresh: Mapping[str, Cost], known: Mapping[str, Cost], owners: Mapping[str, int], size: int, state: bool
) -> dict[str, int]:
    """Owners by longest processing time first: the dearest block to the process with the least so far."""
    works, states = (sum(getattr(cost, kind) for cost in known.values()) or 1.0 for kind in ("work", "state"))

    def weigh(cost: Cost) -> float:
        return cost.work / works + state * cost.state / states

    loads = [
        sum(weigh(known[key]) for key, owner in owners.items() if owner == r and key in known) for r in range(size)
    ]
    new_owners = dict[str, int]()
    for key, cost in sorted(fresh.items(), key=lambda pair: (-weigh(pair[1]), pair[0])):
        new_owners[key] = min(range(size), key=lambda r: (loads[r], r))
        loads[new_owners[key]] += weigh(cost)
    return new_owners


def cost_of(layout: Layout, sizes: Iterable[tuple[int, int]] | None) -> Cost:
    """A block's cost.

    sizes: (count, n) of the (n, n) matrices that are inverted; None or none of them for a diagonal.
    """
    groups, outputs, columns = layout.matrix_shape
    entries = float(groups * outputs * columns)
    pairs = list(sizes or ())
    work = sum(count * float(n) ** 3 for count, n in pairs) or entries
    memory = sum(count * float(n) ** 2 for count, n in pairs) or entries
    return Cost(work, 2 * memory + entries)  # the averages, the inverse, the gradient's mean


def check_share(share: Any) -> tuple[str, int]:
    """The way and the budget that an option names. ValueError for anything else."""
    if isinstance(share, int) and not isinstance(share, bool) and share > 0:
        return "auto", share
    if share not in WAYS:
        raise ValueError(
            f'share is {share!r}, expected "speed" (every process keeps all inverses), "memory" (blocks\' numbers are '
            'their owners\' alone), "auto", or a number of bytes of state from which on it is "memory"'
        )
    return share, BUDGET


# What owners alone remember of their blocks, put together for a checkpoint

ALL_CALL = (
    'with share="memory" each process has a part of the state, and state_dict() puts them together: call it on all of '
    "them, and then let one of them write the file"
)


def gather_numbers(owners: Owners, state: State) -> dict[str, dict[str, Any]]:
    """What other processes remember of blocks, by parameter, on the CPU; nothing where this one remembers all.

    All processes ask at the same time. ExchangeError if some process does not ask within five minutes.
    """
    gathered = dict[str, dict[str, Any]]()
    if not owners.apart:
        return gathered
    wait_for_all(owners.ranks.group, "state_dict()", ALL_CALL)
    memory = state.by_parameter()
    for owner in range(owners.ranks.size):
        names = [name for key, block in state.blocks.items() if owners.of[key] == owner for name in block.layout.names]
        own = {name: memory.get(name, {}) for name in names if owner == owners.ranks.rank}
        tree = {name: {key: numbers[key] for key in OWNED if key in numbers} for name, numbers in own.items()}
        tree = send_tree(owners.ranks, tree, owner, "checkpoints")
        if owner != owners.ranks.rank:
            gathered |= {name: map_tensors(part, lambda t: t.cpu()) for name, part in tree.items()}
    return gathered


# A metric in blocks: a pass into the averages, the averages into damped inverses, and what both say of a vector


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
        part: Of the rows that a pass must have, as it came sooner or later than it was due.
        bad: True if a pass came to nothing.
        far: True if that was for a layer's inputs: the step is left out too, since the gradient would stay in the mean.
    """

    blocks: Mapping[str, Block]
    hearing: Hearing
    guard: Guard
    taken: int = 0
    sample: Reading | None = None
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
        blocks = self._assign(update.blocks, reading)
        fresh = list[tuple[Block, Statistics, Count]]()
        for seen, count in self._weigh_layers(reading):
            past = self._totals(blocks, seen.key)
            before = self.owners.share_past(seen.key, past, self.structure.needs_past(seen))
            with exchanging(*self.owners.exchange(seen.key)):
                totals = self.structure.statistics(seen, before, decay)
            fresh.append((Block(seen.layer.layout, seen.layer), totals, count))
        for name, squares, count in self._weigh_squares(reading):
            with exchanging(*self.owners.exchange(name)):
                totals = accumulate_statistics(self._totals(blocks, name, layered=False), squares, decay)
            fresh.append((Block(single(name, self.named[name])), totals, count))
        sound = are_finite([totals.values() if self.owners.holds(block.key) else () for block, totals, _ in fresh])
        for fits, (block, totals, count) in zip(sound, fresh, strict=True):
            if fits:  # an eigendecomposition may have failed
                self._average(blocks, block, totals, decay, count)
        fine = all(sound)
        if self.owners.apart:
            fine = not bool(self._sum([0.0 if fine else 1.0])[0])
        taken = replace(update, blocks=blocks, taken=update.taken + fine)
        return taken.fail(not fine)

    def _send(self, update: BatchUpdate, reading: Reading, decay: float) -> Callable[[], BatchUpdate]:
        """`take` with several processes, whose parts are on their way when it returns."""
        fit, far, guard = update.guard.accept_inputs(reading.layers, reading.squares)
        update = replace(update, guard=guard)
        blocks, coming = self._assign(update.blocks, reading), dict[str, tuple[Block, Count]]()

        def deliver(key: str, fresh: Statistics) -> None:
            block, count = coming.pop(key)
            before = self._totals(blocks, key, block.layer is not None) if self.owners.holds(key) else None
            totals = accumulate_statistics(before, fresh, decay)
            if not self.owners.holds(key) or are_finite([totals.values()])[0]:
                self._average(blocks, block, totals, decay, count)

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
            return replace(update, blocks=blocks, taken=update.taken + 1)

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
    ) -> None:
        """One block's new totals."""
        key, layered = fresh.key, fresh.layer is not None
        if key not in blocks or (blocks[key].layer is not None) != layered:
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

    def _totals(self, blocks: Mapping[str, Block], key: str, layered: bool = True) -> Statistics | None:
        """The sums so far of a layer's block, or of that of a parameter without one."""
        block = blocks.get(key)
        if block is None or (block.layer is not None) != layered or block.totals is None:
            return None
        return dict(block.totals)

    # owners

    def _assign(self, blocks: Mapping[str, Block], reading: Reading) -> dict[str, Block]:
        """An owner for every block of the reading; the blocks without what is another's now."""
        costs = {seen.key: self.cost(seen.layer.layout, seen.layer) for seen in reading.layers}
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

    def mean_eigenvalues(self, blocks: Mapping[str, Block]) -> dict[str, float]:
        """Of every block that this process holds, by one read of the device."""
        held = [block for block in blocks.values() if self.owners.holds(block.key) and block.weight]
        means = [self.operator(block).mean_eigenvalue() for block in held]  # one after another: they are copies
        numbers = (
            list_numbers(torch.stack([mean.to(means[0].device, torch.float64) for mean in means])) if means else []
        )
        return {block.key: number for block, number in zip(held, numbers, strict=True)}

    def mean_over_blocks(self, blocks: Mapping[str, Block], means: Mapping[str, float]) -> float:
        """The mean eigenvalue over all blocks that are trained, of all processes."""
        trained = [b for b in blocks.values() if any(self.named[name].requires_grad for name in b.layout.names)]
        sizes = {block.key: math.prod(block.layout.matrix_shape) for block in trained if block.key in means}
        total, size = sum(means[key] * n for key, n in sizes.items()), float(sum(sizes.values()))
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
        blocks = {key: replace(block, fresh=False) if key in keys else block for key, block in blocks.items()}
        own = {key: blocks[key] for key in blocks if key in keys and self.owners.solves(key) and blocks[key].weight}
        levels = dict.fromkeys(own, 0.0)
        if level_of is not None:
            levels = {key: level_of(block) for key, block in own.items()}
            levels = {key: level for key, level in levels.items() if level > 0}  # else no derivative has reached it yet
        tried, solved = dict[str, Block](), self.invert_alike(own, levels) if inverts else {}
        for key, level in levels.items():
            candidate = self.invert_block(own[key], level, inverts, shaper, known=solved.get(key))
            self.owners.done += self.cost(candidate.layout, candidate.layer).work
            tried[key] = candidate
        sound = are_finite([numbers_of(block) for block in tried.values()])
        fresh = dict[str, Block]()
        for key, fits in zip(tried, sound, strict=True):
            block = tried[key] if fits else self.climb(own[key], levels[key], inverts, shaper)
            if block is not None:
                fresh[key] = block
        failures = len(tried) - len(fresh)
        if self.owners.is_shared:
            failures = int(self._sum([float(failures)])[0])
        return {**blocks, **self.owners.share_inverses(fresh, blocks)}, failures

    def invert_alike(self, blocks: Mapping[str, Block], levels: Mapping[str, float]) -> dict[str, Operator]:
        """(G + damping I)^-1 of the blocks that are factored Kronecker products of one shape, each shape at once."""
        alike, inverses = dict[Any, list[str]](), dict[str, Operator]()
        for key in levels:
            block = blocks[key]
            if block.layer is not None and block.totals is not None:
                shapes = tuple((name, total.shape, total.dtype) for name, total in block.totals.items())
                alike.setdefault((shapes, next(iter(block.totals.values())).device), []).append(key)
        for keys in alike.values():
            if len(keys) < 2:
                continue
            stack = stack_products([self.operator(blocks[key]) for key in keys])
            if stack is None or not stack.factored:
                continue
            damping = torch.tensor([levels[key] for key in keys], dtype=stack.dtype, device=stack.device)
            try:
                inverses |= zip(keys, split_products(stack.factored_inverse(damping)), strict=True)
            except RuntimeError:  # torch.linalg.LinAlgError is one: each by itself
                continue
        return inverses

    def invert_block(
        self,
        block: Block,
        level: float,
        inverts: bool,
        shaper: Rule | None,
        raised: float = 1.0,
        known: Operator | None = None,
    ) -> Block:
        """The block with (G + damping I)^-1, and with what a rule prepares; NaN for both where they cannot be computed.

        raised: what the damping of the inverse is multiplied by. known: the inverse, where it is computed already.
        TypeError where G has no closed-form inverse, or one that cannot be kept (`Operator.pack`).
        """
        try:
            inverse = known
            if inverts and known is None:
                inverse = self.operator(block).inverse(raised * level)
            prepared = {} if shaper is None else self.prepare(block, level, shaper)
        except RuntimeError:  # torch.linalg.LinAlgError is one
            return replace(block, level=math.nan)
        if inverts and inverse is None:
            operator = self.operator(block)
            raise TypeError(f"the structure gave {operator!r}, whose inverse({level:g}) is None: a block needs one")
        # as a checkpoint would bring it back
        inverse = None if inverse is None else unpack_operator(pack_operator(inverse))
        return replace(block, inverse=inverse, level=level, prepared=prepared or block.prepared)

    def prepare(self, block: Block, level: float, shaper: Rule) -> dict[str, Tensor]:
        """What the rule's directions need of a block: of its inputs where they are known, else of its metric."""
        known = None
        if block.layer is not None and block.totals is not None:
            known = self.structure.inputs(block.layer, dict(block.totals), block.weight)
        prepared = None if known is None else shaper.prepare_inputs(*known, block.mean_positions)
        return shaper.prepare(self.operator(block), level) if prepared is None else prepared

    def climb(self, block: Block, level: float, inverts: bool, shaper: Rule | None) -> Block | None:
        """The block with an inverse of more damping, up to 1e4 times; None where nothing helps."""
        for raised in RAISES[1:] if inverts else ():
            candidate = self.invert_block(block, level, inverts, shaper, raised)
            if are_finite([numbers_of(candidate)])[0]:
                return candidate
        return None

    # vectors

    def matrix(self, block: Block, parts: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Parts of a block as its layer's matrix; a parameter without a part counts as zero."""
        return block.layout.join(
            {n: parts[n] if n in parts else zeros_whole(self.named[n], dtype) for n in block.layout.names}
        )

    def direction(
        self, block: Block, mean: Tensor, names: Collection[str], rates: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """d = (G + damping I)^-1 m by name, and d^T m by name, under the first for all parameters that share a rate.

        A parameter without a gradient counts as one whose gradient is zero, and does not move.

        mean: m as the block's matrix. names: those with a gradient.
        """
        inverse, own = block.inverse, block.layout.names
        assert inverse is not None
        matrix = mean.to(inverse.dtype)
        solved = inverse.mv(matrix.reshape(-1)).view(block.layout.matrix_shape)
        parts = give_back(block.layout, solved, names)
        if len(parts) == len(own) and len({rates[n] for n in own}) == 1:  # the usual case, without copies
            return parts, {own[0]: inner_product(matrix, solved)}
        means = block.layout.split(matrix)
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


class BlockScales:
    """What a damping asks of the metric: nats, and the mean eigenvalue of a block or of all. Made when first asked for.

    Args:
        averages: The blocks' metric.
        blocks: By key.
        nats: Per example in one unit of the mean loss.
    """

    def __init__(self, averages: Averages, blocks: Mapping[str, Block], nats: Any) -> None:
        self.averages, self.blocks, self.nats = averages, blocks, nats

    @cached_property
    def means(self) -> dict[str, float]:
        """The blocks' mean eigenvalues."""
        return self.averages.mean_eigenvalues(self.blocks)

    @cached_property
    def mean(self) -> float:
        """Of all blocks. All processes ask for it together."""
        return self.averages.mean_over_blocks(self.blocks, self.means)

    def of(self, key: str | None = None) -> KnownScale:
        """The scale of one block, or of all."""
        return KnownScale(self.nats, lambda: self.mean if key is None else self.means[key])


@dataclass(frozen=True)
class KnownScale:
    """A part of a metric as a damping sees it."""

    nats: Any
    mean: Callable[[], float]

    def mean_eigenvalue(self) -> float:
        """Trace over n."""
        return self.mean()


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


def give_back(layout: Layout, solved: Tensor, names: Collection[str]) -> dict[str, Tensor]:
    """What was solved, by name, for those that have a part here."""
    return {name: part for name, part in layout.split(solved).items() if name in names}


# gradients


def dense(p: Tensor) -> Tensor:
    """p.grad, dense, at least in float32."""
    assert p.grad is not None
    gradient = p.grad.to_dense() if p.grad.is_sparse else gather_whole(p.grad)
    return gradient if gradient.dtype in FULL else gradient.to(torch.promote_types(gradient.dtype, torch.float32))


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


def join_scalars(scalars: Mapping[str, Tensor]) -> Tensor:
    """Scalar tensors, which may lie apart, in their order: shape (k,)."""
    parts = list(scalars.values())
    return torch.stack([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)


def sum_scalars(scalars: Mapping[str, Tensor]) -> Tensor:
    """The sum of scalar tensors, which may lie apart."""
    return join_scalars(scalars).sum()
