"""The natural gradient layer by layer, as a drop-in `torch.optim.Optimizer`: K-FAC and its family."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, Likelihood, as_criterion
from natgrad.ground.constants import JUDGED_EVERY, LONGEST
from natgrad.ground.pure import check_followed, check_select, full_precision, leaves
from natgrad.ground.typed_torch import measure_norm
from natgrad.ground.whole_tensors import WholeTensors, any_split
from natgrad.optim.base import Live, ModelOptimizer, count_rows
from natgrad.optim.block_step import (
    BlockEvidence,
    is_due,
    is_due_to_measure,
    is_watched,
    part_of_rows,
    sample_examples,
)
from natgrad.optim.blocks import Averages, BatchUpdate, dense
from natgrad.optim.checkpoint import Checkpoint, Format
from natgrad.optim.checks import (
    check_blocks,
    given_parameters,
    maximize_criterion,
    named_parameters,
    refuse_maximize,
    settle_rule,
)
from natgrad.optim.guard import check_trouble, warn_of_strangers
from natgrad.optim.objective import (
    BatchForm,
    Called,
    Objective,
    as_block_damping,
    objective_of_blocks,
    replaying,
)
from natgrad.optim.options import BlockOptions, BlockSettings, read_settings, with_options
from natgrad.optim.passes import BatchRecord, Loss, function_of, listen
from natgrad.optim.processes import Owners, check_share, meet, refuse_trials, weigh_loss
from natgrad.optim.reading import Reader, release
from natgrad.optim.report import StateReport, state_report
from natgrad.optim.state import Block, Hearing, OwnGradients, State, gather_numbers, move_state, read_parameters, single
from natgrad.optim.step import Choices, StepReport, bounded_below
from natgrad.rules import Momentum
from natgrad.structures import ExactLabels, Layerwise, Sampled


@dataclass
class Pending:
    """What the passes since the last step told: it is bound with the next step, or thrown away with its batch."""

    update: BatchUpdate | None = None  # what they made of the averages; None where none was read
    # those that were read, each with the update before it
    losses: list[tuple[Loss, BatchUpdate | None]] = field(default_factory=list[tuple[Loss, BatchUpdate | None]])
    batch: int = -1  # the number of the gradients that they belong to
    # blocks of a batch that was thrown away, of layers that this one does not reach
    discarded: dict[str, Block] = field(default_factory=dict[str, Block])
    # what waits for a reading that is on its way, the sample of it, and how many were taken before
    coming: tuple[Callable[[], BatchUpdate], Any, int] | None = None
    own: OwnGradients = field(default_factory=OwnGradients)  # what `opt.loss` put into the gradients
    nats: Any = 1.0  # nats per example in one unit of the last loss


@dataclass
class BlockFlow:
    """What the flow in blocks has besides: who reads a pass, what becomes of it, and what it told so far."""

    criterion: Criterion  # the loss that the metric belongs to
    reader: Reader  # reads passes
    averages: Averages  # how they become blocks
    choices: Choices  # what does not change between steps
    pending: Pending = field(default_factory=Pending)  # what the passes since the last step told
    # parameters of whose gradients it was said that the statistics lack them
    warned: set[str] = field(default_factory=set[str])


class StructuredNaturalGradient(ModelOptimizer):
    """theta <- theta + rule(-lr (G + damping I)^-1 m), G in one block per layer: the flow in blocks of the engine.

    m is the running mean of the gradient. On update steps `opt.loss` also goes backward from sampled labels, to the
    layers only: `.grad`, buffers and the global random state are untouched. What the rule knows of the metric along a
    step was measured on the pass of the last update, where `measure` is on.

    Passes in evaluation mode are not read, unless `train_in_eval=True`; training on in evaluation mode warns after 5
    steps whose statistics were due, and raises RuntimeError after 25. Statistics that are not finite are not taken, and
    an inverse that fails leaves its last good one in place; both are counted in `state_report().failures`, and so is a
    batch that is left out because its loss is more than ten times the highest of the run. A step happens whole or not
    at all: Ctrl-C and errors leave the last one's state.

    With several processes (`torch.distributed`), model may be a `DistributedDataParallel` or what it wraps: statistics
    and losses are added up over the processes, and all take the same step. They all must call `loss` and `step` alike.

    Args:
        model: An `nn.Module`.
        criterion: Its loss from `torch.nn`, or an `ng` likelihood.
        structure: Which block per layer: `ng.Kronecker(decay=.95)`, ...; its estimate says how labels are drawn.
        lr: Factor on the length that the rule finds.
        **options: Rule, momentum, damping, intervals and more: `natgrad.optim.BlockOptions`.

    Raises:
        TypeError: For a criterion that is not a likelihood, a model in `FullyShardedDataParallel`: use `fully_shard`.
        ValueError: For a rule that needs the solver of a flat system.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.StructuredNaturalGradient(model, nn.CrossEntropyLoss(), ng.Kronecker(0.95), lr=1.0)
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    FORMAT = Format(
        "blocks",
        "ng.kfac or its like",
        frozenset({"clock", "blocks", "trusted", "refused", "generator", "ratio"}),
        frozenset({"mean"}),
        older=True,
    )

    _flow: BlockFlow

    @with_options(BlockOptions, BlockSettings)
    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module | Likelihood | Criterion | str,
        structure: Layerwise,
        lr: float = 1.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        chosen = read_settings(BlockSettings, options)
        check_blocks(model, structure, update_every=chosen.update_every, invert_every=chosen.invert_every)
        self.model, processes = meet(model, chosen.group, parts=True)
        processes.check(structure)
        loss = as_criterion(criterion)
        loss, self.structure = maximize_criterion(loss) if chosen.maximize else loss, structure
        self.rule = settle_rule(chosen.rule, chosen.max_kl, chosen.kl_share)
        self.damping = as_block_damping(chosen.damping)
        self.on_trouble = check_trouble(chosen.on_trouble)
        self.update_every, self.invert_every = chosen.update_every, chosen.invert_every
        self.measure, self.train_in_eval = chosen.measure, chosen.train_in_eval
        refuse_trials(model, self.rule if self.rule.needs_loss else self.damping if self.damping.needs_ratio else None)
        check_select(chosen.outputs)
        refuse_maximize(chosen.maximize, processes.size)
        record = BatchRecord(chosen.outputs, maximize=chosen.maximize)
        record.begins = weakref.WeakMethod(self._follow_groups)
        named = dict[str, Tensor]()  # what the groups hold, in the model's order
        self._live = Live(named, record, processes, State())
        momentum = 0.0 if isinstance(self.rule, Momentum) else 0.9
        momentum = momentum if chosen.momentum is None else chosen.momentum
        defaults = {"lr": lr, "momentum": momentum, "damping": self.damping.initial(), **self.rule.options}
        defaults |= {"weight_decay": chosen.weight_decay, "l2": chosen.l2}
        super().__init__(given_parameters(chosen.params, named_parameters(self.model)), defaults)
        reader = Reader(self.model, named, structure, processes)
        averages = Averages(structure, named, Owners(processes, *check_share(chosen.share)))
        known = (self.rule, self.damping, processes, bounded_below(loss), self.damping.every or JUDGED_EVERY)
        self._flow = BlockFlow(loss, reader, averages, Choices(*known, invert_every=self.invert_every))
        hook = listen(self.model, record, traceable=True, in_eval=self.train_in_eval)
        self._live.finalizer = weakref.finalize(self, release, reader, hook)

    # what the user calls around a step

    @property
    def criterion(self) -> Criterion:
        """The loss that the metric belongs to."""
        return self._flow.criterion

    def _report_later(self) -> Callable[[], StateReport]:
        live, guard = self._live, self._update_so_far.guard
        return partial(state_report, live.told.numbers, live.state.step, guard.failures, guard.refused)

    def _settle(self) -> None:
        settings, leaves = self._list_alike(), self._flow.reader.leaves
        self._live.processes.settle(self.model, self._live.named, self.structure, settings, leaves)
        refuse_maximize(self._live.record.maximize, self._live.processes.size)
        averages, state = self._flow.averages, self._live.state
        if averages.owners.is_shared and not averages.owners.of.keys() >= state.blocks.keys():
            # they were loaded before the first pass of `fully_shard` told of other processes
            costs = {key: averages.cost(block.layout, block.layer) for key, block in state.blocks.items()}
            self._live.state = replace(state, blocks=averages.share_out(state.blocks, costs))

    def _list_alike(self) -> Generator[object]:
        """What must be alike on all processes, besides the structure."""
        owners = self._flow.averages.owners
        names = "update_every", "invert_every", "measure", "train_in_eval", "on_trouble"
        yield self.rule
        yield self.damping
        yield {name: getattr(self, name) for name in names} | {"share": owners.share, "budget": owners.budget}

    def _record_loss(self, outputs: Any, targets: Any, value: Tensor, chosen: bool) -> None:
        self._settle()
        live, flow, pending = self._live, self._flow, self._flow.pending
        rows, state = count_rows(self.criterion, outputs), live.state
        needed = flow.choices.is_judged(state) or self.rule.needs_loss
        needed = needed or (self._is_bounded() and is_watched(state.length, state.step))
        weight = weigh_loss(live.processes, self.criterion, outputs, targets, value, live.processes.averages)
        live.record.record_loss(self.criterion, outputs, targets, value, rows, weight, chosen=chosen, needed=needed)
        pending.nats = self.criterion.nats(outputs)
        if flow.reader.taps.armed:
            update = self._begin_update()
            if pending.losses and pending.losses[-1][0] in live.record.losses:
                pending.losses = []  # those before it count: their averages need not be held
            pending.losses.append((live.record.computed[-1], pending.update))
            wanted, hearing = flow.reader.wants(update.hearing, self._list_unread(), outputs)
            if wanted:
                self._read(replace(update, hearing=hearing), outputs, targets, value)
            flow.reader.taps.release_with(value)

    def _describer(self) -> Callable[[str, Tensor], tuple[str, int, int]]:
        self._settle_reading()
        blocks = self._update_so_far.blocks
        held = {name: block for block in blocks.values() for name in block.layout.names}
        memory = replace(self._live.state, blocks=blocks).by_parameter()

        def describe(name: str, p: Tensor) -> tuple[str, int, int]:
            numbers = sum({t.data_ptr(): t.numel() for t in leaves(memory.get(name, {}))}.values())  # shared ones once
            kind = self._flow.averages.kind(held[name]) if name in held else "not read yet"
            return kind, p.numel(), numbers

        return describe

    @property
    def _update_so_far(self) -> BatchUpdate:
        """What the passes since the last step made of the averages."""
        state = self._live.state
        return self._flow.pending.update or BatchUpdate(state.blocks, state.hearing, state.guard)

    def _move_memory(self, changed: Sequence[str]) -> None:
        live, flow = self._live, self._flow
        update = flow.pending.update
        live.state, flow.pending.losses = move_state(live.state, live.named, changed), []
        if update is not None:
            moved = move_state(State(blocks=update.blocks), live.named, changed)
            flow.pending.update = replace(update, blocks=moved.blocks)

    def _rename(self, renamed: Mapping[str, str]) -> None:
        """Nothing is remembered of renamed parameters: what they stand for is something else now."""
        self._settle_reading()
        pending, state = self._flow.pending, self._live.state

        def others(entries: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in entries.items() if name not in renamed}

        def drop(blocks: Mapping[str, Block]) -> dict[str, Block]:
            return {key: block for key, block in blocks.items() if renamed.keys().isdisjoint(block.layout.names)}

        stacks = state.stacks.select(lambda block: renamed.keys().isdisjoint(block.layout.names))
        self._live.state = replace(state, blocks=drop(state.blocks), stacks=stacks, vectors=others(state.vectors))
        pending.update = pending.update and replace(pending.update, blocks=drop(pending.update.blocks))
        pending.discarded, self._live.kinds = drop(pending.discarded), others(self._live.kinds)
        super()._rename(renamed)
        self._listen_anew()

    def _listen_anew(self) -> None:
        """Listen to the layers of the parameters named now; those that have a block of their own are trusted still."""
        state, reader, pending = self._live.state, self._flow.reader, self._flow.pending
        reader.detach()
        reader.attach(self._live.named)
        held = {(key, block.layout) for key, block in state.blocks.items() if block.layer is not None}
        layers = [layer for key, layer in reader.layers.by_key.items() if (key, layer.layout) in held]
        trusted = frozenset(claim for layer in layers for claim in layer.claims)
        self._live.state = replace(state, hearing=Hearing(trusted, labels=state.hearing.labels))
        update, pending.losses = pending.update, []
        pending.update = update and replace(update, hearing=Hearing(trusted, labels=update.hearing.labels))

    def _adopt(self, named: Mapping[str, Tensor]) -> None:
        listens = self._live.finalizer is not None
        if listens:
            self._settle_reading()
        super()._adopt(named)
        if listens:
            self._listen_anew()
            self._arm()

    # checkpoints

    def _by_parameter(self) -> dict[str, dict[str, Any]]:
        memory = self._live.state.by_parameter()
        for name, numbers in gather_numbers(self._flow.averages.owners, self._live.state).items():
            memory[name] = {**memory.get(name, {}), **numbers}
        return memory

    def _fit(self, saved: Checkpoint) -> Callable[[], None]:
        named, flow = self._live.named, self._flow
        owners = flow.averages.owners.load(saved.extra.get("owners"))
        averages = replace(flow.averages, owners=owners)
        state = State.load(saved.extra, self.criterion, saved.labels, named)
        layers = flow.reader.layers_by_names(state.hearing.trusted)
        fresh = flow.reader.names_to_judge(state.hearing)  # of a kind of layer that was not known then: read anew
        blocks = {key: names for key, names in saved.extra["blocks"].items() if fresh.isdisjoint(names)}
        costs = {
            key: averages.cost(single(names[0], named[names[0]]) if layer is None else layer.layout, layer)
            for key, names in blocks.items()
            if named.keys() >= set(names)
            for layer in [layers.get(tuple(names))]
        }
        averages.share_out({}, costs)
        numbers = {name: saved.state[p] for name, p in named.items() if p in saved.state}
        state = read_parameters(state, numbers, blocks, layers, named, averages.operator, owners.holds)
        state = replace(state, blocks=averages.share_out(state.blocks, {}))

        def restore() -> None:
            flow.averages, self._live.state, self._live.told = averages, state, StepReport()
            flow.pending = Pending(nats=flow.pending.nats)
            self._arm()

        return restore

    def _labels(self) -> torch.Generator:
        """The source of labels as it stands, or as it will be where the first labels are drawn."""
        labels = self._live.state.hearing.labels
        generator = torch.Generator(next(iter(self._live.named.values())).device).manual_seed(self.structure.seed)
        return generator if labels is None else generator.set_state(labels)

    # reading a pass

    def _read(self, update: BatchUpdate, outputs: Any, targets: Any, value: Tensor) -> None:
        """Read the statistics of the pass that made these outputs, if its loss is fit for them."""
        state, reader, pending = self._live.state, self._flow.reader, self._flow.pending
        own, alone = self._live.record.computed[-1], self._live.processes.size == 1
        fit = update.guard.is_fit(float(own.value), state.step, self._flow.choices.bounded)
        if not fit:
            own.ask_count()
        with reader.passes.run(fit, own.rows, len(next(leaves(outputs)))):
            # NaN too where no target counts; the other processes go on without this one's rows then
            if fit or not (alone or own.rows):
                # users call this under autocast, which would round second moments
                with full_precision(self._live.named):
                    known = self._list_inputs(update)
                    self._start_reading(update, outputs, targets, known)
                    if own.rows and known is None and state.outside.asks:
                        pending.own.listen(self.criterion, outputs, targets, value, reader.leaves)
            else:
                reader.skip(value)
                pending.update = update.fail(own.rows > 0)
        if alone:
            self._settle_reading()

    def _begin_update(self) -> BatchUpdate:
        """What the passes of this batch made of the averages so far.

        Where gradients were cleared and no loss went backward since, the batch before was thrown away: its passes count
        for those blocks alone that this batch does not reach.
        """
        self._settle_reading()
        pending, record = self._flow.pending, self._live.record
        if pending.update is not None and pending.batch != record.batch and not record.losses:
            pending.discarded, pending.update = {**pending.discarded, **pending.update.blocks}, None
            pending.losses = []
        pending.batch = record.batch
        return self._update_so_far

    def _list_inputs(self, update: BatchUpdate) -> set[str] | None:
        """The layers whose inputs alone are read, all that have statistics; None where derivatives are needed too."""
        needed = self._flow.choices.needs_derivatives(self._live.state.is_turned) or not self.structure.separates
        if needed or self._list_unread():
            return None
        return {key for key, block in update.blocks.items() if block.layer is not None}

    def _start_reading(self, update: BatchUpdate, outputs: Any, targets: Any, known: set[str] | None) -> None:
        """Read the statistics of the pass. Several processes add them up while the user's backward pass goes on."""
        state, flow = self._live.state, self._flow
        # labels that a metric was estimated from measure it too short along the direction that it gives
        measuring = self.measure and (self.rule.measures(state.is_turned) or self.damping.needs_ratio)
        every = max(LONGEST, self.update_every)
        measuring = measuring and is_due_to_measure(state.pace, state.step, every)
        measurement = None if not measuring or isinstance(self.structure.estimate, ExactLabels) else Sampled()
        sources = self.criterion, outputs, targets, self._live.record
        reading, hearing = flow.reader.read(update.hearing, *sources, measurement, known)
        if reading is None:
            flow.pending.update = replace(update, hearing=hearing).fail(not flow.reader.is_silent)
            return
        sample = sample_examples(reading) if measuring else None
        reading.apart.clear()
        part = update.part if update.taken else part_of_rows(state.pace, state.step, state.is_turned)
        update = replace(update, hearing=hearing, part=part)
        arrive = flow.averages.start(update, reading)
        flow.pending.coming = arrive, sample, update.taken

    def _settle_reading(self) -> None:
        """Wait for the statistics of the last pass. Nothing is sent: a process may do this alone."""
        pending = self._flow.pending
        if pending.coming is None:
            return
        (arrive, sample, taken), pending.coming = pending.coming, None
        update, before = arrive(), self._live.state.blocks
        left = {key: block for key, block in pending.discarded.items() if update.blocks.get(key) is before.get(key)}
        blocks = {**update.blocks, **left} if left else update.blocks
        pending.update = replace(update, blocks=blocks, sample=sample if update.taken > taken else None)

    def _drop_unused(self) -> None:
        """Forget what was read last of losses that did not go backward, where others did."""
        gone, pending = self._live.record.losses, self._flow.pending
        while gone and pending.losses and pending.losses[-1][0] not in gone:
            pending.update = pending.losses.pop()[1]

    def _list_unread(self) -> set[str]:
        """The parameters that have no block yet."""
        blocks = self._update_so_far.blocks.values()
        return self._live.named.keys() - {name for block in blocks for name in block.layout.names}

    def _arm(self) -> None:
        """Listen to the next pass if its statistics are due, or if it may use a parameter that has no block yet."""
        state, reader = self._live.state, self._flow.reader
        due = is_due(state.pace.updated, state.step, state.is_turned, self.update_every)
        reader.arm(due, bool(self._list_unread() - state.hearing.tried))
        asks = self.rule.needs_loss or self.damping.needs_ratio or self._is_bounded()
        self._live.record.keeps = reader.taps.armed or asks

    def _is_bounded(self) -> bool:
        """Whether a bound on the KL is set: steps near it are measured, on the pass done again."""
        return self._options().get("max_kl", math.inf) < math.inf

    # one step

    def _step(self, called: Called) -> None:
        live, flow = self._live, self._flow
        self._settle_reading()
        self._drop_unused()
        self._follow_parameters()
        settings = dict[str, dict[str, Any]]()
        active = dict[str, Tensor]()
        for name, p, group in self._by_group():
            settings[name] = group
            if p.grad is not None and id(p) not in live.gone:
                active[name] = p
        if not active:
            return
        evidence = self._gather_evidence(active, settings, called)
        try:
            flow.reader.arm(False)  # what follows may call the model again
            unread = (self._list_unread() - flow.warned) & evidence.gradients.keys()
            strangers = {name for name in unread if bool(measure_norm(evidence.gradients[name]) > 0)}
            if strangers and evidence.update.blocks:
                self._check_followed()
            if not self._take(flow.choices, evidence).trouble and strangers:
                warn_of_strangers(strangers)
                flow.warned |= strangers
        except BaseException:  # Ctrl-C: the next pass on this batch is read as this one was
            self._arm()
            raise

    def _gather_evidence(
        self, active: dict[str, Tensor], settings: dict[str, dict[str, Any]], called: Called
    ) -> BlockEvidence:
        """What this batch told."""
        live, flow, pending = self._live, self._flow, self._flow.pending
        record, update = live.record, flow.averages.complete(self._update_so_far, live.state.blocks)
        if len(losses := record.losses or record.computed) > 1:
            for loss in losses:
                loss.ask_count()
        return BlockEvidence(
            averages=flow.averages,
            gradients={name: dense(p) for name, p in active.items()},
            losses=losses,
            nats=pending.nats,
            scale=record.scale,
            update=update,
            values=WholeTensors(live.named),
            settings=settings,
            late=flow.reader.due and not update.taken,
            own=OwnGradients() if record.is_stale else pending.own,  # the rest is of another batch then
            trial=partial(self._open_trial, active, called),
            batch=BatchForm(self.model, self.criterion, record, live.named, live.processes, pending.nats),
            examples=record.count_examples,
            check_followed=self._check_followed,
        )

    def _check_followed(self) -> None:
        """ValueError where a gradient that the statistics lack comes from the outputs all the same."""
        named, record = self._live.named, self._live.record
        if any_split(named.values()):  # a pass at other leaves has no place in a model in parts
            return
        with replaying(self.model, record), torch.enable_grad():
            for loss in record.used_losses():
                leaves = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
                try:
                    select = loss.settle(self.model, named, record.outputs)
                    rows = self.criterion.family.rows(function_of(self.model, loss.data(), select)(leaves))
                except (ValueError, NotImplementedError, RuntimeError):  # as where a step is measured: it is not known
                    continue
                check_followed(rows, leaves, self.model)

    @contextmanager
    def _open_trial(self, active: dict[str, Tensor], called: Called, asks: object) -> Generator[Objective]:
        """The loss of this step at other parameters."""
        with replaying(self.model, self._live.record):
            yield objective_of_blocks(self.model, self.criterion, self._live.record, active, called, asks)

    def _write_dampings(self, dampings: Mapping[str, float]) -> None:
        if dampings:
            for name, _, group in self._by_group():
                group["damping"] = dampings.get(name, group["damping"])

    def _forget_batch(self) -> None:
        super()._forget_batch()
        self._flow.pending = Pending(nats=self._flow.pending.nats)
        self._arm()


# How several processes share out one optimizer's blocks: exact counts of work, state and bytes


@dataclass(frozen=True)
class SharingReport:
    """What one process does of what all do.

    Attributes:
        share: "alone", "speed" or "memory"; "auto" before the first statistics.
        ranks: The number of processes.
        rank: This one's number.
        owners: By block, the number of the process that inverts it.
        inversions: Sum of n^3 over the matrices of this process's blocks.
        all_inversions: The same over all blocks.
        done: Sum of n^3 over all inversions that this process made so far.
        state_bytes: Of the tensors that this process remembers between steps.
        sent_bytes: Of messages so far, by what they are: "statistics" and "inverses" at updates; "directions" at every
            step with "memory"; "scalars" are counts and sums.
        messages: The number of messages so far, by what they are.
    """

    share: str
    ranks: int
    rank: int
    owners: Mapping[str, int]
    inversions: float
    all_inversions: float
    done: float
    state_bytes: int
    sent_bytes: Mapping[str, int]
    messages: Mapping[str, int]


def report_sharing(optimizer: StructuredNaturalGradient) -> SharingReport:
    """What this process does of the optimizer's work, and what it sent. Nothing is exchanged for it.

    Args:
        optimizer: `ng.kfac` or its like.

    Returns:
        Counts, exact ones.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.kfac(model, nn.CrossEntropyLoss())
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
        >>> ng.report_sharing(opt).share
        'alone'
    """
    if not isinstance(optimizer, StructuredNaturalGradient):
        raise TypeError(f"optimizer is {type(optimizer).__name__}, expected ng.kfac or its like, which have blocks")
    owners = optimizer._flow.averages.owners  # pyright: ignore[reportPrivateUsage] (a report of the folder's own)
    memory = optimizer._live.state.by_parameter()  # pyright: ignore[reportPrivateUsage]
    tensors = {t.data_ptr(): t for t in leaves(memory)}
    return SharingReport(
        share=owners.share if owners.is_shared else "alone",
        ranks=owners.processes.size,
        rank=owners.processes.rank,
        owners=dict(owners.of),
        inversions=sum(cost.work for key, cost in owners.costs.items() if owners.solves(key)),
        all_inversions=sum(cost.work for cost in owners.costs.values()),
        done=owners.done,
        state_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
        sent_bytes=dict(owners.processes.sent),
        messages=dict(owners.processes.messages),
    )
