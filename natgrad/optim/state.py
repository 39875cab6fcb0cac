"""All that the next step depends on, as one frozen value, and the form in which torch saves it per parameter.

A step makes a new `State` and binds it last, so that an error, Ctrl-C or a refused step leaves the old one in force. A
checkpoint is this value written out: nothing else of an optimizer is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from natgrad.layers import Layer
from natgrad.operators import Layout, Operator, pack_operator, unpack_operator
from natgrad.optim.error_size import ErrorSize
from natgrad.optim.guard import Guard
from natgrad.optim.outside_losses import Outside
from natgrad.pure import map_tensors

Numbers = dict[str, Any]
RULE = "rule"
"""Where the rule's vectors lie in a parameter's saved state."""
MISFIT = "the statistics in state_dict do not fit the block of {}"


@dataclass(frozen=True)
class Block:
    """One layer, or one parameter without a layer, between steps.

    Attributes:
        layout: Its matrix.
        layer: None for a parameter without one.
        totals: Running sums of its statistics; None where another process has them.
        weight: What the sums are divided by.
        positions: Running sum of the examples times positions that it saw.
        readings: What that is divided by; 0 where nothing is known.
        inverse: Its damped inverse.
        level: The damping of the last inversion; None before.
        prepared: What the rule made of the block's metric then.
        shape: What the rule remembers of the block.
        fresh: True until it was to be inverted once.
    """

    layout: Layout
    layer: Layer | None = None
    totals: Mapping[str, Tensor] | None = None
    weight: float = 0.0
    positions: float = 0.0
    readings: float = 0.0
    inverse: Operator | None = None
    level: float | None = None
    prepared: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    shape: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    fresh: bool = True

    @property
    def key(self) -> str:
        """Its parameters, as one string."""
        return self.layout.names[0] if self.layer is None else self.layer.key

    @property
    def mean_positions(self) -> float:
        """Examples times positions of a step; infinite where nothing is known."""
        return self.positions / self.readings if self.readings else math.inf

    def save(self) -> Numbers:
        """As tensors and plain values."""
        found: Numbers = {} if self.totals is None else {"totals": dict(self.totals), "weight": self.weight}
        if self.readings:
            found |= {"positions": self.positions, "readings": self.readings}
        if self.level is not None:
            found["level"] = self.level
        if self.fresh:
            found["fresh"] = True
        if self.inverse is not None:
            found["inverse"] = pack_operator(self.inverse)
        return (
            found
            | ({"prepared": dict(self.prepared)} if self.prepared else {})
            | ({"shape": dict(self.shape)} if self.shape else {})
        )

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
            saved.get("shape", {}),
            saved.get("fresh", False),
        )


BLOCK_ENTRIES = ("totals", "weight", "positions", "readings", "inverse", "level", "prepared", "shape", "fresh")
OWNED = (*BLOCK_ENTRIES, "mean", "count")
"""What a process remembers of its own blocks alone, where their numbers are their owners'."""


@dataclass(frozen=True)
class GradientMean:
    """The running mean of a gradient, without its correction, and how many gradients it has."""

    value: Tensor
    count: int


@dataclass(frozen=True)
class Pace:
    """The steps at which what is not done at every step was done last, -1 before.

    Attributes:
        updated: Statistics were read.
        inverted: Blocks were inverted.
        measured: The length of a step was measured on a pass.
        judged: The damping compared the loss with its promise.
        interval: Steps between updates that the drift of the statistics asks for.
    """

    updated: int = -1
    inverted: int = -1
    measured: int = -1
    judged: int = -1
    interval: float = 1.0


@dataclass(frozen=True)
class Length:
    """What is known of the metric along steps.

    Attributes:
        ratio: The true d^T G d over what the blocks promise of it, as it was measured last; None before.
        falls: True if that measurement found far less than the ratio that it left.
        fallen: The metric as measured over its running averages, at most 1.
        doubt: How many times the estimate of a step's KL may be too small.
        compared: The step at which a step's KL was measured on its own batch last.
        formed: The step at which the form of a step of fixed length was computed last, -1 before.
        form: That form at a learning rate of 1.
    """

    ratio: Tensor | None = None
    falls: bool = False
    fallen: float = 1.0
    doubt: float = 30.0
    compared: int = 0
    formed: int = -1
    form: float = 0.0

    def known_ratio(self, like: Tensor) -> Tensor:
        """What a step's length is divided by: the ratio, at least 1: below 1 the damping shortens a step."""
        return torch.ones_like(like) if self.ratio is None else self.ratio.to(like).clamp(min=1.0)


@dataclass(frozen=True)
class Noise:
    """What a rule knows that turns to directions of its own once noise has hidden the gradient.

    Attributes:
        turned: The step of the turn, -1 before and after a return.
        returns: Times that the gradient showed again.
        signal: Running sums of |m|^2, |g|^2 and of what |m|^2 would be for gradients that are noise alone.
        rose: The step after which a loss that had risen made the rule turn, -1 for never.
        loss: The last loss that was looked at for that.
    """

    turned: int = -1
    returns: int = 0
    signal: tuple[float, float, float] = (0.0, 0.0, 0.0)
    rose: int = -1
    loss: float = math.inf


@dataclass(frozen=True)
class Hearing:
    """Which layers explain their parameters' gradients, and where the drawing of labels stands.

    Attributes:
        trusted: Claims of the layers that do.
        refused: Claims of those that do not.
        tried: Parameters without statistics for whose sake a pass was read that was not due: once each.
        readings: Passes that were read so far.
        unsure: True if a layer met a zero gradient, which explains anything.
        labels: The state of the generator that draws labels; None before the first draw.
        errors: What is known of the unit of a regression's targets.
        error: The highest loss of a regression.
    """

    trusted: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    tried: frozenset[str] = frozenset()
    readings: int = 0
    unsure: bool = False
    labels: Tensor | None = None
    errors: ErrorSize | None = None
    error: float = 0.0


@dataclass(frozen=True)
class State:
    """All that the next step of a metric in blocks depends on, besides parameters, groups and the batch.

    Attributes:
        step: Steps so far.
        seen: Examples, where the rule counts them.
        blocks: By key.
        means: The gradients' running means, by parameter.
        vectors: What the rule remembers, by parameter and name.
        pace: When what was done last.
        length: What is known of the metric along steps.
        noise: Whether noise has hidden the gradient.
        hearing: Which layers are trusted, and the source of labels.
        outside: Losses that the metric does not know of.
        guard: What keeps bad batches from doing harm.
    """

    step: int = 0
    seen: int = 0
    blocks: Mapping[str, Block] = field(default_factory=dict[str, Block])
    means: Mapping[str, GradientMean] = field(default_factory=dict[str, GradientMean])
    vectors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict[str, Mapping[str, Tensor]])
    pace: Pace = Pace()
    length: Length = Length()
    noise: Noise = Noise()
    hearing: Hearing = Hearing()
    outside: Outside = Outside()
    guard: Guard = Guard()

    @property
    def is_turned(self) -> bool:
        """Whether the rule has turned to directions of its own."""
        return self.noise.turned >= 0

    # torch's per-parameter form, and back

    def by_parameter(self) -> dict[str, Numbers]:
        """What is kept of each parameter, by name; a block's numbers lie under its first one."""
        found: dict[str, Numbers] = {}
        for name, mean in self.means.items():
            found.setdefault(name, {}).update(count=mean.count, mean=mean.value)
        for name, vectors in self.vectors.items():
            found.setdefault(name, {})[RULE] = dict(vectors)
        for block in self.blocks.values():
            found.setdefault(block.layout.names[0], {}).update(block.save())
        return found

    def save(self) -> Numbers:
        """The rest: plain values and tensors."""
        counts = {name: getattr(self.guard, name) for name in ("failures", "refused", "late", "skipped")}
        clock = {"step": self.step, "seen": self.seen, **counts, **vars(self.pace), **vars(self.noise)}
        clock |= {name: value for name, value in vars(self.length).items() if name not in ("ratio", "falls")}
        clock |= {"error": self.hearing.error, "sizes": [self.guard.square, self.guard.weight]}
        hearing, ratio = self.hearing, self.length.ratio
        return {
            "clock": clock | {"signal": list(self.noise.signal)},
            "blocks": {key: list(block.layout.names) for key, block in self.blocks.items()},
            "trusted": sorted(hearing.trusted),
            "refused": sorted(hearing.refused),
            "tried": sorted(hearing.tried),
            "heard": [hearing.readings, hearing.unsure, self.outside.updates, self.outside.warned],
            # always a tensor, which a fresh one's can take
            "ratio": torch.zeros(()) if ratio is None else ratio,
            "errors": None if hearing.errors is None else hearing.errors.save(),
            "outside": self.outside.save(),
            **self.guard.save(),
        }

    @staticmethod
    def load(extra: Mapping[str, Any], criterion: Any, labels: Tensor | None, named: Mapping[str, Tensor]) -> State:
        """From `save()`, without what is kept by parameter; entries that older checkpoints lack are as at the start."""
        clock: Mapping[str, Any] = extra["clock"]

        def part(kind: type, **known: Any) -> Any:
            return kind(**{one.name: clock[one.name] for one in fields(kind) if one.name in clock} | known)

        counts = {name: clock[name] for name in ("failures", "refused", "late", "skipped") if name in clock}
        square, weight = clock.get("sizes", (0.0, 0.0))
        ratio, (readings, unsure, updates, warned) = extra["ratio"], extra.get("heard", (0, False, 0, False))
        hearing = Hearing(
            frozenset(extra["trusted"]),
            frozenset(extra["refused"]),
            frozenset(extra.get("tried", ())),
            readings,
            unsure,
            labels,
            ErrorSize.load(extra.get("errors"), criterion),
            clock.get("error", 0.0),
        )
        return State(
            clock["step"],
            clock.get("seen", 0),
            pace=part(Pace),
            length=part(Length, ratio=ratio if ratio is not None and bool(ratio > 0) else None),
            noise=part(Noise, signal=tuple(clock.get("signal", (0.0, 0.0, 0.0)))),
            hearing=hearing,
            outside=Outside.load(extra.get("outside"), named, updates, warned),
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
    found = dict[str, Block]()
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
                sizes = {one.size for one in (operator(block), block.inverse) if one is not None}
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{MISFIT.format(list(names))}: {type(error).__name__}, {error}") from error
        if sizes and sizes != {math.prod(block.layout.matrix_shape)}:
            raise ValueError(
                f"{MISFIT.format(list(names))}, of {math.prod(block.layout.matrix_shape)} entries: {sizes}"
            )
        found[key] = block
    means = {name: GradientMean(part["mean"], part["count"]) for name, part in saved.items() if "mean" in part}
    vectors = {name: part[RULE] for name, part in saved.items() if RULE in part}
    return replace(state, blocks=found, means=means, vectors=vectors)


def single(name: str, p: Tensor) -> Layout:
    """The layout of a parameter without a layer."""
    return Layout(name, None, 1, 1, p.numel(), tuple(p.shape))


def move_state(state: State, named: Mapping[str, Tensor], changed: Sequence[str]) -> State:
    """The state in the dtypes and on the devices that these parameters have now; float32 for half precision."""

    def follow(tree: Any, p: Tensor) -> Any:
        dtype = torch.promote_types(p.dtype, torch.float32)
        return map_state(tree, lambda t: t.to(p.device, dtype if t.is_floating_point() else t.dtype))

    names = set(changed)
    return replace(
        state,
        blocks={
            key: follow(block, named[block.layout.names[0]]) if block.layout.names[0] in names else block
            for key, block in state.blocks.items()
        },
        means={name: follow(mean, named[name]) if name in names else mean for name, mean in state.means.items()},
        vectors={name: follow(kept, named[name]) if name in names else kept for name, kept in state.vectors.items()},
    )


def map_state(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same dataclasses, mappings and operators with every tensor replaced; layers and layouts stay."""
    if isinstance(tree, (Layer, Layout)):
        return tree
    if isinstance(tree, Operator):
        return unpack_operator(map_tensors(pack_operator(tree), function))
    if is_dataclass(tree) and not isinstance(tree, type):
        values = {one.name: map_state(getattr(tree, one.name), function) for one in fields(tree)}
        return replace(tree, **values)
    if isinstance(tree, Mapping):
        return {key: map_state(value, function) for key, value in cast("Mapping[Any, Any]", tree).items()}
    return function(tree) if isinstance(tree, Tensor) else tree
