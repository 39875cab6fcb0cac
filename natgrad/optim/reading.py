"""The pass that reads statistics: labels are drawn, cotangents sent back, and each layer's moments taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from natgrad.families import Criterion
from natgrad.ground.graph_nodes import is_empty, leaf_of, walk
from natgrad.ground.pure import Labelled, leaves, map_tensors, mixes_examples, run_uncompiled
from natgrad.ground.typed_torch import list_numbers
from natgrad.ground.whole_tensors import zeros_whole
from natgrad.layers import (
    Examples,
    GraphLeaves,
    Heard,
    KnownPlaces,
    Layer,
    MatrixProduct,
    Mixed,
    ModelLayers,
    Pass,
    Seen,
    Tap,
    Taps,
    Traced,
    collect_inputs,
    combine,
    example_squares,
    find_products,
    find_sequences,
    hear,
    is_asking,
    partitions,
    row_weights,
    square_elementwise,
)
from natgrad.metrics import fisher
from natgrad.optim.passes import COMPILED, BatchRecord
from natgrad.optim.processes import AlignedPasses, Processes, call_roll
from natgrad.optim.state import Hearing, find_error_size
from natgrad.structures import Empirical, Estimate, ExactLabels, Layerwise, Outputs, Sampled, hear_metric


@dataclass(frozen=True)
class Reading:
    """What one pass tells. With several processes: this one's part."""

    layers: list[Seen]  # those that explain their parameters' gradients
    squares: dict[str, Tensor]  # of the parameters without a layer, by name
    rows: int  # the number of its rows
    # the layers again, with labels drawn apart, for measuring what the statistics were fitted to
    apart: list[Seen] = field(default_factory=list[Seen])
    # from those labels, of the parameters without a layer, summed over examples, per cotangent
    scores: tuple[dict[str, Tensor], ...] = ()
    # by layer and parameter, the rows of all processes that used it; default this one's
    weights: Mapping[str, int] = field(default_factory=dict[str, int])
    # by layer, its examples times positions, of all processes
    positions: Mapping[str, int] = field(default_factory=dict[str, int])
    span: Span | None = None  # where this part stands in the batch of all processes; None: it is all there is
    density: float = 1.0  # of a summed loss how many targets that count come on a row, on all processes

    @property
    def all_rows(self) -> float:
        """The rows of all processes."""
        return float(self.rows if self.span is None else self.span.rows)

    @property
    def share(self) -> float:
        """What its rows weigh among them."""
        return float(self.rows) if self.span is None else self.span.share

    @property
    def weight(self) -> float:
        """What a row's derivatives weigh beside those of another process, whose mean is over other rows."""
        return self.share / self.rows if self.rows else 1.0


@dataclass(frozen=True)
class Span:
    """This process's part of one reading, counted in the batch of all processes."""

    first: int  # the place of its first example
    count: int  # its examples
    total: int  # the examples of all
    # what its statistics weigh: its rows; of a summed loss its part of what all are divided by, times the rows of all
    share: float
    rows: int  # the rows of all
    cotangents: int  # the most that a process has
    silent: bool = False  # True where no target counts on any process
    mass: float = 0.0  # the mean over all rows of share times the sum of weights; 0: this process is alone
    scale: float = 0.0  # what the losses of all are a mean over, or divided by; 0 where nobody asked

    def count_kept(self, unit: int, fewest: int, part: int) -> tuple[int, int, int]:
        """The first examples of all: how many of this process's, how many of all processes', and out of how many."""
        total = unit * self.total
        size = min(total, max(fewest, total // part))
        return min(max(size - unit * self.first, 0), unit * self.count), size, total


def line_up(
    processes: Processes,
    device: torch.device,
    count: int,
    rows: int,
    scale: float = 0.0,
    cotangents: int = 1,
    mass: float = 1.0,
) -> Span:
    """Agree on who has which examples of a reading. Every process calls this once per reading."""
    if processes.size == 1:
        return Span(0, count, count, float(rows), rows, cotangents, scale=scale)
    tables = processes.share_numbers([count, rows, scale, cotangents, mass], device)
    counts, all_rows, scales, widths, masses = zip(*tables, strict=True)
    total = sum(all_rows)
    shares = [total * each / sum(scales) for each in scales] if sum(scales) else all_rows
    share = shares[processes.rank]
    if share == round(share) or abs(share - rows) <= 1e-9 * total:
        share = float(round(share))
    first = int(sum(counts[: processes.rank]))
    mean = sum(map(prod, zip(shares, masses, strict=True))) / max(total, 1)
    scale = sum(scales)
    return Span(first, count, int(sum(counts)), share, int(total), int(max(widths)), not scale, mean, scale)


def sign_examples(cotangent: Tensor, examples: Examples, generator: torch.Generator, span: Span) -> Tensor:
    """A random sign on every example's entries, out of as many draws as all processes have examples.

    The statistics of layers that tell examples apart do not change. The square of a sum over examples becomes, on
    average, the sum of squares; for labels drawn at random it is one already.
    """
    bits = torch.randint(0, 2, (span.total,), generator=generator, device=cotangent.device)
    return examples.scale(cotangent, 2 * bits[span.first : span.first + examples.count] - 1)


def make_empty_pass(layer: Layer, cotangents: int, like: Tensor, by_token: bool) -> Seen:
    """A pass of a layer that this process did not use: it adds zeros to the others' sums, in the shapes of theirs."""
    groups, outputs, columns = layer.layout.matrix_shape
    if by_token or layer.by_token:
        tokens = torch.zeros(1, 1, dtype=torch.long, device=like.device)
        return Seen(layer, tokens, [like.new_zeros(1, 1, columns)] * cotangents, 0.0, times=0.0)
    deltas = [like.new_zeros(1, 1, groups, outputs)] * cotangents
    return Seen(layer, like.new_zeros(1, 1, groups, columns), deltas, 0.0, times=0.0)


def match_parts(seen: Seen, count: int, cotangents: int, like: Tensor) -> Seen:
    """The same pass in as many parts as another process has, zeros in place of those that are not there."""
    parts = seen.split_parts()
    if len(parts) >= count:
        return seen
    empty = make_empty_pass(seen.layer, cotangents, like, False)
    return Mixed(seen.layer, parts + [empty] * (count - len(parts)), seen.share)


# Statistics from the user's own pass: taps in the forward, and a backward pass of sampled labels before the user's

RUNS_ONCE = (
    "the compiled model lets one backward pass through, and statistics need another: torch makes such code where "
    "shapes are dynamic, which it takes them to be from the second batch size on, and where another loss went backward "
    "first. Give the optimizer the compiled model, ng.kfac(torch.compile(model), criterion), which reads one more pass "
    "then; or keep shapes static, by torch.compile(model, dynamic=False) or DataLoader(..., drop_last=True)"
)
REENTRANT = (
    "the model checkpoints activations with use_reentrant=True, and the backward pass of the statistics, which leaves "
    ".grad alone, cannot go through that: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Reader:
    """Listens to a model's layers while armed, and reads statistics when a loss is known.

    The gradient that a layer explains is compared with the plain one at the first reading that reaches it with a
    gradient that is not zero, and again from time to time (`is_asking`): a second use of its weight may be hidden at
    first. Parameters where they differ, and parameters without a layer, get squares: the diagonal over examples. Of
    those that the model adds or multiplies it takes one backward pass; of others one per example with `ExactLabels()`,
    else at most sixteen, of groups of examples.

    What is known between readings is a `Hearing`, which goes in and comes out changed; the attributes of the same names
    are that of the reading under way.

    Attributes:
        due: True if the next passes are read whoever is in them.
        places: Where the examples run, by the shapes of a pass's calls; what it found is part of the `Hearing`.
        span: Where this process's examples of the reading stand among all.
        counts: The rows of the reading, and what the loss is a mean over; 0 on one process, where that is its rows.
        silent: True where no target counts on this process: what it tells are inputs of layers alone.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Mapping[str, Tensor],
        structure: Layerwise,
        processes: Processes,
    ) -> None:
        self.model, self.structure, self.processes = model, structure, processes
        self.estimate, self.seed = structure.estimate, structure.seed
        self.taps, self.passes = Taps(), AlignedPasses(model, processes)
        self.attach(named)

    def attach(self, named: Mapping[str, Tensor]) -> None:
        """Listen to the layers of these parameters."""
        self.named = dict(named)
        self.layers = ModelLayers.of(self.model, self.named)
        self.places = KnownPlaces()
        self._begin(Hearing(), self._device)
        self.span: Span | None = None
        self.counts, self.silent = (0, 0.0, 1.0), False
        self.leaves = GraphLeaves(self.named)
        self.handles, self.attached = self.layers.hook(self.model, self.taps, self.leaves), True
        self.arm(True)

    def arm(self, due: bool, fresh: bool = False) -> None:
        """Listen to the next passes, or do not. After `detach`: never.

        due: whether they are read. fresh: whether one is read all the same if it uses a parameter without statistics.
        """
        self.due = due and self.attached
        self.taps.armed = (due or fresh) and self.attached

    def detach(self) -> None:
        """Take the hooks off."""
        while self.handles:
            self.handles.pop().remove()
        self.attached = False
        self.arm(False)  # compiled graphs keep their taps

    def _begin(self, hearing: Hearing, device: torch.device) -> None:
        self.trusted, self.refused = set(hearing.trusted), set(hearing.refused)
        self.readings, self.unsure, self.errors = hearing.readings, hearing.unsure, hearing.errors
        self.places.found = hearing.places
        self.generator = torch.Generator(device).manual_seed(self.seed)  # labels are drawn where the outputs lie
        if hearing.labels is not None:
            self.generator.set_state(hearing.labels)

    def layers_by_names(self, trusted: Set[str]) -> dict[tuple[str, ...], Layer]:
        """The layers all of whose claims are trusted, by their parameters' names."""
        return {layer.layout.names: layer for layer in self.layers.by_key.values() if trusted >= set(layer.claims)}

    def names_to_judge(self, hearing: Hearing) -> set[str]:
        """The parameters of layers that no reading has judged, which have no statistics yet."""
        layers = [layer for layer in self.layers.first if not hearing.trusted.issuperset(layer.claims)]
        return {n for layer in layers if hearing.refused.isdisjoint(layer.claims) for n in layer.layout.names}

    def read(
        self,
        hearing: Hearing,
        criterion: Criterion,
        outputs: Any,
        targets: Any,
        record: BatchRecord,
        measurement: Estimate | None = None,
        known: Set[str] | None = None,
    ) -> tuple[Reading | None, Hearing]:
        """The statistics of the pass that made these outputs, and what is known after it.

        Its graph is kept, `.grad` is not touched. measurement: how labels for measurements are drawn, None where the
        statistics' own do. known: the layers that have statistics, where new ones of their inputs alone will do: then
        no labels are drawn and nothing goes backward, if all of them were heard. With several processes: this one's
        part of them. No reading where another process's loss was not finite: a process that could not read drew
        nothing. Nor where no target counts on any of them.
        """
        self.span = None
        self._begin(hearing, next(leaves(outputs)).device)
        own, answers = self._own(criterion, outputs, targets, record, measurement, known)
        reading = self._agree_on_reading(own, answers, record.computed[-1].summed)
        if self.is_silent:
            return None, hearing
        labels = hearing.labels if reading is None else self.generator.get_state()
        after = replace(
            hearing,
            trusted=frozenset(self.trusted),
            refused=frozenset(self.refused),
            readings=self.readings,
            unsure=self.unsure,
            labels=labels,
            errors=self.errors,
            places=self.places.found,
        )
        return reading, after

    def wants(self, hearing: Hearing, unread: Set[str], outputs: Any) -> tuple[bool, Hearing]:
        """Whether this pass is read: it is due, or uses parameters without statistics. All processes say the same.

        A head, an expert or a loss whose turn comes in step with the intervals would never be read otherwise.
        """
        if self.due:
            return True, hearing
        names = unread - hearing.tried
        if not names:
            return False, hearing
        used = find_used([t.grad_fn for t in leaves(outputs)], {name: self.leaves[name] for name in names})
        used = self._unite(names, used)
        return bool(used), replace(hearing, tried=hearing.tried | used)

    def _unite(self, names: Set[str], own: set[str]) -> set[str]:
        """Those of these names that some process has. All ask for the same."""
        if self.processes.size == 1 or not names:
            return own
        order = sorted(names)
        flags = self.processes.sum(torch.tensor([float(name in own) for name in order], device=self._device))
        return {name for name, flag in zip(order, list_numbers(flags), strict=True) if flag}

    @property
    def is_silent(self) -> bool:
        """True where no target of the last reading counts on any process: it tells nothing."""
        return self.span is not None and self.span.silent

    def skip(self, value: Tensor) -> None:
        """Read nothing of a loss, and tell the others. A compiled graph's first backward allows for a second."""
        self.processes.looking = True  # the others do not go backward now
        try:
            self._go_backward(value)
        except RuntimeError as error:
            if not runs_once(error):
                raise
        finally:
            self.processes.looking = False
        if self.processes.size > 1:
            self.span = None
            self._line_up(0, 0)
            call_roll(self.processes, list(self.layers.by_key), list(self.named), None)

    def _go_backward(self, value: Tensor) -> None:
        """Go backward for nothing: what `fully_shard` gathers ahead in the pass after it is then alike everywhere."""
        sources, like = [self.taps.recorder.dummy], torch.ones_like(value)
        if self.processes.averaged:
            sources += [leaf for leaf in self.leaves.values() if leaf.requires_grad]
        torch.autograd.grad(value, sources, like, retain_graph=True, allow_unused=True)

    def _own(
        self,
        criterion: Criterion,
        outputs: Any,
        targets: Any,
        record: BatchRecord,
        measurement: Estimate | None,
        known: Set[str] | None,
    ) -> tuple[Reading, dict[str, bool]]:
        """What this process read, and of each layer whether it explains its parameters' gradients."""
        rows = criterion.family.rows(outputs)
        recorded = self.taps.find_calls(rows)
        if criterion.errors is not None:
            self.errors = find_error_size(criterion, outputs, recorded)
        calls = [c.gather() for c in [*(c for c in recorded if not self._refuses(c.layer)), *self._products(rows)]]
        loss = record.computed[-1]
        self.silent = self.processes.size > 1 and loss.rows == 0
        # where no target counts, the others' do: the layers' inputs are told, and slopes are zero
        weights = rows.new_zeros(len(rows)) if self.silent else criterion.weights(widen(outputs), targets)
        scale = loss.divisor or (0.0 if math.isnan(loss.count) else loss.count)
        self.counts = len(rows), scale, float(row_weights(weights).sum()) if self.processes.size > 1 else 1.0
        # alike here, and others than elsewhere
        apart = self.processes.size > 1 and (self.silent or scale not in (0, len(rows)))
        may_count = known is not None and may_be_examples(rows, record)
        uneven = may_count and (apart or bool((weights != weights[0]).any()))
        if known is not None and self._hears_all(known, calls, uneven):
            layers = collect_inputs([call for call in calls if call.inputs.numel()])
            self._line_up(len(rows), 0)
            return Reading(layers, {}, len(rows)), {seen.key: True for seen in layers}
        asking, self.unsure = is_asking(self.readings) or self.unsure, False  # all layers are judged, trusted ones too
        self.readings += 1
        if self.silent and not len(rows):  # an empty batch adds nothing to the others' sums
            self._go_backward(rows)
            return self._pass_over(measurement), {}
        try:
            passed, own, slopes = self._pass(
                criterion, outputs, targets, rows, weights, calls, record, measurement, asking
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise ValueError(REENTRANT) from error
            if not runs_once(error) or not self.layers.known:
                raise
            if record.find_pass() is None:
                raise ValueError(RUNS_ONCE) from error
            return self._replay_pass(criterion, outputs, record, len(rows))
        if self.layers.known and not recorded and all(isinstance(call, MatrixProduct) for call in passed.taps):
            return self._replay_pass(criterion, outputs, record, len(rows))
        exact = isinstance(self.estimate, ExactLabels)
        heard = hear(
            passed,
            lambda layer: (asking or not self._trusts(layer)) and not self._refuses(layer),
            # examples that cannot be told apart give squares that are right on average over labels alone
            takes=lambda seen: not (self._refuses(seen.layer) or (exact and seen.pooled)),
            silent=[layer for layer in self.layers.first if not self._trusts(layer)],
            spare=self._list_spare,
        )
        self.unsure |= not heard.sure
        names = self._without_layer(passed.gradients, heard)
        squares = self._squares(rows, names, passed, slopes[:own], exact)
        return self._split_reading(heard.layers, squares, passed, own, slopes), heard.answers

    def _hears_all(self, known: Set[str], calls: Sequence[Tap], weighed: bool) -> bool:
        """Whether inputs alone will do: some process heard those of all these layers, and on none rows have weights.

        Compiled graphs tell no inputs alone; and which inputs are whose, for the weights, is known of whole readings.
        """
        own = {call.layer.key for call in calls if call.inputs.numel()}
        heard = self._unite(known | {WEIGHED}, own | {WEIGHED} if weighed else own)
        return heard >= known and WEIGHED not in heard

    def _pass_over(self, measurement: Estimate | None) -> Reading:
        """Nothing of a batch without rows; the shared source of labels moves as on the other processes."""
        span, shared = self._line_up(0, 0), self.generator
        seed, squares = (2**62, 1), not self._named_by_layers()
        draws = [] if isinstance(self.estimate, (ExactLabels, Empirical)) else [seed]
        if self._needs_signs():
            draws += [(2, span.total)] * span.cotangents
        for high, count in draws + [seed] * ((measurement is not None) + squares):
            torch.randint(high, (count,), generator=shared, device=shared.device)
        return Reading([], {}, 0, scores=(dict[str, Tensor](),) * (span.cotangents if measurement is None else 1))

    def _pass(
        self,
        criterion: Criterion,
        outputs: Any,
        targets: Any,
        rows: Tensor,
        weights: Tensor,
        calls: list[Tap],
        record: BatchRecord,
        measurement: Estimate | None,
        asking: bool,
    ) -> tuple[Pass, int, list[list[Tensor | None]]]:
        """The pass with the derivatives at its taps, how many cotangents are the statistics', and all slopes."""
        held = set[str]() if asking else {name for names in self.layers_by_names(self.trusted) for name in names}
        watched = {name: p for name, p in self.leaves.items() if name not in held and p.requires_grad}
        examples, calls = self._place_calls(criterion, outputs, rows, calls, record)
        # labels y ~ p(y | outputs), and their scores s with E[s s^T] = M (Martens & Grosse 2015, section 5)
        drawn = [self._cotangents(self.estimate, criterion, outputs, targets, weights, examples)]
        span = self._line_up(examples.count, len(drawn[0]))
        sequences = find_sequences(calls, rows, len(next(leaves(outputs))))
        drawn[0] = self._share_signs(drawn[0], sequences or examples, span)
        drawn += (
            []
            if measurement is None
            else [self._cotangents(measurement, criterion, outputs, targets, weights, examples)]
        )
        cotangents = [c.to(rows.dtype) for part in drawn for c in part]
        # delta = J^T s at every layer, by one backward pass a draw
        calls, deltas, slopes = self.taps.reach(rows, calls, cotangents, list(watched.values()))
        judged = len(drawn[0])
        arrived = slopes[0]
        if judged > 1:  # a slope is None for all cotangents or for none
            columns = zip(*slopes[:judged], strict=True)
            arrived = [each[0] if each[0] is None else combine([t.to_dense() for t in each]) for each in columns]
        gradients = dict(zip(watched, arrived, strict=True))
        eps = max((torch.finfo(call.dtype).eps for call in calls), default=0.0)
        passed = Pass(
            rows,
            calls,
            examples,
            cotangents,
            deltas,
            self.leaves,
            gradients,
            eps=eps,
            judged=judged,
            weights=examples.weigh(weights, span.share / span.mass if span.mass else None),
        )
        return passed, len(drawn[0]) if measurement is not None else len(cotangents), slopes

    def _without_layer(self, watched: Iterable[str], heard: Heard) -> list[str]:
        """The watched parameters that get squares. One without a row keeps what it has."""
        layers = [x for x in self.layers.by_key.values() if self._trusts(x) and heard.answers.get(x.key, True)]
        answered = {x.layout.names for x in self.layers.by_key.values() if x.key in heard.answers}
        layers += [x for x in self.layers.first if not self._refuses(x) and x.layout.names not in answered]
        held = heard.held_names | {name for layer in layers for name in layer.layout.names}
        return [name for name in watched if name not in held]

    def _split_reading(
        self,
        layers: list[Seen],
        squares: dict[str, Tensor],
        passed: Pass,
        own: int,
        slopes: list[list[Tensor | None]],
    ) -> Reading:
        """The statistics' own cotangents, and those for measurements: the others, or all where there are no others."""
        measuring = slice(own if own < len(passed.cotangents) else 0, None)
        measured = [part.only(measuring) for seen in layers for part in seen.split_parts() if not part.pooled]
        scores = list[dict[str, Tensor]]()  # of the parameters without a layer, dense, a dict for each cotangent
        for each in slopes[measuring]:
            known = zip(passed.gradients, each, strict=True)
            scores.append({n: slope.to_dense() for n, slope in known if slope is not None and n in squares})
        layers = [seen.only(slice(own)) for seen in layers]
        return Reading(layers, squares, len(passed.outputs), measured, tuple(scores))

    def _products(self, rows: Tensor) -> list[Tap]:
        """The products with matrices that are trusted or not judged yet, in the graph of the outputs."""
        wanted = [layer for layer in self.layers.list_matrices(self.trusted) if not self._refuses(layer)]
        wanted += [layer for layer in self.layers.spare if self._trusts(layer)]
        return [*find_products(rows, wanted, self.leaves)]

    def _place_calls(
        self, criterion: Criterion, outputs: Any, rows: Tensor, calls: list[Tap], record: BatchRecord
    ) -> tuple[Examples, list[Tap]]:
        """What the examples are, and the calls with their places: asked once per shapes, and at every 64th reading."""
        tree, family = map_tensors(outputs, torch.detach), criterion.family
        count = max(len(next(leaves(outputs))), 1)
        inputs = [] if record.last is None else record.last.call.tensors()
        batch = count if len(rows) % count == 0 else 1
        known = partial(partitions, tree, rows.detach(), family.rows, family.mv, batch, inputs)
        shapes = [tuple(t.shape) for t in (*leaves(tree), *inputs)]
        strict = isinstance(self.estimate, ExactLabels) and not mixes_examples(self.model)
        # it goes backward to find out, for shapes that another process may have met before
        fresh = self.places.key(rows, calls, shapes) not in self.places.found
        self.passes.align(1.0 + sum(call.inputs.numel() for call in calls) if fresh else 0.0)
        return self.places.find(rows, calls, known, shapes, strict, afresh=self.readings % 64 == 0)

    def _squares(
        self,
        rows: Tensor,
        names: list[str],
        passed: Pass,
        slopes: Sequence[Sequence[Tensor | None]],
        exact: bool,
    ) -> dict[str, Tensor]:
        """The diagonal over examples of parameters without a layer, those that were reached.

        slopes: of all watched parameters, per cotangent of the statistics' own.
        """
        examples = passed.examples
        if self._named_by_layers():
            generator = torch.Generator()
        else:  # the shared source moves alike in all processes
            shared = self.generator
            seed = int(torch.randint(2**62, (), generator=shared, device=shared.device))
            generator = torch.Generator().manual_seed(seed + self.processes.rank)
        self.passes.align(bool(names), examples.count)
        if not names:
            return {}
        params = [self.leaves[name] for name in names]
        cotangents, places = passed.cotangents[: len(slopes)], [list(passed.gradients).index(name) for name in names]
        gradients = [[each[place] for place in places] for each in slopes]
        squares = dict(zip(names, square_elementwise(rows, params, cotangents, examples, gradients), strict=True))
        if rest := [name for name in names if squares[name] is None]:
            groups, params = examples.count if exact else None, [self.leaves[name] for name in rest]
            squares |= zip(rest, example_squares(rows, params, cotangents, examples, generator, groups), strict=True)
        # who tells nothing keeps what it has, as a layer without rows does; rows whose targets do not count tell zeros
        known = {name: square for name, square in squares.items() if square is not None}
        return {name: square for name, square in known.items() if self.silent or bool(square.any())}

    def _list_spare(self, answers: Mapping[str, bool]) -> Sequence[Traced]:
        """The matrices that their layers were just found not to explain."""
        if all(answers.values()):
            return ()
        lost = [layer for layer in self.layers.known.values() if answers.get(layer.key) is False]
        weights = {layer.layout.weight for layer in lost if not self._refuses(layer)}
        return [layer for layer in self.layers.spare if layer.layout.weight in weights and not self._refuses(layer)]

    def _agree_on_reading(self, own: Reading, answers: Mapping[str, bool], summed: bool) -> Reading | None:
        """The part of a reading that all processes take the same way."""
        layers, span = self.layers.by_key, self._line_up(own.rows, 1)
        roll = call_roll(
            self.processes, list(layers), list(self.named), answers, list(own.squares), own.rows, own.layers
        )
        if roll.failed:
            return None
        self.refused |= {claim for key in roll.refused for claim in layers[key].claims}
        self.trusted -= self.refused
        seen, passed = {part.key: part for part in own.layers}, dict[str, Seen]()
        for key, layer in layers.items():
            if key not in roll.layers or key in roll.refused:
                continue
            if key not in seen or key in roll.parts:
                like = self._like(layer.layout.names[0])
                part = seen[key] if key in seen else make_empty_pass(layer, span.cotangents, like, key in roll.tokens)
                seen[key] = match_parts(part, roll.parts.get(key, 1), span.cotangents, like)
            passed[key] = seen[key]
            self.trusted.update(layer.claims)
        held = {name for key in passed for name in layers[key].layout.names}
        squares = {
            name: own.squares[name] if name in own.squares else zeros_whole(self.named[name], self._like(name).dtype)
            for name in roll.names
            if name not in held
        }
        measured = [part for part in own.apart if part.key in passed]
        weights, own_part = {**roll.layers, **roll.names}, span if self.processes.size > 1 else None
        density = span.scale / span.rows if summed and span.scale and span.rows else 1.0
        return Reading(
            [*passed.values()], squares, own.rows, measured, own.scores, weights, roll.positions, own_part, density
        )

    @property
    def _device(self) -> torch.device:
        return next(iter(self.named.values())).device

    def _like(self, name: str) -> Tensor:
        """Nothing, of the dtype and on the device of a parameter's statistics."""
        p = self.named[name]
        return torch.empty(0, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)

    def _refuses(self, layer: Layer) -> bool:
        return not self.refused.isdisjoint(layer.claims)

    def _trusts(self, layer: Layer) -> bool:
        return self.trusted.issuperset(layer.claims)

    def _cotangents(
        self,
        estimate: Estimate,
        criterion: Criterion,
        outputs: Any,
        targets: Any,
        weights: Tensor,
        examples: Examples,
    ) -> list[Tensor]:
        tree = widen(outputs)
        family = criterion.family

        rows = family.rows(tree)

        def scores() -> Tensor:
            return torch.zeros_like(rows) if self.silent else criterion.scores(tree, targets)[0]

        with torch.no_grad():
            shared = self.generator
            # these draw nothing: the shared source stands where that of one process would
            generator = shared if isinstance(estimate, (ExactLabels, Empirical)) else self.processes.generator(shared)
            return list(estimate.cotangents(Outputs(tree, rows, family, weights, examples, scores), generator))

    def _share_signs(self, cotangents: list[Tensor], examples: Examples, span: Span) -> list[Tensor]:
        """The cotangents with a sign per example, the same whatever process an example is on, and as many on all."""
        if isinstance(self.estimate, Sampled):
            return cotangents
        cotangents = cotangents + [torch.zeros_like(cotangents[0])] * (span.cotangents - len(cotangents))
        if not self._needs_signs():
            return cotangents
        return [sign_examples(cotangent, examples, self.generator, span) for cotangent in cotangents]

    def _needs_signs(self) -> bool:
        """Whether a sum over examples may be squared: of a layer that does not tell them apart, or without a layer.

        Labels drawn at random have signs.
        """
        if isinstance(self.estimate, Empirical):
            return True
        return not (isinstance(self.estimate, Sampled) or self._named_by_layers())

    def _line_up(self, count: int, cotangents: int) -> Span:
        """Where this process's examples stand among all, asked once per reading, and before anything can fail."""
        if self.span is None:
            rows, scale, mass = self.counts
            self.span = line_up(self.processes, self._device, count, rows if count else 0, scale, cotangents, mass)
        return self.span

    def _named_by_layers(self) -> bool:
        """Whether every parameter belongs to a layer, whose examples' scores are told apart."""
        layers = [layer for layer in self.layers.first if not self._refuses(layer)]
        claimed = {name for layer in layers for name in layer.layout.names}
        return claimed.issuperset(self.named)

    def _replay_pass(
        self, criterion: Criterion, outputs: Any, record: BatchRecord, rows: int
    ) -> tuple[Reading, dict[str, bool]]:
        """From one more pass, as a pure function: graphs compiled before there were taps let nobody listen."""
        last = record.find_pass()
        if last is None:
            raise ValueError(
                "no statistics: no layer of the model ran in training mode since the last step; call "
                "model.train() and the model itself (not a copy of it, and outside of torch.func.vmap, grad and their "
                f"like) before optimizer.loss(outputs, targets); {COMPILED}, or give the optimizer the compiled model"
            )
        with last.modes_of(self.model), run_uncompiled():
            loss = record.follow(outputs)
            data = loss.data()
            statistics = hear_metric(
                fisher(self.model, criterion, outputs=loss.settle(self.model, self.named, record.outputs)),
                self.named,
                Labelled(data.inputs, data.targets),
                self.estimate,
                self.processes.generator(self.generator),
                random=last.random,
                trusted=self.trusted or None,
            )
        measured = [part for seen in statistics.layers for part in seen.split_parts()]
        answers = {seen.key: True for seen in statistics.layers}
        return Reading(statistics.layers, statistics.squares, rows, measured), answers


WEIGHED = ""  # stands among the keys of layers for rows that have weights


def widen(outputs: Any) -> Any:
    """Outputs without their graph, at least in float32."""
    return map_tensors(outputs, lambda t: t.detach().to(torch.promote_types(t.dtype, torch.float32)))


def may_be_examples(rows: Tensor, record: BatchRecord) -> bool:
    """Whether the rows of the outputs may be the examples, as far as the model's own inputs tell."""
    inputs = [] if record.last is None else record.last.call.tensors()
    return len(rows) > 0 and (not inputs or any(t.dim() > 0 and len(t) == len(rows) for t in inputs))


def runs_once(error: RuntimeError) -> bool:
    """True where a compiled backward pass refuses to leave its graph for another.

    Torch decides so when it makes the code: where shapes are dynamic, ahead of any backward pass; else at the first.
    """
    return "donated" in str(error)


def find_used(roots: Iterable[Node | None], asked: Mapping[str, Tensor]) -> set[str]:
    """The names of those leaves that the graph above these roots leads to, through tensors with entries."""
    names, used = {id(leaf): name for name, leaf in asked.items()}, set[str]()
    for node in walk(roots, is_empty) if names else ():
        used |= {names[id(leaf)] for leaf in [leaf_of(node)] if id(leaf) in names}
        if len(used) == len(names):
            break
    return used


def release(reader: Reader, listener: Any) -> None:
    """Take all hooks off the model."""
    reader.detach()
    listener.remove()
