"""What is carried from one step to the next, and how that of blocks is written to and read from a checkpoint."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from natgrad.families import Criterion, Gaussian, Huber, Laplace
from natgrad.families.criteria import Entrywise
from natgrad.ground.constants import KEEPS, ROUND_OFF, STANDARD, UNKNOWN, UNKNOWN_SHARE
from natgrad.ground.graph_nodes import RESHAPES, THROUGH, kind_of
from natgrad.ground.pure import leaves, map_tensors
from natgrad.ground.spaces import Space
from natgrad.ground.typed_torch import hook_gradient, list_numbers, measure_norms
from natgrad.ground.whole_tensors import gather_whole, wait_for_all, zeros_whole
from natgrad.layers import Layer, Tap, is_asking
from natgrad.operators import Layout, Operator, pack_operator, unpack_operator
from natgrad.optim.checkpoint import own_copy
from natgrad.optim.guard import COUNTS, Guard
from natgrad.optim.processes import Owners, Processes
from natgrad.rules import ErrorScale

Density = Gaussian | Laplace | Huber


@dataclass(frozen=True)
class ErrorSize:
    """The unit of a regression's targets, for bounds that would else depend on it.

    Squared errors stand for a Gaussian of fixed width, absolute ones for Laplace's density. Targets in units of their
    own (prices, grams) may lie a thousand widths away, and layers that start at a size of one have as far to go.
    """

    names: tuple[str, ...]  # parameters of the layers whose outputs are the model's
    entries: int  # outputs of one row of the likelihood
    density: Density = Gaussian()  # of the errors

    def scale(self, loss: Tensor | float) -> ErrorScale:
        """The root of the mean squared error in units of two standard deviations of the likelihood, at least 1."""
        nats = float(loss) / self.entries
        size = max(1.0, self.density.error_of(nats) / STANDARD) if 0 < nats < math.inf else 1.0
        return ErrorScale(size, self.names, squares=self.squares)

    @property
    def squares(self) -> bool:
        """True if the square of a score grows with the loss: where errors of more than one width are squared."""
        return isinstance(self.density, Gaussian) or (isinstance(self.density, Huber) and self.density.delta > 1)

    def save(self) -> list[Any]:
        """As plain values for a checkpoint."""
        return [list(self.names), self.entries]

    @staticmethod
    def load(saved: Sequence[Any] | None, criterion: Criterion) -> ErrorSize | None:
        """From `save`; None for None."""
        if saved is None or criterion.errors is None:
            return None
        return ErrorSize(tuple(saved[0]), saved[1], criterion.errors)


def find_error_size(criterion: Criterion, outputs: Any, calls: Iterable[Tap]) -> ErrorSize:
    """What a pass tells of a regression's units."""
    ends = trace_reshapes(outputs) if isinstance(outputs, Tensor) else []
    nodes = {call.edge.node: call.layer.layout.names for call in calls if call.edge is not None}
    names = next((nodes[node] for node in ends if node in nodes), ())
    by_row = isinstance(outputs, Tensor) and not isinstance(criterion.family, Entrywise)
    entries = max(1, outputs.shape[1:].numel()) if by_row else 1  # of an empty part too
    assert criterion.errors is not None
    return ErrorSize(names, entries, criterion.errors)


def trace_reshapes(outputs: Tensor) -> list[Any]:
    """The nodes of a graph from its end to the first one that is more than another shape of the same numbers."""
    node, number, nodes = outputs.grad_fn, outputs.output_nr, list[Any]()
    while node is not None:
        nodes.append(node)
        if kind_of(node) not in RESHAPES | THROUGH:
            break
        node, number = node.next_functions[number if kind_of(node) in THROUGH else 0]
    return nodes


# The part of a gradient that did not come from `opt.loss`, and the damping that keeps steps along it bounded


@dataclass(frozen=True)
class OutsideLosses:
    """What losses that the metric does not know of do to each block, and the curvature that was seen of them.

    The step (G + damping I)^-1 m is as long as 1 / damping along directions that only another loss depends on, where G
    is zero. A block that such a loss reaches gets an absolute damping besides: its own in units of the mean eigenvalue
    over all blocks, and the other loss's curvature along the way of the parameters between two measurements.
    """

    # the curvature by parameter of the blocks that another loss reaches; those of a block are equal
    levels: Mapping[str, float] = field(default_factory=dict[str, float])
    # updates of the statistics so far: some of them ask for such a loss, and all once there is one
    updates: int = 0
    # the parameters and the other loss's gradient at the last measurement, by parameter
    last: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict[str, tuple[Tensor, Tensor]])
    warned: bool = False  # True once the user was told

    @property
    def asks(self) -> bool:
        """Whether the next update looks for other losses."""
        return bool(self.levels) or is_asking(self.updates)

    def damping(self, name: str, level: float) -> float:
        """What a parameter's block gets besides its own damping, whose group's is `level` over all blocks."""
        return level + self.levels[name] if name in self.levels else 0.0

    def change(self, name: str, p: Tensor, move: Tensor) -> float:
        """How the other losses change as a parameter moves, by what the last measurement told."""
        place, slope = self.last[name]
        level = self.levels[name]
        slope = slope.to(p) + level * (p - place.to(p))
        return float((slope * move).sum() + level / 2 * move.square().sum())

    def measure(
        self,
        own: OwnGradients,
        gradients: Mapping[str, Tensor],
        named: Mapping[str, Tensor],
        blocks: Sequence[Sequence[str]],
        losses: int,
        unit: float,
        processes: Processes,
        doubt: Callable[[], None],
    ) -> OutsideLosses:
        """The blocks that a loss besides `opt.loss` reaches, and its curvature there.

        own: what `opt.loss` put into the gradient. gradients: the whole one, in any unit: it may have been unscaled, or
        clipped by its norm. losses: how many went backward; nothing is known unless all of them were listened to. unit:
        what the gradients were divided by. doubt: called before the first warning of such a loss; raises where the
        gradient has another reason.
        """
        known, asks = own.counted == losses, self.asks
        asked, parts, updates = own.counted > 0 and known, own.sums, self.updates + 1
        if processes.size > 1 and asks:  # as all of them listen or none
            flags = torch.tensor([float(asked), float(not known)], device=next(iter(gradients.values())).device)
            some, unknown = list_numbers(processes.sum(flags))
            asked = some > 0 and not unknown
            if asked:
                parts = processes.average(
                    {n: parts[n].to(g) if n in parts else torch.zeros_like(g) for n, g in gradients.items()}
                )
        if not asked:
            return replace(self, updates=updates)
        parts = {n: parts[n].to(g) / unit if n in parts else torch.zeros_like(g) for n, g in gradients.items()}
        overlaps = measure_overlaps(parts, gradients)
        held = find_held(overlaps)
        for name in held:
            overlaps[name] = overlaps[name]._replace(own=overlaps[name].own - overlaps[name].lost)
            parts[name] = torch.where(gradients[name] == 0, 0, parts[name])
        if held and not self.warned:
            warnings.warn(
                f"the gradient of {held} is zero in entries where that of optimizer.loss is not, as a mask makes it: "
                "the metric ties entries together, and the step moves these too. Write their values back after each "
                "optimizer.step(), or make them parameters of their own and give params= without them",
                stacklevel=2,
            )
        inner, square = sum(part.inner for part in overlaps.values()), sum(part.own for part in overlaps.values())
        scale = max(inner / square, 0.0) if square > 0 else 0.0  # that brings s own nearest to the gradients
        reached = find_outside_blocks(overlaps, scale, blocks)
        plain = find_outside_blocks(overlaps, 1.0, blocks) if reached else []
        if len(plain) < len(reached) or scale > 0.5:  # the other part leans on the fit: nothing was scaled
            scale, reached = 1.0, plain
        levels, last = dict[str, float](), dict[str, tuple[Tensor, Tensor]]()
        for names in reached:
            now = {n: (named[n].to(gradients[n], copy=True), gradients[n] - scale * parts[n]) for n in names}
            faded = KEEPS * max(self.levels.get(name, 0.0) for name in names)
            levels |= dict.fromkeys(names, max(curvature_between(self.last, now), faded))
            last |= now
        if reached and not (held or self.warned):
            doubt()
            warnings.warn(
                f"a large part of the gradient of {sorted(levels)} did not come from optimizer.loss: the metric "
                "does not know of it, and steps are damped more there. Give all of the loss to optimizer.loss: several "
                "outputs by ng.Heads (a KL term by ng.GaussianPosterior), a penalty on squares by l2=; or call "
                "ng.hessian_free and its like with all of it: optimizer.step(closure), whose closure returns the sum",
                stacklevel=2,
            )
        return OutsideLosses(levels, updates, last, self.warned or bool(held or reached))

    def save(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"levels": dict(self.levels), "last": {name: list(pair) for name, pair in self.last.items()}}

    @staticmethod
    def load(saved: Mapping[str, Any] | None, named: Mapping[str, Tensor], updates: int, warned: bool) -> OutsideLosses:
        """From `save()`, on the parameters' devices; None in older checkpoints."""
        if saved is None:
            return OutsideLosses(updates=updates, warned=warned)
        last = {
            name: (place.to(named[name].device, copy=True), slope.to(named[name].device, copy=True))
            for name, (place, slope) in saved["last"].items()
            if name in named
        }
        return OutsideLosses(dict(saved["levels"]), updates, last, warned)


class OwnGradients:
    """The gradients of the losses that `opt.loss` computed, counted as they go backward: all else is outside.

    Attributes:
        sums: By parameter.
        counted: Losses in them.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the losses of a step."""
        self.sums: dict[str, Tensor] = {}
        self.counted = 0

    def listen(
        self, criterion: Criterion, outputs: Any, targets: Any, value: Tensor, named: Mapping[str, Tensor]
    ) -> None:
        """Take the gradient of a loss apart, at one backward pass, and count it once the loss goes backward."""
        wanted = {name: p for name, p in named.items() if p.requires_grad}
        scale = criterion.scale(map_tensors(outputs, torch.detach), targets)
        tensors = list(leaves(outputs))
        pairs = zip(tensors, leaves(criterion.slope(outputs, targets)), strict=True)
        reached = [(out, scale * slope) for out, slope in pairs if out.requires_grad]
        heads, cotangents = [out for out, _ in reached], [slope for _, slope in reached]
        if not heads or not wanted:
            return
        try:  # from the outputs: the loss itself would take this for the user's backward pass
            slopes = torch.autograd.grad(heads, list(wanted.values()), cotangents, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a graph that goes backward once only: nothing is asked then
            return
        known = {
            name: gather_whole(slope).to_dense()
            for name, slope in zip(wanted, slopes, strict=True)
            if slope is not None
        }
        me = weakref.ref(self)

        def count(cotangent: Tensor) -> None:
            own = me()
            if own is not None:
                own.add(known, cotangent.detach())

        hook_gradient(value, count)

    @torch.no_grad()
    def add(self, known: Mapping[str, Tensor], weight: Tensor) -> None:
        """Count a loss's gradient as part of the whole one."""
        own = self.sums
        self.sums = own | {n: weight * g + own[n] if n in own else weight * g for n, g in known.items()}
        self.counted += 1


class Overlap(NamedTuple):
    """What a parameter's own gradient and its whole one have in common.

    Attributes:
        own: |k|^2 of the own one.
        whole: |g|^2 of the whole one.
        inner: k . g.
        lost: |k|^2 over the entries where g is zero.
    """

    own: float
    whole: float
    inner: float
    lost: float


def measure_overlaps(own: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Overlap]:
    """The overlaps by parameter, by one read of the device."""
    pairs = [(own[name], g) for name, g in gradients.items()]
    norms = measure_norms([k for k, _ in pairs] + [g for _, g in pairs])
    norms += measure_norms([torch.where(g == 0, k, 0) for k, g in pairs]) + [(k * g).sum() for k, g in pairs]
    table = [norm.to(norms[0].device) for norm in norms]
    rows = list_numbers(torch.stack(table).view(4, -1).mT) if table else []
    parts = zip(gradients, rows, strict=True)
    return {name: Overlap(k * k, g * g, inner, lost * lost) for name, (k, g, lost, inner) in parts}


def find_held(overlaps: Mapping[str, Overlap]) -> list[str]:
    """The parameters of whose own gradients a part was set to zero."""
    least = ROUND_OFF**2 * sum(part.own for part in overlaps.values())
    return [name for name, part in overlaps.items() if part.lost > max(UNKNOWN_SHARE**2 * part.own, least)]


def find_outside_blocks(
    overlaps: Mapping[str, Overlap], scale: float, blocks: Sequence[Sequence[str]]
) -> list[list[str]]:
    """The blocks of whose gradients a part is left when scale * own is taken away."""
    outside = list[list[str]]()
    for block in blocks:
        names, rest, whole = [name for name in block if name in overlaps], 0.0, 0.0
        for name in names:
            part = overlaps[name]
            rest += part.whole - 2 * scale * part.inner + scale**2 * part.own
            whole += part.whole
        if rest > UNKNOWN_SHARE**2 * whole:
            outside.append(names)
    return outside


def curvature_between(last: Mapping[str, tuple[Tensor, Tensor]], now: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """Curvature along the way between two (parameters, gradient) of a block: move^T (change of gradient) / |move|^2.

    At the first measurement that from the origin, as if the gradient were in proportion to the parameters: right for a
    penalty on their squares.
    """
    if not all(name in last for name in now):
        rest = sum(float(gradient.square().sum()) for _, gradient in now.values())
        size = sum(float(place.square().sum()) for place, _ in now.values())
        return (rest / size) ** 0.5 if size > 0 else 0.0
    rise = length = 0.0
    for name, (place, gradient) in now.items():
        move = place - last[name][0].to(place)
        rise += float((move * (gradient - last[name][1].to(gradient))).sum())
        length += float(move.square().sum())
    return max(rise / length, 0.0) if length > 0 else 0.0


# All that the next step depends on, as one frozen value, and the form in which torch saves it per parameter

Numbers = dict[str, Any]
RULE = "rule"
"""Where the rule's vectors lie in a parameter's saved state."""
MISFIT = "the statistics in state_dict do not fit the block of {}"


@dataclass(frozen=True)
class Block:
    """One layer, or one parameter without a layer, between steps."""

    layout: Layout  # its matrix
    layer: Layer | None = None  # None for a parameter without one
    totals: Mapping[str, Tensor] | None = None  # running sums of its statistics; None where another process has them
    weight: float = 0.0  # what the sums are divided by
    positions: float = 0.0  # running sum of the examples times positions that it saw
    readings: float = 0.0  # what that is divided by; 0 where nothing is known
    inverse: Operator | None = None  # its damped inverse
    level: float | None = None  # the damping of the last inversion; None before
    # what the rule made of the block's metric then
    prepared: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    fresh: bool = True  # True until it was to be inverted once

    @property
    def key(self) -> str:
        """Its parameters, as one string."""
        return self.layout.names[0] if self.layer is None else self.layer.key

    @property
    def outputs(self) -> int:
        """The layer's outputs, or the rows of a parameter without a layer."""
        return self.layout.all_outputs if self.layer is not None else (self.layout.shape or (1,))[0]

    @property
    def mean_positions(self) -> float:
        """Examples times positions of a step; infinite where nothing is known."""
        return self.positions / self.readings if self.readings else math.inf

    def save(self) -> Numbers:
        """As tensors and plain values."""
        numbers: Numbers = {} if self.totals is None else {"totals": dict(self.totals), "weight": self.weight}
        if self.readings:
            numbers |= {"positions": self.positions, "readings": self.readings}
        if self.level is not None:
            numbers["level"] = self.level
        if self.fresh:
            numbers["fresh"] = True
        if self.inverse is not None:
            numbers["inverse"] = pack_operator(self.inverse)
        return numbers | ({"prepared": dict(self.prepared)} if self.prepared else {})

    @staticmethod
    def load(layout: Layout, layer: Layer | None, saved: Mapping[str, Any]) -> Block:
        """From `save()`."""
        return Block(
            layout,
            layer,
            saved.get("totals"),
            saved.get("weight", 0.0),
            saved.get("positions", 0.0),
            saved.get("readings", 0.0),
            unpack_operator(saved["inverse"]) if "inverse" in saved else None,
            saved.get("level"),
            saved.get("prepared", {}),
            saved.get("fresh", False),
        )


Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset of a parameter in the memory of a stack."""


@dataclass(frozen=True)
class Stack:
    """k blocks whose matrices are alike, with what changes at every step: tensors with a leading axis of k."""

    blocks: tuple[Block, ...]  # as they were arranged
    names: tuple[str, ...] = ()  # those of their parameters that have gradients, block after block
    # the running means of their gradients, without the correction for its start; None before
    mean: Tensor | None = None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])  # gradients in that mean, by parameter
    # what the rule made of the blocks' metrics
    prepared: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    memory: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # what the rule remembers of them
    # where the parameters lie in the memory of such a tensor; None where they are copied
    places: Sequence[Place] | None = None
    inverse: Operator | None = None  # the blocks' inverses as one operator; None where each is by itself
    even: bool = False  # True if its parameters have gradients, as many so far, and one momentum

    def split(self) -> Iterator[Stack]:
        """The blocks one by one."""
        for i, block in enumerate(self.blocks):
            mean = None if self.mean is None else self.mean[i : i + 1]
            counts = {name: self.counts[name] for name in block.layout.names if name in self.counts}
            memory = {name: tensor[i : i + 1] for name, tensor in self.memory.items()}
            yield Stack((block,), (), mean, counts, {}, memory)

    def list_means(self) -> Iterator[tuple[str, Numbers]]:
        """The running mean of each parameter, and how many gradients are in it."""
        for block, mean in zip(self.blocks, () if self.mean is None else self.mean.unbind(), strict=False):
            for name, part in block.layout.split(mean).items():
                if name in self.counts:
                    yield name, {"count": self.counts[name], "mean": part}

    def join_means(self, parts: Mapping[str, Mapping[str, Any]], named: Mapping[str, Tensor]) -> Stack:
        """That of one block, with the running mean that these parameters have; as it is where none has one."""
        layout = self.blocks[0].layout
        known = {name: parts[name] for name in layout.names if "mean" in parts.get(name, {})}
        if not known:
            return self
        like: Tensor = next(iter(known.values()))["mean"]
        means = {
            name: known[name]["mean"] if name in known else zeros_whole(named[name], like.dtype)
            for name in layout.names
        }
        counts = {name: part["count"] for name, part in known.items()}
        return replace(self, mean=layout.join(means).unsqueeze(0), counts=counts)


@dataclass(frozen=True)
class Stacks:
    """The blocks in stacks."""

    parts: tuple[Stack, ...] = ()  # those that take part in steps
    rest: tuple[Stack, ...] = ()  # those of which nothing can be done yet, or that have no gradient, one by one
    blocks: Mapping[str, Block] | None = None  # what they were arranged from; None where they must be arranged anew
    key: tuple[Any, ...] = ()  # what else that depended on
    levels: Mapping[str, float] = field(default_factory=dict[str, float])  # the damping of the parts, by parameter

    def by_key(self) -> dict[str, Stack]:
        """The blocks one by one, by their keys."""
        return {single.blocks[0].key: single for stack in (*self.parts, *self.rest) for single in stack.split()}

    def select(self, fits: Callable[[Block], bool]) -> Stacks:
        """Those of some blocks, to be arranged anew."""
        return Stacks(rest=tuple(single for single in self.by_key().values() if fits(single.blocks[0])))

    def map(self, function: Callable[[Stack], Stack]) -> Stacks:
        """The blocks one by one with a function of each, to be arranged anew."""
        return Stacks(rest=tuple(map(function, self.by_key().values())))


BLOCK_ENTRIES = ("totals", "weight", "positions", "readings", "inverse", "level", "prepared", "shape", "fresh")
OWNED = (*BLOCK_ENTRIES, "mean", "count")
"""What a process remembers of its own blocks alone, where their numbers are their owners'."""


@dataclass(frozen=True)
class Pace:
    """The steps at which what is not done at every step was done last, -1 before."""

    updated: int = -1  # statistics were read
    inverted: int = -1  # blocks were inverted
    measured: int = -1  # the length of a step was measured on a pass
    judged: int = -1  # the damping compared the loss with its promise


@dataclass(frozen=True)
class Length:
    """What is known of the metric along steps."""

    # d^T G d over what the blocks promise of it, as it was measured last, `Step.excess`; None before
    excess: float | None = None
    falls: bool = False  # True if that measurement was far below the excess that it left
    fallen: float = 1.0  # the metric as measured over its running averages, at most 1
    doubt: float = UNKNOWN  # how many times the estimate of a step's KL may be too small
    compared: int = 0  # the step at which a step's KL was measured on its own batch last


@dataclass(frozen=True)
class Noise:
    """What a rule knows that turns to directions of its own, as where mini-batch noise exceeds the gradient."""

    turned: int = -1  # the step of the turn, -1 before
    # running sums of |m|^2, |g|^2 and of what |m|^2 would be for gradients that are noise alone
    signal: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def share(self) -> float:
        """(M - Z) / (G - Z), the share of signal in the gradients, of the sums M, G and Z; 1 where nothing is known."""
        mean, single, chance = self.signal
        return (mean - chance) / (single - chance) if single > chance else 1.0


@dataclass(frozen=True)
class Hearing:
    """Which layers explain their parameters' gradients, and where the drawing of labels stands."""

    trusted: frozenset[str] = frozenset()  # claims of the layers that do
    refused: frozenset[str] = frozenset()  # claims of those that do not
    # parameters without statistics for whose sake a pass was read that was not due: once each
    tried: frozenset[str] = frozenset()
    readings: int = 0  # passes that were read so far
    unsure: bool = False  # True if a layer met a zero gradient, which explains anything
    labels: Tensor | None = None  # the state of the generator that draws labels; None before the first draw
    errors: ErrorSize | None = None  # what is known of the unit of a regression's targets
    error: float = 0.0  # the highest loss of a regression
    places: Mapping[str, Any] = field(default_factory=dict[str, Any])  # where examples run, as `KnownPlaces` found


@dataclass(frozen=True)
class SystemMemory:
    """What is known of a metric that is one linear system.

    Attributes:
        level: The damping's own number.
        structure: The structure's memory; None before the first step.
        preconditioner: The preconditioner's.
    """

    level: float = 0.0
    structure: dict[str, Any] | None = None
    preconditioner: dict[str, Any] | None = None


@dataclass(frozen=True)
class State:
    """All that the next step depends on, besides parameters, groups and the batch.

    Attributes:
        step: Steps so far.
        seen: Examples, where somebody counts them.
        blocks: Of a metric in blocks, by key.
        stacks: The same blocks with what changes at every step, those that are alike together.
        system: Of a metric that is one linear system.
        vectors: By parameter and name: what the rule and the system remember.
        pace: When what was done last.
        length: What is known of the metric along steps.
        noise: Whether mini-batch noise exceeds the gradient.
        hearing: Which layers are trusted, and the source of labels.
        outside: Losses that the metric does not know of.
        guard: What keeps bad batches from doing harm.
    """

    step: int = 0
    seen: int = 0
    blocks: Mapping[str, Block] = field(default_factory=dict[str, Block])
    stacks: Stacks = Stacks()
    system: SystemMemory = SystemMemory()
    vectors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict[str, Mapping[str, Tensor]])
    pace: Pace = Pace()
    length: Length = Length()
    noise: Noise = Noise()
    hearing: Hearing = Hearing()
    outside: OutsideLosses = OutsideLosses()
    guard: Guard = Guard()

    @property
    def is_turned(self) -> bool:
        """Whether the rule has turned to directions of its own."""
        return self.noise.turned >= 0

    def gather(self, space: Space) -> dict[str, Tensor]:
        """The vectors, (n,) each.

        Args:
            space: The order of the parameters in them.
        """
        held = {name: self.vectors.get(name, {}) for name in space.blocks}
        keys = {key for vectors in held.values() for key in vectors}
        return {key: space.flatten({n: vectors[key] for n, vectors in held.items() if key in vectors}) for key in keys}

    # torch's per-parameter form, and back

    def by_parameter(self) -> dict[str, Numbers]:
        """What is kept of each parameter, by name; a block's numbers lie under its first one."""
        entries: dict[str, Numbers] = {}
        for name, vectors in self.vectors.items():
            entries.setdefault(name, {})[RULE] = dict(vectors)
        for block in self.blocks.values():
            entries.setdefault(block.layout.names[0], {}).update(block.save())
        for key, single in self.stacks.by_key().items():
            if key in self.blocks:
                if single.memory:
                    entries[self.blocks[key].layout.names[0]]["shape"] = {n: t[0] for n, t in single.memory.items()}
                for name, numbers in single.list_means():
                    entries.setdefault(name, {}).update(numbers)
        return entries

    def save(self) -> Numbers:
        """The rest: plain values and tensors."""
        counts = {name: getattr(self.guard, name) for name in COUNTS}
        clock = {"step": self.step, "seen": self.seen, **counts, **vars(self.pace), **vars(self.noise)}
        clock |= {name: value for name, value in vars(self.length).items() if name not in ("excess", "falls")}
        clock |= {"error": self.hearing.error, "sizes": [self.guard.square, self.guard.weight]}
        hearing = self.hearing
        return {
            "clock": clock | {"signal": list(self.noise.signal)},
            "blocks": {key: list(block.layout.names) for key, block in self.blocks.items()},
            "trusted": sorted(hearing.trusted),
            "refused": sorted(hearing.refused),
            "tried": sorted(hearing.tried),
            "places": [[key, *found] for key, found in hearing.places.items()],
            "heard": [hearing.readings, hearing.unsure, self.outside.updates, self.outside.warned],
            # always a tensor, which a fresh one's can take
            "ratio": torch.tensor(self.length.excess or 0.0, dtype=torch.float64),
            "errors": None if hearing.errors is None else hearing.errors.save(),
            "outside": self.outside.save(),
            "damping": self.system.level,
            "memory": self.system.structure or {},
            "preconditioner": self.system.preconditioner or {},
            **self.guard.save(),
        }

    @staticmethod
    def load(extra: Mapping[str, Any], criterion: Any, labels: Tensor | None, named: Mapping[str, Tensor]) -> State:
        """From `save()`, without what is kept by parameter; entries that older checkpoints lack are as at the start.

        Args:
            extra: What that returned.
            criterion: The loss, for the unit of a regression's targets.
            labels: The state of the generator that draws labels.
            named: The parameters.
        """
        # up to format 2 a linear system had no clock of its own
        clock: Mapping[str, Any] = extra["clock"] if "clock" in extra else {"step": extra["steps"], **extra}
        step, first = clock["step"], next(iter(named.values()))
        memory, prepared = (own_copy(extra.get(key) or {}, first) or None for key in ("memory", "preconditioner"))

        def part(kind: type, **known: Any) -> Any:
            return kind(**{entry.name: clock[entry.name] for entry in fields(kind) if entry.name in clock} | known)

        counts = {name: clock[name] for name in COUNTS if name in clock}
        square, weight = clock.get("sizes", (0.0, 0.0))
        readings, unsure, updates, warned = extra.get("heard", (0, False, step, False))
        hearing = Hearing(
            frozenset(extra.get("trusted", ())),
            frozenset(extra["refused"]) if "clock" in extra else frozenset(),
            frozenset(extra.get("tried", ())),
            readings,
            unsure,
            labels,
            ErrorSize.load(extra.get("errors"), criterion),
            clock.get("error", 0.0),
            {key: found for key, *found in extra.get("places", ())},
        )
        return State(
            step,
            clock.get("seen", 0),
            system=SystemMemory(extra.get("damping", 0.0), memory, prepared),
            pace=part(Pace),
            length=part(Length, excess=float(extra.get("ratio", 0.0)) or None),
            noise=part(Noise, signal=tuple(clock.get("signal", (0.0, 0.0, 0.0)))),
            hearing=hearing,
            outside=OutsideLosses.load(extra.get("outside"), named, updates, warned),
            guard=Guard.load(extra.get("wild"), extra.get("inputs"), **counts, square=square, weight=weight),
        )


def read_parameters(
    state: State,
    saved: Mapping[str, Mapping[str, Any]],
    blocks: Mapping[str, Sequence[str]],
    layers: Mapping[tuple[str, ...], Layer],
    named: Mapping[str, Tensor],
    operator: Callable[[Block], Operator],
    holds: Callable[[str], bool],
) -> State:
    """The state with what a checkpoint has by parameter. ValueError for a block whose numbers are missing or unfit.

    blocks: key -> names. layers: the trusted ones, by their names. holds: True for a key whose numbers must be here.
    """
    read_blocks, singles = dict[str, Block](), list[Stack]()
    for key, names in blocks.items():
        first = named.get(names[0])
        if first is not None and not first.requires_grad and "totals" not in saved.get(names[0], {}):
            continue  # torch.distributed.checkpoint leaves the state of frozen parameters behind
        try:
            layer = layers.get(tuple(names))
            layout = single(names[0], named[names[0]]) if layer is None else layer.layout
            block = Block.load(layout, layer, saved[names[0]])
            sizes = set[int]()
            if block.totals is not None or holds(key):
                sizes = {part.size for part in (operator(block), block.inverse) if part is not None}
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{MISFIT.format(list(names))}: {type(error).__name__}, {error}") from error
        if sizes and sizes != {math.prod(block.layout.matrix_shape)}:
            raise ValueError(
                f"{MISFIT.format(list(names))}, of {math.prod(block.layout.matrix_shape)} entries: {sizes}"
            )
        read_blocks[key] = block
        if holds(key):
            memory = {name: tensor.unsqueeze(0) for name, tensor in saved[names[0]].get("shape", {}).items()}
            singles.append(Stack((block,), memory=memory).join_means(saved, named))
    vectors = {name: part[RULE] for name, part in saved.items() if RULE in part}
    return replace(state, blocks=read_blocks, stacks=Stacks(rest=tuple(singles)), vectors=vectors)


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
    wait_for_all(owners.processes.group, "state_dict()", ALL_CALL)
    memory = state.by_parameter()
    for owner in range(owners.processes.size):
        names = [name for key, block in state.blocks.items() if owners.of[key] == owner for name in block.layout.names]
        own = {name: memory.get(name, {}) for name in names if owner == owners.processes.rank}
        tree = {name: {key: numbers[key] for key in OWNED if key in numbers} for name, numbers in own.items()}
        tree = owners.processes.send_tree(tree, owner, "checkpoints")
        if owner != owners.processes.rank:
            gathered |= {name: map_tensors(part, lambda t: t.cpu()) for name, part in tree.items()}
    return gathered


def single(name: str, p: Tensor) -> Layout:
    """The layout of a parameter without a layer."""
    return Layout(name, None, 1, 1, p.numel(), tuple(p.shape))


def move_state(state: State, named: Mapping[str, Tensor], changed: Sequence[str]) -> State:
    """The state in the dtypes and on the devices that these parameters have now; float32 for half precision."""

    def follow(tree: Any, p: Tensor) -> Any:
        dtype = torch.promote_types(p.dtype, torch.float32)
        return map_state(tree, lambda t: t.to(p.device, dtype if t.is_floating_point() else t.dtype))

    names = set(changed)

    def follow_stack(single: Stack) -> Stack:
        first = single.blocks[0].layout.names[0]
        return follow(single, named[first]) if first in names else single

    return replace(
        state,
        blocks={
            key: follow(block, named[block.layout.names[0]]) if block.layout.names[0] in names else block
            for key, block in state.blocks.items()
        },
        stacks=state.stacks.map(follow_stack),
        vectors={name: follow(part, named[name]) if name in names else part for name, part in state.vectors.items()},
    )


def map_state(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same dataclasses, mappings and operators with every tensor replaced; layers and layouts stay."""
    if isinstance(tree, (Layer, Layout)):
        return tree
    if isinstance(tree, Operator):
        return unpack_operator(map_tensors(pack_operator(tree), function))
    if is_dataclass(tree) and not isinstance(tree, type):
        values = {entry.name: map_state(getattr(tree, entry.name), function) for entry in fields(tree)}
        return replace(tree, **values)
    if isinstance(tree, Mapping):
        return {key: map_state(value, function) for key, value in cast("Mapping[Any, Any]", tree).items()}
    return function(tree) if isinstance(tree, Tensor) else tree
