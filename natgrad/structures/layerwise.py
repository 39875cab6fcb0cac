"""Metrics in one block per layer: the part that all such structures share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.ground.checks import check_share
from natgrad.ground.exchanges import ALONE, Sums
from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import RandomState
from natgrad.ground.spaces import Params, Space
from natgrad.ground.typed_torch import list_numbers
from natgrad.layers import Layer, Seen, Traced, is_asking
from natgrad.metrics import Metric
from natgrad.operators import Arranged, DiagonalOperator, Layout, Operator
from natgrad.structures.base import Memory, Structure, accumulate_total, accumulate_weight
from natgrad.structures.estimates import Estimate, Sampled
from natgrad.structures.metric_pass import hear_metric

Statistics = dict[str, Tensor]


@dataclass(frozen=True)
class Layerwise(Structure):
    """One operator per layer, from running averages of its statistics; the diagonal metric for everything else.

    A subclass says which statistics a pass gives, and which operator they make.

    Args:
        decay: Weight of the past in the running averages, in [0, 1). The first batch counts as itself.
        estimate: How the expectation over labels is taken. Default: one draw.
        seed: Of the draws.

    Attributes:
        sums: True if `seen.sums.total` adds up all that a pass gives, so that several processes can take part.
        adds: True if `statistics` is decay * before + what the pass gives, entry by entry: then several processes add
            that up by themselves, while other work goes on.
        symmetric: The entries that are symmetric matrices (..., n, n), where they are no vectors.

    Raises:
        ValueError: For a decay outside [0, 1).
        TypeError: For another estimate.
    """

    sums: ClassVar[bool] = False
    adds: ClassVar[bool] = False
    symmetric: ClassVar[frozenset[str]] = frozenset()

    decay: float = 0.0
    estimate: Estimate = Sampled()
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("decay", self.decay)
        if not isinstance(self.estimate, Estimate):
            raise TypeError(f"estimate is {self.estimate!r}, expected an estimate such as ng.Sampled(1)")

    @abstractmethod
    def statistics(self, seen: Seen, before: Statistics | None, decay: float) -> Statistics:
        """Running totals after one more pass of a layer: decay * before + what the pass gives.

        Args:
            seen: What the pass recorded of the layer.
            before: The totals so far; None at first.
            decay: Weight of the past, in [0, 1).

        Returns:
            Tensors by name.
        """

    def advance(self, seen: Seen, before: Statistics | None, decay: float, sums: Sums) -> Statistics:
        """`statistics` of the passes of all processes.

        Args:
            seen: As for `statistics`.
            before: As for `statistics`.
            decay: As for `statistics`.
            sums: How what they give is added up.

        Raises:
            TypeError: For a structure that does not add it up.
        """
        if sums.add is None:
            return self.statistics(seen, before, decay)
        if self.adds:
            fresh = self.statistics(seen.add_by(Sums(add_few=sums.add_few)), None, decay)
            return accumulate_statistics(before, sums.total(fresh), decay)
        totals = list[Statistics]()

        def add(fresh: Statistics) -> Statistics:
            totals.append(sums.total(fresh))
            return totals[-1]

        after = self.statistics(seen.add_by(replace(sums, add=add)), before, decay)
        if not totals:
            raise TypeError(
                f"{type(self).__name__} says sums = True, but its statistics() added nothing up over the processes: "
                "call seen.sums.total({...}) on what the pass gives, or say adds = True where the totals are decay * "
                "before + that"
            )
        return after

    def needs_past(self, seen: Seen) -> bool:
        """True if what a process adds up with others is made with the totals so far, which then all of them need.

        Where a block's owner alone remembers them (`share="memory"`), it sends them to all before each pass. The
        default is True unless `adds`.

        Args:
            seen: As for `statistics`.
        """
        return not self.adds

    def rows_needed(self, layer: Layer) -> float:
        """Examples times positions of a pass that a layer's statistics need; math.inf, the default, for all there are.

        Args:
            layer: The layer.
        """
        return math.inf

    @abstractmethod
    def operator(self, layer: Layer, totals: Statistics, weight: float) -> Operator:
        """The layer's block, on its matrix flattened row-major.

        Args:
            layer: The layer.
            totals: Its running totals, from `statistics`.
            weight: The totals' weight: a total over it is an average.
        """

    @property
    def separates(self) -> bool:
        """True if the structure tells `inputs`."""
        return type(self).inputs is not Layerwise.inputs

    def inputs(self, layer: Layer, totals: Statistics, weight: float) -> tuple[Tensor, bool] | None:
        """The mean second moment A of a layer's inputs, for rules that need nothing else; None where it is not known.

        Where it is known, `statistics` also takes passes without derivatives (`seen.deltas` is empty), and forgets what
        it knew of them.

        Args:
            layer: The layer.
            totals: Its running totals, from `statistics`.
            weight: The totals' weight.

        Returns:
            Shape (n, n), (groups, n, n), or a diagonal (n,), and True for tokens, whose moment is their frequencies.
        """
        return None

    def kind(self, totals: Statistics) -> str:
        """What a layer with these totals got, for reports.

        Args:
            totals: From `statistics`.
        """
        return type(self).__name__

    def inverted_sizes(self, layer: Layer) -> list[tuple[int, int]]:
        """(count, n) of the (n, n) matrices that a layer's block inverts, for processes that share them out.

        Args:
            layer: The layer.
        """
        return []

    def update(
        self,
        memory: Memory | None,
        metric: Metric,
        params: Params,
        inputs: Any,
        *,
        random: RandomState | None = None,
        sums: Sums = ALONE,
    ) -> tuple[Operator, Memory]:
        """The operator for this step and the memory for the next.

        Args:
            memory: As for `Structure.update`.
            metric: As for `Structure.update`.
            params: As for `Structure.update`.
            inputs: As for `Structure.update`.
            random: As for `Structure.update`.
            sums: How statistics become those of several processes.
        """
        draws = 0 if memory is None else memory["draws"]
        if memory is not None and memory["names"] != list(params):
            memory = None  # parameters came or went: the averages start anew
        generator = torch.Generator(next(iter(params.values())).device).manual_seed(self.seed + 104729 * draws)
        asking = memory is None or is_asking(draws) or not memory.get("sure", True)
        trusted = None if memory is None or asking else set(memory["held"])
        ask = asking or (memory is not None and memory.get("meet", False))
        reading = hear_metric(metric, params, inputs, self.estimate, generator, random=random, trusted=trusted, ask=ask)
        held = [claim for seen in reading.layers for claim in seen.layer.claims]
        if memory is not None and set(held) != set(memory["held"]):
            memory = None  # a layer turned out not to be all there is to its parameters
        layers = reading.layers
        if sums.add is not None:  # which weighs what every process has by its examples: means, as of the derivatives
            check_alike(params, {name for seen in layers for name in seen.layer.layout.names}, sums)
            layers = [seen.count_times(1.0, times=1 / reading.metric.linearization.examples) for seen in layers]
        totals, weight = self.average_statistics(layers, reading.squares, memory, sums)
        parts = [(seen.layer.layout, self.operator(seen.layer, totals[seen.key], weight)) for seen in reading.layers]
        space = Space(params)
        parts += [diagonal_part(space, name, totals[name]["squares"] / weight) for name in reading.squares]
        arranged = Arranged(space, parts).declare(nats=reading.metric.nats)
        averages = totals if self.decay else {}
        memory = {"names": list(params), "held": held, "draws": draws + 1, "weight": weight, "totals": averages}
        return arranged, memory | {"sure": reading.sure or not asking, "meet": reading.meet}

    def kind_of(self, name: str, memory: Memory | None) -> str:
        if memory is None or name not in memory["names"]:
            return "not read yet"
        return type(self).__name__ if name in {Traced.parameter_of(claim) for claim in memory["held"]} else "Diagonal"

    def average_statistics(
        self, layers: Iterable[Seen], squares: Mapping[str, Tensor], memory: Memory | None, sums: Sums = ALONE
    ) -> tuple[dict[str, Statistics], float]:
        """Totals by layer (and by name for parameters without one) after one more pass, and their weight.

        A pass that is not finite leaves the totals as they were: one bad batch does not poison the average.

        Args:
            layers: What the pass recorded of every layer.
            squares: Name -> squares, for parameters without a layer.
            memory: What the last call of `update` returned, None at first.
            sums: How what the pass gave becomes that of all processes.
        """
        before: dict[str, Statistics] = memory["totals"] if memory and self.decay else {}
        totals = {seen.key: self.advance(seen, before.get(seen.key), self.decay, sums) for seen in layers}
        for name, square in squares.items():
            totals[name] = accumulate_statistics(before.get(name), sums.total({"squares": square}), self.decay)
        if not before or memory is None:
            return totals, 1.0
        if before.keys() >= totals.keys() and not all(
            all_finite(t) for total in totals.values() for t in total.values()
        ):
            return before, memory["weight"]
        return totals, accumulate_weight(memory["weight"], self.decay)


def check_alike(params: Params, held: set[str], sums: Sums) -> None:
    """ValueError where layers hold other parameters on some processes than on others. All of them raise it."""
    flags = torch.tensor([float(name in held) for name in params], dtype=torch.float64)
    means = sums.total_few({"held": flags.to(next(iter(params.values())).device)})["held"]
    apart = [name for name, mean in zip(params, list_numbers(means), strict=True) if min(mean, 1 - mean) > 1e-6]
    if apart:
        raise ValueError(
            f"some processes read the layer of {', '.join(apart)} and some did not, as where an expert has no rows "
            "there: use ng.kfac(model, criterion) and its like, or a structure that is solved by products, ng.Exact()"
        )


def accumulate_statistics(before: Statistics | None, fresh: Statistics, decay: float) -> Statistics:
    """decay * before + fresh, entry by entry, in fresh's storage; without a past that lacks an entry.

    Args:
        before: The totals so far, by name; None at first.
        fresh: A sum over examples, by name; with several processes over those of all (`seen.sums.total`).
        decay: Weight of the past, in [0, 1).
    """
    if before is None or not before.keys() >= fresh.keys():
        return fresh
    return {key: accumulate_total(before[key], value, decay, reuse=True) for key, value in fresh.items()}


def diagonal_part(space: Space, name: str, squares: Tensor) -> tuple[Layout, Operator]:
    """A parameter without a layer: its diagonal."""
    layout = Layout(name, None, 1, 1, squares.numel(), tuple(space.blocks[name].shape))
    return layout, DiagonalOperator(squares.reshape(-1).to(space.dtype))
