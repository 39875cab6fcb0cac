"""The natural gradient layer by layer, as a drop-in `torch.optim.Optimizer`: K-FAC and its family."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.damping import Damping
from natgrad.families import Criterion, Likelihood, as_criterion
from natgrad.layers.taps import Release
from natgrad.optim.block_averages import Block, Blocks, dense
from natgrad.optim.checkpoint import Format, ModelOptimizer, name_positions, read_checkpoint, write_checkpoint
from natgrad.optim.checks import check_blocks, checked_group, given_parameters, named_parameters
from natgrad.optim.distributed import meet
from natgrad.optim.last_pass import Recall, listen
from natgrad.optim.objective import Closure
from natgrad.optim.outside_losses import Outside
from natgrad.optim.pass_statistics import Reader
from natgrad.optim.pending_step import Attempt
from natgrad.optim.reduction_ratio import Judge, replaying, slope_along
from natgrad.optim.schedule import due, pace, started
from natgrad.optim.stalled_runs import OVERDUE, SKIPPED, watch
from natgrad.optim.state_report import Report, Row, StateReport, state_report
from natgrad.optim.step_length import Stride, bounded_below, sampled
from natgrad.pure import Select, check_select, full_precision, leaves, map_tensors
from natgrad.structures import ExactLabels, Layerwise, Sampled

SAVED = frozenset({"clock", "blocks", "trusted", "refused", "generator", "ratio"})
FORMAT = Format("ng.kfac or its like", SAVED, frozenset({"mean"}), older=True)
MEASURED = 20  # most steps between two measurements of the step's length, unless updates lie further apart


class StructuredNaturalGradient(ModelOptimizer):
    """theta <- theta - lr a (G + damping I)^-1 m, G in one block per layer, m the running mean of the gradient.

    model: an `nn.Module`.   criterion: its loss from `torch.nn`, or an `ng` likelihood.   structure: which block per
    layer (`ng.Kronecker(decay=.95)`, ...); its estimate says how labels are drawn.   lr: factor on the length a, which
    is found: the minimum of the quadratic model along the direction, or where the bound on the KL is met, with the
    true metric there as the last update step measured it.   momentum: decay of the gradient's running mean
    (bias-corrected), taken before the metric, so that the whole step is in today's metric.   damping: lambda in
    units of the mean eigenvalue of the block, which frees it of all scales; with `ng.LevenbergMarquardt` it follows
    how every fifth step does on its own pass, and one that raises the loss is not taken.   max_kl: a step moves at most
    this many nats per example, to second order.   kl_share: nor more than this share of the loss: where little is left
    to gain, little is risked; of one nat per entry for losses that can be negative.   weight_decay: decoupled, theta <-
    (1 - lr * weight_decay) theta.   l2: of a penalty l2 / 2 |theta|^2 that counts as part of the loss, in the gradient
    and in the metric.   update_every, invert_every: steps between updates of the statistics and of the
    inverses, at most: at first one, and one more after each ten steps; more where an update changes the statistics
    little.   measure: False trusts the blocks and takes a = 1 within the bounds.   outputs: what the criterion is of,
    for a model that returns more: `opt.loss(model(x), y)` applies `outputs=lambda out: out.logits`.   params: what to
    train, default all:
    parameters, (name, parameter) pairs, a module, or parameter groups; all from lr to l2 are group keys, max_kl and
    kl_share the least over the groups. The rest may have an optimizer of its own, another of these too: call the `loss`
    of each.

    Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`. On update steps `opt.loss` also
    goes backward from sampled labels, to the layers only: `.grad`, buffers and the global random state are untouched.
    train_in_eval=True: passes in evaluation mode are read too, to train with dropout off and batch norm frozen;
    evaluate under `torch.no_grad()` then. Without it they are not, and training on in evaluation mode warns after 5
    steps whose statistics were due, and raises RuntimeError after 25; so do as many skipped steps in a row.
    A gradient or a step that is not finite or a loss that is no number skips the step, statistics that are not finite
    are not taken, an inverse that fails leaves its last good one in place; all are counted in
    `state_report().failures`. A step happens whole or not at all: Ctrl-C and errors leave the last one's state.
    With several processes (`torch.distributed`), model may be a `DistributedDataParallel` or what it wraps: statistics
    and losses are added up over the processes, and all take the same step. They all must call `loss` and `step` alike.
    Without one they are added up over `group`, for gradients that you average yourself; without either this process is
    alone. TypeError for models that are held in parts (FSDP, DTensor).
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module | Likelihood | Criterion,
        structure: Layerwise,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        damping: float | Damping = 0.03,
        max_kl: float = math.inf,
        kl_share: float = 0.05,
        weight_decay: float = 0.0,
        l2: float = 0.0,
        update_every: int = 20,
        invert_every: int = 20,
        measure: bool = True,
        outputs: Select | None = None,
        params: Iterable[Any] | None = None,
        train_in_eval: bool = False,
        group: Any = None,
    ) -> None:
        check_blocks(model, structure, update_every=update_every, invert_every=invert_every)
        self.model, self._ranks = meet(model, group)
        self._ranks.check(structure)
        self.criterion, self.structure = as_criterion(criterion), structure
        self._bounded = bounded_below(self.criterion)
        self.update_every, self.invert_every, self.measure = update_every, invert_every, measure
        self.train_in_eval = train_in_eval
        self._judge = Judge(damping)
        self._named: dict[str, Tensor] = {}  # what the groups hold, in the model's order
        check_select(outputs)
        self._recall = Recall(outputs)
        defaults = {"lr": lr, "momentum": momentum, "damping": self._judge.start, "max_kl": max_kl}
        defaults |= {"kl_share": kl_share, "weight_decay": weight_decay, "l2": l2}
        super().__init__(given_parameters(params, named_parameters(self.model)), defaults)
        self._reader = Reader(self.model, self._named, structure.estimate, structure.seed, self._ranks)
        self._blocks = Blocks(structure, self._named, self.state)
        self._told: dict[str, Any] = {}
        self._clock = started()
        self._stride, self._outside = Stride(), Outside()
        self._pending = 0  # readings since the last step
        self._bad = False  # whether its batch was counted as a failure
        self._nats: Any = 1.0
        self._warned: set[str] = set()
        self._finalizer = weakref.finalize(
            self, release, self._reader, listen(self.model, self._recall, traceable=True, in_eval=train_in_eval)
        )

    # what the user calls around a step

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The criterion's value, for you to call `.backward()` on; on update steps it reads the statistics first.

        In evaluation mode, under `torch.no_grad()` and on detached outputs it is the value alone. Several losses of one
        step count by their rows: those that went backward since the gradients were cleared. ValueError for targets that
        the criterion's likelihood cannot produce.
        """
        self._blocks.follow_parameters()
        outputs, chosen = self._recall.choose(outputs)
        value = self.criterion.value(outputs, targets)
        if torch.is_grad_enabled() and value.requires_grad:
            self._ranks.settle(self.model, self.structure)
            rows = count_rows(self.criterion, outputs)
            if self.model.training or self.train_in_eval:
                judged = self._judge.due(self._clock)
                self._recall.record_loss(self.criterion, outputs, targets, value, rows, chosen=chosen, needed=judged)
                self._nats = self.criterion.nats(outputs)
                if self._reader.taps.armed:
                    self._read(outputs, targets, value)
            else:
                self._recall.count_loss(self.criterion, outputs, targets, value, rows)
        return value

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """One step; returns the closure's value. closure: clears gradients, computes `opt.loss`, calls backward.

        ValueError if no statistics were ever read: the loss was not computed with `opt.loss`.
        """
        value = None
        try:
            if closure is not None:
                self._judge.begins(next(iter(self._named.values())).device, closure)
                with torch.enable_grad():
                    value = closure()
            self._step(closure, value)
        finally:
            self._forget_batch()
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the count of what they are a sum of."""
        super().zero_grad(set_to_none)
        if self._recall.losses:  # a batch that is thrown away
            self._bad = False
        self._recall.forget_gradients()

    def report(self) -> Report:
        """What each parameter gets: structure, entries, and numbers remembered between steps."""
        held = {name: block for block in self._blocks for name in block.layout.names}
        rows = Report()
        for name, p in self._by_group():
            numbers = sum({t.data_ptr(): t.numel() for t in leaves(self.state.get(p, {}))}.values())  # shared ones once
            rows.append(Row(name, self._kind(held.get(name)), p.numel(), numbers))
        return rows

    def state_report(self) -> StateReport:
        """How the last step went: KL moved, share of the full step taken, the gradient's norm, failures so far."""
        return state_report(self._told, self._clock)

    def detach(self) -> None:
        """Take the hooks off the model. Also happens when the optimizer dies."""
        self._finalizer()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters (unfrozen, created later). ValueError for parameters of another model or a bad number."""
        known = {id(p): name for name, p in self.model.named_parameters()}
        super().add_param_group(checked_group(param_group, known, self.defaults))
        # empty, torch.distributed.checkpoint would call step()
        self.state.update({p: {} for p in self.param_groups[-1]["params"]})
        self._listen_to_groups()

    def _listen_to_groups(self) -> None:
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

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; `torch.load(weights_only=True)` and `get_state_dict` keep it.

        Per parameter: the gradient's mean, and, under a block's first parameter, its statistics and its inverse.
        """
        ratio = self._stride.ratio
        extra = {
            "structure": type(self.structure).__name__,
            "clock": dict(self._clock),
            "blocks": self._blocks.saved(),
            "trusted": sorted(self._reader.trusted),
            "refused": sorted(self._reader.refused),
            "generator": self._labels().get_state(),
            "ratio": torch.zeros(()) if ratio is None else ratio,  # always a tensor, which a fresh one's can take
        }
        return write_checkpoint(super().state_dict(), name_positions(self), extra)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`, as it is or after `torch.distributed.checkpoint`.

        Raises:
            ValueError: If it is of another kind of optimizer, structure or model, or if a part of it was lost. The
                optimizer is as before then.
        """
        saved = read_checkpoint(FORMAT, state_dict, self, name_positions(self), self._labels())
        blocks = Blocks(self.structure, self._named, saved.state)
        trusted, refused = set(saved.extra["trusted"]), set(saved.extra["refused"])
        blocks.rebuild(saved.extra["blocks"], self._reader.by_names(trusted))
        # all of it fits
        super().load_state_dict({"param_groups": saved.groups, "state": {}})
        self.state.update(saved.state)
        blocks.state = self.state
        self._blocks, self._reader.trusted, self._reader.refused = blocks, trusted, refused
        self._clock = started() | saved.extra["clock"]
        ratio = saved.extra["ratio"]
        self._stride.ratio = ratio if ratio is not None and bool(ratio > 0) else None
        if saved.labels is not None:
            self._reader.generator_on(next(iter(self._named.values())).device).set_state(saved.labels)
        self._reader.arm(self._due("updated", self.update_every))

    # one step

    def _read(self, outputs: Any, targets: Any, value: Tensor) -> None:
        decay = 1.0 if self._pending else self.structure.decay  # micro-batches of one step count alike
        taken = False
        if bool(torch.isfinite(self._recall.computed[-1].value)):  # NaN too where no target counts
            with full_precision(self._named):  # users call this under autocast, which would round second moments
                # labels that a metric was estimated from measure it too short along the direction that it gives
                measuring = self.measure and self._due("measured", max(MEASURED, self.update_every))
                apart = None if not measuring or isinstance(self.structure.estimate, ExactLabels) else Sampled()
                reading = self._reader.read(self.criterion, outputs, targets, self._recall, apart)
                if reading is not None:
                    sample = sampled(reading) if measuring else None
                    reading.apart.clear()
                    taken = self._blocks.take(reading, decay)
                    self._stride.sample = sample if taken else None
                if self._ranks.size == 1:
                    self._outside.listen(self.criterion, outputs, targets, value, self._named)
        else:
            self._reader.skip(value)
        value.register_hook(Release(self._reader.taps))
        self._pending += taken
        self._count_bad_batch(not taken)
        if taken:
            self._clock["updated"] = self._clock["step"]

    def _count_bad_batch(self, bad: bool) -> None:
        """A batch counts once, in the statistics and in the step."""
        self._clock["failures"] += bad and not self._bad
        self._bad |= bad

    def _step(self, closure: Closure | None, value: Tensor | None) -> None:
        self._listen_to_groups()  # some may have been frozen until now
        self._blocks.follow_parameters()
        active = [(name, p) for name, p in self._by_group() if p.grad is not None]
        if not active:
            return
        losses = self._recall.losses or self._recall.computed
        loss, nats, scale = self._ranks.pooled(losses, self._nats, self._recall.scale, active[0][1].device)
        plain = isinstance(scale, float) and scale == 1
        gradients = {name: dense(p) if plain else dense(p) / scale for name, p in active}
        norm = torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]).square().sum().sqrt()
        self._ranks.check_gradients(norm)
        # a loss that is no number bounds no step (a batch without rows: its gradient is zero, but there is momentum)
        known = torch.isfinite(norm) if loss is None else torch.isfinite(norm) & ~loss.isnan().to(norm.device)
        finite = bool(known)  # this and `attempt.finite` are the synchronisations of a step between updates
        if finite and not self._blocks.all:
            raise ValueError(
                "no statistics yet: compute the loss with optimizer.loss(outputs, targets), in training mode (or build "
                "the optimizer with train_in_eval=True), and call backward() on it"
            )
        late = self._clock["late"] + 1 if self._reader.taps.armed and not (self._pending or self._bad) else 0
        watch(late, OVERDUE)
        told = {"gradient": norm, "damping": self.param_groups[0]["damping"]} | ({} if loss is None else {"loss": loss})
        if finite:
            self._reader.arm(False)  # what follows may call the model again
            attempt = self._attempt(nats, dict(told))
            if self._pending:
                blocks = [block.layout.names for block in self._blocks]
                self._outside.measure(gradients, self._named, blocks, len(self._recall.losses), float(scale))
            if self._clock["updated"] > self._clock["inverted"] and self._due("inverted", self.invert_every):
                attempt.invert()
            refuses = partial(self._refuses, attempt, gradients, closure, value)
            attempt.move(gradients, self._bounded, refuses if self._judge.due(self._clock) else None)
            finite = attempt.finite()
            self._warn(gradients.keys() - {name for block in self._blocks for name in block.layout.names})
        if not finite:
            attempt = self._attempt(nats, told)
            attempt.clock["failures"] += not self._bad
        attempt.clock |= {"late": late, "skipped": 0 if finite else attempt.clock["skipped"] + 1}
        pace(attempt.clock, self._blocks.drift(), self.update_every)
        attempt.clock["step"] += 1
        values = {"_told": attempt.told, "_clock": attempt.clock, "_stride": attempt.stride}
        attempt.commit(vars(self), values | {"_nats": nats, "_pending": 0, "_bad": False}, self._forget_batch)
        watch(self._clock["skipped"], SKIPPED)

    def _forget_batch(self) -> None:
        self._recall.clear()
        self._reader.taps.take()
        self._reader.arm(self._due("updated", self.update_every))
        self._stride.sample = None
        self._outside.forget_batch()

    def _attempt(self, nats: Any, told: dict[str, Any]) -> Attempt:
        parts = (self._blocks, self._named, self.state, self.param_groups, self._clock, self._stride, self._ranks)
        return Attempt(*parts, nats, told, self._outside)

    def _refuses(
        self,
        attempt: Attempt,
        gradients: dict[str, Tensor],
        closure: Closure | None,
        value: Tensor | None,
        moves: dict[str, Tensor],
        form: float,
    ) -> bool:
        """Whether a step would raise the loss; and the damping from here on. form: half the metric's along it."""
        params = {name: p for name, p in self._by_group() if p.grad is not None}
        strengths = {name: float(group["l2"]) for name, group in attempt.groups.items()}
        slope, penalty = slope_along(moves, gradients, self._named, strengths)
        rows = sum(loss.rows for loss in self._recall.losses or self._recall.computed)
        with replaying(self.model, self._recall):
            objective = self._judge.objective(self.model, self.criterion, self._recall, params, closure, value)
            change = self._judge.change(objective, moves, rows, self._ranks) + penalty
        ratio, refused = self._judge.verdict(change, slope, form)
        self._judge.adapt(attempt.copies, attempt.clock, ratio, refused)
        attempt.told["ratio"] = ratio
        return refused

    def _warn(self, strangers: Set[str]) -> None:
        """Say, once, which parameters have gradients and no statistics: a loss was added that was not `self.loss`."""
        fresh = sorted(strangers - self._warned)
        if fresh:
            self._warned |= strangers
            warnings.warn(
                f"parameters {fresh} have a gradient but no statistics, and are not moved: no optimizer.loss(outputs, "
                "targets) on an update step depends on them",
                stacklevel=2,
            )

    def _labels(self) -> torch.Generator:
        """The source of labels, or one as it will be; it is made where the first labels are drawn."""
        device = next(iter(self._named.values())).device
        return self._reader.generator or torch.Generator(device).manual_seed(self._reader.seed)

    def _due(self, event: str, every: int) -> bool:
        return due(self._clock, event, every)

    def _by_group(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(p): name for name, p in self._named.items()}
        return ((names[id(p)], p) for group in self.param_groups for p in group["params"] if id(p) in names)

    def _kind(self, block: Block | None) -> str:
        if block is None:
            return "not read yet"
        return "Diagonal" if block.layer is None else self.structure.kind(self._blocks.of(block)["totals"])


def count_rows(criterion: Criterion, outputs: Any) -> int:
    """Rows of outputs: what a micro-batch weighs."""
    return len(criterion.family.rows(map_tensors(outputs, torch.detach)))


def release(reader: Reader, listener: Any) -> None:
    """Take all hooks off the model."""
    reader.detach()
    listener.remove()
