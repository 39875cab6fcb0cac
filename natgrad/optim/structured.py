"""The natural gradient layer by layer, as a drop-in `torch.optim.Optimizer`: K-FAC and its family."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, Likelihood, as_criterion
from natgrad.hidden_parameters import check_followed
from natgrad.optim.accidents import WildBatches, cut, find_cut, warn_of_strangers, watch_late, watch_skipped
from natgrad.optim.aligned_passes import weigh_loss
from natgrad.optim.base import ModelOptimizer, check_trouble, count_rows
from natgrad.optim.batch_form import BatchForm
from natgrad.optim.block_averages import BlockAverages
from natgrad.optim.block_owners import Owners, check_node_size, check_share
from natgrad.optim.checkpoint import Checkpoint, Format
from natgrad.optim.checks import (
    NotFiniteError,
    check_blocks,
    check_statistics,
    describe_trouble,
    given_parameters,
    named_parameters,
    settle_rule,
)
from natgrad.optim.distributed import meet
from natgrad.optim.error_size import ErrorSize
from natgrad.optim.gathered_state import gather_numbers
from natgrad.optim.last_pass import Recall, listen
from natgrad.optim.objective import Called
from natgrad.optim.outside_losses import Outside
from natgrad.optim.parallel_models import refuse_trials
from natgrad.optim.pass_statistics import Reader, release
from natgrad.optim.pending_step import Attempt
from natgrad.optim.recipe_options import BlockOptions, BlockSettings, with_options
from natgrad.optim.reduction_ratio import Judge, PooledLoss, objective_of_blocks, replaying
from natgrad.optim.running_averages import dense
from natgrad.optim.schedule import due, due_to_measure, follow_loss, is_watched, pace, part_of_rows, start_clock
from natgrad.optim.state_report import StateReport, state_report
from natgrad.optim.step_length import Stride, bounded_below, sample_examples
from natgrad.pure import check_select, full_precision, leaves, pure_model
from natgrad.rules import BlockStep, Momentum, Quadratic, Step
from natgrad.structures import ExactLabels, Layerwise, Sampled
from natgrad.typed_torch import list_numbers, measure_norm
from natgrad.whole_tensors import any_split

SAVED = frozenset({"clock", "blocks", "trusted", "refused", "generator", "ratio"})
MEASURED = 20  # most steps between two measurements of the step's length, unless updates lie further apart


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

    FORMAT = Format("ng.kfac or its like", SAVED, frozenset({"mean"}), older=True)

    @with_options(BlockOptions, BlockSettings)
    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module | Likelihood | Criterion,
        structure: Layerwise,
        lr: float = 1.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        chosen = BlockSettings(**options)
        check_blocks(model, structure, update_every=chosen.update_every, invert_every=chosen.invert_every)
        self.model, self._ranks = meet(model, chosen.group, parts=True)
        self._ranks.check(structure)
        self._criterion, self.structure = as_criterion(criterion), structure
        self.rule = settle_rule(chosen.rule, chosen.max_kl, chosen.kl_share)
        self.on_trouble = check_trouble(chosen.on_trouble)
        self._bounded = bounded_below(self.criterion)
        self.update_every, self.invert_every = chosen.update_every, chosen.invert_every
        self.measure, self.train_in_eval = chosen.measure, chosen.train_in_eval
        self._judge = Judge(chosen.damping)
        self.damping = self._judge.damping
        refuse_trials(model, self.rule if self.rule.needs_loss else self._judge.strategy)
        self._named = {}  # what the groups hold, in the model's order
        check_select(chosen.outputs)
        self._recall = Recall(chosen.outputs)
        momentum = 0.0 if isinstance(self.rule, Momentum) else 0.9
        momentum = momentum if chosen.momentum is None else chosen.momentum
        defaults = {"lr": lr, "momentum": momentum, "damping": self.damping.initial(), **self.rule.options}
        defaults |= {"weight_decay": chosen.weight_decay, "l2": chosen.l2}
        super().__init__(given_parameters(chosen.params, named_parameters(self.model)), defaults)
        self._reader = Reader(self.model, self._named, structure, self._ranks)
        owners = Owners(self._ranks, *check_share(chosen.share), check_node_size(chosen.node_size))
        self._blocks = BlockAverages(structure, self._named, self.state, owners)
        self._told, self._clock, self._wild = dict[str, Any](), start_clock(), WildBatches()
        self._stride, self._outside, self._warned = Stride(), Outside(), set[str]()
        self._pending, self._bad = 0, False  # readings since the last step; whether its batch was counted as a failure
        self._arriving: tuple[Callable[[], bool], Any] | None = None  # a reading on its way
        self._nats: Any = 1.0
        self._part = 1.0  # of the rows that a reading needs, as it comes sooner or later than it is due
        self._finalizer = weakref.finalize(
            self, release, self._reader, listen(self.model, self._recall, traceable=True, in_eval=self.train_in_eval)
        )

    # what the user calls around a step

    @property
    def criterion(self) -> Criterion:
        """The loss that the metric belongs to."""
        return self._criterion

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the count of what they are a sum of."""
        self._settle_reading()
        if self._recall.losses:  # a batch that is thrown away
            self._bad = False
        super().zero_grad(set_to_none)

    def state_report(self) -> StateReport:
        """How the last step went: KL moved, share of the full step taken, the gradient's norm, failures so far."""
        return state_report(self._told, self._clock)

    def _report_later(self) -> Callable[[], StateReport]:
        return partial(state_report, self._told, dict(self._clock))

    def detach(self) -> None:
        """Take the hooks off the model. Also happens when the optimizer dies."""
        self._finalizer()

    def _record_loss(self, outputs: Any, targets: Any, value: Tensor, chosen: bool) -> None:
        self._ranks.settle(self.model, self.structure, self._reader.leaves)
        rows = count_rows(self.criterion, outputs)
        needed = self._judge.due(self._clock) or self.rule.needs_loss or is_watched(self._clock)
        weight = weigh_loss(self._ranks, self.criterion, outputs, targets, value, self._ranks.averages)
        self._recall.record_loss(self.criterion, outputs, targets, value, rows, weight, chosen=chosen, needed=needed)
        self._nats = self.criterion.nats(outputs)
        if self._reader.taps.armed and self._reader.wants(self._unread(), outputs):
            self._read(outputs, targets, value)
        elif self._reader.taps.armed:
            self._reader.forgo(value, self._recall.last is not None)

    def _unread(self) -> set[str]:
        """The parameters that have no block yet."""
        return self._named.keys() - {name for block in self._blocks for name in block.layout.names}

    def _arm(self) -> None:
        """Listen to the next pass if it is due, or may use a parameter that has no block yet."""
        fresh = self._unread() - self._reader.tried
        self._reader.arm(due(self._clock, "updated", self.update_every), bool(fresh))

    def _describer(self) -> Callable[[str, Tensor], tuple[str, int, int]]:
        self._settle_reading()
        held = {name: block for block in self._blocks for name in block.layout.names}

        def describe(name: str, p: Tensor) -> tuple[str, int, int]:
            numbers = sum({t.data_ptr(): t.numel() for t in leaves(self.state.get(p, {}))}.values())  # shared ones once
            kind = self._blocks.kind(held[name]) if name in held else "not read yet"
            return kind, p.numel(), numbers

        return describe

    def _follow_parameters(self) -> None:
        self._blocks.follow_parameters()

    def _follow_groups(self) -> None:
        """Name the parameters that the groups hold and that are trainable, and listen to their layers."""
        held = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        if held <= {id(p) for p in self._named.values()}:
            return
        held |= {id(p) for p in self._named.values()}
        ordered = {name: p for name, p in self.model.named_parameters() if id(p) in held}
        self._named.clear()
        self._named.update(ordered)
        self._recall.watched = list(ordered.values())
        if "_reader" in vars(self):
            self._reader.detach()
            self._reader.attach(self._named)

    # checkpoints: per parameter the gradient's mean, and under a block's first one its statistics and its inverse

    def _write_extra(self) -> dict[str, Any]:
        self._settle_reading()
        return {
            "clock": dict(self._clock),
            "blocks": self._blocks.list_names(),
            "trusted": sorted(self._reader.trusted),
            "refused": sorted(self._reader.refused),
            "tried": sorted(self._reader.tried),
            "generator": self._labels().get_state(),
            # always a tensor, which a fresh one's can take
            "ratio": torch.zeros(()) if self._stride.ratio is None else self._stride.ratio,
            "wild": self._wild.save(),
            "errors": None if self._reader.errors is None else self._reader.errors.save(),
            "inputs": self._blocks.inputs.save(),
            "outside": self._outside.save(),
            "outside_updates": self._outside.updates,
        }

    def _gather_state(self) -> dict[Tensor, dict[str, Any]]:
        return gather_numbers(self._blocks)

    def _fit(self, saved: Checkpoint) -> Callable[[], None]:
        owners = self._blocks.owners.load(saved.extra.get("owners"))
        blocks = BlockAverages(self.structure, self._named, saved.state, owners)
        trusted, refused = set(saved.extra["trusted"]), set(saved.extra["refused"])
        blocks.rebuild(saved.extra["blocks"], self._reader.by_names(trusted), saved.extra.get("inputs"))
        outside = Outside.load(saved.extra.get("outside"), saved.extra.get("outside_updates", 0), self._named)

        def restore() -> None:
            blocks.state, self._arriving = self.state, None
            self._pending, self._bad, self._told = 0, False, {}  # what was read of a batch under way is replaced
            self._stride, self._outside = Stride(), outside
            self._blocks, self._reader.trusted, self._reader.refused = blocks, trusted, refused
            self._reader.tried = set(saved.extra.get("tried", ()))
            self._clock = start_clock() | saved.extra["clock"]
            self._wild = WildBatches.load(saved.extra.get("wild"))
            self._reader.errors = ErrorSize.load(saved.extra.get("errors"), self.criterion)
            ratio = saved.extra["ratio"]
            self._stride.ratio = ratio if ratio is not None and bool(ratio > 0) else None
            if saved.labels is not None:
                self._reader.generator_on(next(iter(self._named.values())).device).set_state(saved.labels)
            self._arm()

        return restore

    # one step

    def _read(self, outputs: Any, targets: Any, value: Tensor) -> None:
        self._settle_reading()
        finite = self._wild.is_fit((own := self._recall.computed[-1]).value, self._clock["step"], self._bounded)
        # NaN too where no target counts; the other processes go on without this one's rows then
        with self._reader.passes.run(finite, own.rows):
            if finite or (self._ranks.size > 1 and not own.rows):
                with full_precision(self._named):  # users call this under autocast, which would round second moments
                    self._start_reading(outputs, targets)
                    if own.rows or self._ranks.size == 1:
                        self._outside.listen(self.criterion, outputs, targets, value, self._reader.leaves)
            else:
                self._reader.skip(value)
                self._count_bad_batch(True)
        self._reader.taps.release_with(value)
        if self._ranks.size == 1:
            self._settle_reading()

    def _start_reading(self, outputs: Any, targets: Any) -> None:
        """Read the statistics of the pass. Several processes add them up while the user's backward pass goes on."""
        # labels that a metric was estimated from measure it too short along the direction that it gives
        measuring = self.measure and (self.rule.needs_form or self._judge.strategy is not None)
        measuring = measuring and due_to_measure(self._clock, max(MEASURED, self.update_every))
        apart = None if not measuring or isinstance(self.structure.estimate, ExactLabels) else Sampled()
        reading = self._reader.read(self.criterion, outputs, targets, self._recall, apart)
        if reading is None:
            self._count_bad_batch(True)
            return
        sample = sample_examples(reading) if measuring else None
        reading.apart.clear()
        # micro-batches of one step count alike
        decay, self._part = (1.0, self._part) if self._pending else (self.structure.decay, part_of_rows(self._clock))
        self._arriving = self._blocks.start(replace(reading, part=self._part), decay), sample

    def _settle_reading(self) -> None:
        """Wait for the statistics of the last pass. Nothing is sent: a process may do this alone."""
        if self._arriving is None:
            return
        (arrive, sample), self._arriving = self._arriving, None
        taken = arrive()
        self._stride.sample = sample if taken else None
        self._pending += taken
        self._count_bad_batch(not taken)
        if taken:
            self._clock["updated"] = self._clock["step"]

    def _count_bad_batch(self, bad: bool) -> None:
        """A batch counts once, in the statistics and in the step."""
        self._clock["failures"] += bad and not self._bad
        self._bad |= bad

    def _step(self, called: Called) -> None:
        self._settle_reading()
        self._follow_groups()  # some may have been frozen until now
        self._blocks.follow_parameters()
        active = {name: p for name, p in self._by_group() if p.grad is not None}
        if not active:
            return
        losses = self._blocks.inputs.spoil(self._recall.losses or self._recall.computed)
        raw = {name: dense(p) for name, p in active.items()}
        norms = {name: measure_norm(g) for name, g in raw.items()}
        loss, nats, scale, norm = self._ranks.pool_losses(losses, self._nats, self._recall.scale, norms)
        plain = isinstance(scale, float) and scale == 1
        gradients = raw if plain else {name: gradient / scale for name, gradient in raw.items()}
        norm, norms = norm / scale, norms if plain else {name: one / scale for name, one in norms.items()}
        # a loss that is no number bounds no step (a batch without rows: its gradient is zero, but there is momentum)
        known = torch.isfinite(norm) if loss is None else torch.isfinite(norm) & ~loss.isnan().to(norm.device)
        wild = loss is not None and self._bounded and self._wild.is_wild(loss, self._clock["step"])
        # this, `attempt.finite` and a bound on the KL are the synchronisations of a step between updates
        fit, length = list_numbers(torch.stack([(known & ~torch.as_tensor(wild, device=norm.device)).to(norm), norm]))
        finite = fit > 0
        check_statistics(finite and not self._blocks.all)
        factor, sizes = find_cut(self._clock["sizes"], length, self._clock["step"])
        late = self._clock["late"] + int(finite) if self._reader.due and not self._pending else 0
        watch_late(late if finite else 0, self._bad)  # skipped steps are counted by themselves
        told = {"gradient": norm, "damping": self.param_groups[0]["damping"]} | ({} if loss is None else {"loss": loss})
        attempt = self._attempt(nats, dict(told), cut(factor, norms))
        if finite:
            attempt.clock["sizes"] = sizes
            self._reader.arm(False)  # what follows may call the model again
            blocks = [block.layout.names for block in self._blocks]
            if self._pending:
                losses = [loss for loss in self._recall.losses if loss.rows or self._ranks.size == 1]
                self._outside.measure(
                    gradients, attempt.values, blocks, len(losses), float(scale), self._ranks, self._check_followed
                )
            updated = self._clock["updated"] > self._clock["inverted"]
            attempt.invert(self.damping, updated and due(self._clock, "inverted", self.invert_every))
            self._move(attempt, cut(factor, gradients), active, called)
            finite = attempt.finite()
            strangers = gradients.keys() - {n for names in blocks for n in names} - self._warned
            strangers = {name for name in strangers if bool(norms[name] > 0)}
            if strangers:
                self._check_followed()
            self._warned = warn_of_strangers(strangers, self._warned)
        if not finite:
            if self.on_trouble == "raise":
                self._pending, self._bad = 0, False
                raise NotFiniteError(describe_trouble(gradients, loss, bool(wild)))
            attempt = self._attempt(nats, told, norms)
            attempt.clock["failures"] += not self._bad
        attempt.clock |= {"late": late, "skipped": 0 if finite else attempt.clock["skipped"] + 1}
        pace(attempt.clock, self._blocks.drift(), self.update_every)
        if self.rule.turns_at and self._bounded and finite and loss is not None:
            follow_loss(attempt.clock, loss, partial(self._ranks.count_rows, losses, nats, norm.device))
        attempt.clock["step"] += 1
        values: dict[str, Any] = {"_told": attempt.told, "_clock": attempt.clock, "_stride": attempt.stride}
        values["_wild"] = self._wild.after(loss, finite)
        attempt.commit(vars(self), values | {"_nats": nats, "_pending": 0, "_bad": False}, self._forget_batch)
        watch_skipped(self._clock["skipped"], self.model)

    def _skip(self, trouble: NotFiniteError) -> None:
        raise trouble  # a step that is left out moves the clock above

    def _move(self, attempt: Attempt, gradients: dict[str, Tensor], active: dict[str, Tensor], called: Called) -> None:
        """The rule's step, unless the loss after it refuses it."""
        rows = sum(self._ranks.weight(loss) for loss in self._recall.losses or self._recall.computed)
        model = attempt.quadratic(gradients, self._bounded, self._counts(attempt) if self.rule.needs_counts else {})
        if model is None:
            return
        judged = self._judge.due(self._clock)
        if not (judged or self.rule.needs_loss):
            step, memory = self.rule.step(model, None, attempt.memory())
            refused = False
        else:
            with replaying(self.model, self._recall):
                asks = self.rule if self.rule.needs_loss else self._judge.strategy
                objective = objective_of_blocks(self.model, self.criterion, self._recall, active, called, asks)
                before = float(attempt.told.get("loss", objective.before))
                loss_at = PooledLoss(objective, rows, self._ranks, before, self._named, attempt.strengths())
                step, memory = self.rule.step(replace(model, loss=before), loss_at, attempt.memory())
                refused = judged and self._judge_step(attempt, model, step, loss_at)
        attempt.remember(memory, forget=refused)
        if not isinstance(step, BlockStep):
            raise TypeError(f"rule {self.rule} returned {step!r}, expected one made of the model's: proposal, along")
        if not refused:
            attempt.move(model, step)

    def _check_followed(self) -> None:
        """ValueError where a gradient that the statistics lack comes from the outputs all the same."""
        if any_split(self._named.values()):  # a pass at other leaves has no place in a model in parts
            return
        with replaying(self.model, self._recall), torch.enable_grad():
            for told in self._recall.used_losses():
                leaves = {name: p.detach().clone().requires_grad_() for name, p in self._named.items()}
                try:
                    select, data = told.settle(self.model, self._named, self._recall.outputs), told.data()
                    outputs = pure_model(self.model, data.inputs, data.random)(leaves)
                    rows = self.criterion.family.rows(outputs if select is None else select(outputs))
                except (ValueError, NotImplementedError, RuntimeError):  # as where a step is measured: it is not known
                    continue
                try:
                    check_followed(rows, leaves, self.model)
                except ValueError:
                    self._clock["updated"], self._pending = -1, 0  # what was read does not stand for the model
                    raise

    def _counts(self, attempt: Attempt) -> dict[str, int]:
        """Examples of this step over all processes, and seen so far with it."""
        own = torch.tensor(float(self._recall.count_examples()), device=next(iter(self._named.values())).device)
        examples = int(self._ranks.sum(own))
        attempt.clock["seen"] += examples
        return {"examples": examples, "seen": attempt.clock["seen"]}

    def _judge_step(self, attempt: Attempt, model: Quadratic, step: Step, loss_at: PooledLoss) -> bool:
        """Whether the step is refused; the damping from here on follows how well the model told the loss."""
        ratio, refused = self._judge.judge(model, step, loss_at)
        self._judge.adapt(attempt.copies, attempt.clock, ratio, refused)
        attempt.told["ratio"] = ratio
        return refused

    def _forget_batch(self) -> None:
        self._recall.clear()
        self._reader.taps.take()
        self._arm()
        self._stride.sample = None
        self._outside.forget_batch()

    def _attempt(self, nats: Any, told: dict[str, Any], norms: dict[str, Tensor]) -> Attempt:
        parts = (self._blocks, self._named, self.state, self.param_groups, self._clock, self._stride, self._ranks)
        batch = BatchForm(self.model, self.criterion, self._recall, self._named, self._ranks, nats)
        return Attempt(*parts, nats, told, self._outside, self.rule, batch, norms, self._reader.errors)

    def _labels(self) -> torch.Generator:
        """The source of labels, or one as it will be; it is made where the first labels are drawn."""
        device = next(iter(self._named.values())).device
        return self._reader.generator or torch.Generator(device).manual_seed(self._reader.seed)
