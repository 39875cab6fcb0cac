"""What every optimizer shares: the loss, the frame of a step, reports, checkpoints, and what happens in trouble."""

from __future__ import annotations

import math
import warnings
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.families import Criterion
from natgrad.ground.constants import COMPARED, SMALL_RATE
from natgrad.ground.messages import explain_calls, write_table
from natgrad.ground.pure import keep_gradient_mode, leaves, map_tensors
from natgrad.ground.typed_torch import call_uncompiled
from natgrad.ground.whole_tensors import any_split, write_all
from natgrad.optim.checkpoint import EXTRA, Checkpoint, Format, name_positions, read_checkpoint, write_checkpoint
from natgrad.optim.checks import agree_on_loss, check_numbers, checked_group, evaluate_loss
from natgrad.optim.guard import (
    NotFiniteError,
    OnTrouble,
    warn_of_rate,
    warn_without_gradient,
    watch_skipped,
    watch_unmoved,
)
from natgrad.optim.objective import Called, Closure, call_closure
from natgrad.optim.passes import BatchRecord, mark_of
from natgrad.optim.processes import Processes, name_parameters
from natgrad.optim.report import (
    KEPT,
    LONG,
    PastLoss,
    Report,
    Row,
    StateReport,
    Steps,
    describe_memory,
    explain_steps,
    show,
    state_report,
    tell_decay,
)
from natgrad.optim.state import State
from natgrad.optim.step import Choices, Evidence, Move, StepReport, leave_out, natural_step
from natgrad.rules import Rule

CHOICES = ("structure", "solver", "rule", "damping", "update_every", "invert_every", "train_in_eval", "on_trouble")


@dataclass(frozen=True)
class TakenGradients:
    """Gradients whose step was taken before Ctrl-C came, so that it is not taken a second time."""

    batch: int  # of the `BatchRecord`
    # each gradient by its parameter's name, with what changes when it is written
    known: Mapping[str, tuple[weakref.ref[Tensor], tuple[int, int]]]

    @staticmethod
    def of(named: Mapping[str, Tensor], record: BatchRecord) -> TakenGradients:
        """Those that the parameters hold."""
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        return TakenGradients(record.batch, {name: (weakref.ref(g), mark_of(g)) for name, g in gradients.items()})

    def holds(self, named: Mapping[str, Tensor], record: BatchRecord) -> bool:
        """Whether the parameters hold them as they were, and nothing else was told of another step since."""
        now = TakenGradients.of(named, record)
        news = record.computed or record.last is not None or record.observed is not None
        return bool(self.known) and not news and now == self


def build_again(kind: type[ModelOptimizer], args: Any, options: dict[str, Any], state: dict[str, Any]) -> Any:
    """An optimizer that was pickled, on the model that came with it."""
    optimizer = kind(*args, **options)
    optimizer.load_state_dict(state)
    return optimizer


@dataclass
class Live:
    """What an optimizer's steps change. One object, so that a wrapper that borrows its attributes shares it."""

    named: dict[str, Tensor]  # the parameters that it trains, by name
    record: BatchRecord  # what it remembers of the passes since the last step
    processes: Processes  # the processes
    state: State  # all that the next step depends on
    # the keys of a parameter group that a step reads; torch adds to its defaults while it loads
    settings: tuple[str, ...] = ()
    finalizer: weakref.finalize[..., Any] | None = None  # takes the hooks off the model; None where there are none
    told: StepReport = field(default_factory=StepReport)  # what is told of the last step
    # makes the reports of the last steps
    history: deque[Callable[[], StateReport]] = field(default_factory=lambda: deque(maxlen=KEPT))
    losses: deque[PastLoss] = field(default_factory=lambda: deque(maxlen=LONG))  # of the last steps
    taken: TakenGradients | None = None  # the gradients of a step that Ctrl-C met after it was taken; None otherwise
    agreed: int = 0  # losses of the model's own that were seen to be the criterion's
    idle: frozenset[str] = frozenset()  # names of parameters that had no gradient, or are the model's no more
    gone: frozenset[int] = frozenset()  # the ids of the latter
    names: Mapping[int, str] | None = None  # of the model's parameters by their ids, while the optimizer is built
    # parameters that a model given as such had frozen when the optimizer was built
    frozen: Sequence[weakref.ref[Tensor]] = ()
    # where the model held its modules and parameters when they were named
    places: Sequence[tuple[Mapping[str, Any], str, Any]] = ()
    # dtypes and devices of the parameters when they were looked at last
    kinds: dict[str, tuple[torch.dtype, torch.device]] = field(
        default_factory=dict[str, tuple[torch.dtype, torch.device]]
    )


LOOPS = ("fit", "train", "learn", "run", "minimize", "optimize", "solve", "compile")
"""What other packages call a loop of steps."""


class ModelOptimizer(Optimizer):
    """An optimizer that belongs to its model. A flow of data supplies what the underscored methods say.

    Attributes:
        model: A module, or a dict of tensors.
        structure: How the metric is stored.
        rule: How a direction becomes a step.
        train_in_eval: True if passes in evaluation mode count as training ones.
        on_trouble: "skip" leaves out a step whose loss, gradient or metric is not finite, counts it in
            `state_report().failures`, warns at the fifth in a row and raises RuntimeError at the 25th. "raise" raises
            ValueError for it. Nothing is changed in either case.
    """

    FORMAT: ClassVar[Format]

    model: Any
    structure: Any
    rule: Rule
    train_in_eval: bool
    on_trouble: OnTrouble
    _live: Live
    _given: tuple[tuple[Any, ...], dict[str, Any]]  # what it was built of

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """As every class makes an instance; what it is built of is kept, to be built again where it was pickled."""
        instance = super().__new__(cls)
        instance._given = args, options
        return instance

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._live.settings, self._live.names = tuple(defaults), self._names_by_id()
        super().__init__(params, defaults)
        self._live.names = None
        self._follow_groups()
        if isinstance(self.model, nn.Module) and self._given[1].get("params") is None:
            self._live.frozen = [weakref.ref(p) for p in self.model.parameters() if not p.requires_grad]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch loaded, into the list that a wrapper may hold too."""
        self.param_groups[:] = state["param_groups"]

    # what the user calls around a step

    @property
    def processes(self) -> Processes:
        """The processes that train the model together; one alone exchanges nothing."""
        self._settle()
        return self._live.processes

    @property
    @abstractmethod
    def criterion(self) -> Criterion:
        """The loss that the metric belongs to."""

    @call_uncompiled
    @keep_gradient_mode
    @explain_calls
    def loss(self, outputs: Any, targets: Any = None, *, weight: Any = None) -> Tensor:
        """The criterion's value, for you to call `.backward()` on; what the step needs to know of it is remembered.

        In evaluation mode, under `torch.no_grad()` and on detached outputs it is the value alone. Several losses of one
        step count by their rows: those that went backward since the gradients were cleared. One that is only looked at
        belongs under `torch.no_grad()`: before the one that goes backward it counts in the statistics of blocks.

        Args:
            outputs: What the model returned, or what the criterion is of. Of a record with `logits`, as transformers'
                models return, and of a pair (logits, loss), a criterion of one tensor takes the logits; a loss that the
                model computed is the one that counts, once it was seen to be the criterion's.
            targets: As the criterion takes them; none for `ng.LogDensity()`.
            weight: Of the examples, shape (b,), numbers >= 0, for an `ng` likelihood: the loss is the weighted mean,
                over all processes' examples of the call, and the metric is weighted alike. For `ng.Heads` a tuple with
                one for each head is taken too; None in it stands for equal weights.

        Returns:
            A scalar tensor.

        Raises:
            ValueError: For targets that the criterion's likelihood cannot produce. Those that are not finite are left
                out, their whole batch with them, unless `on_trouble="raise"`. For a model's own loss that is another.
            TypeError: If the metric has no criterion.
        """
        self._follow_parameters()
        outputs, chosen = self._live.record.choose(outputs)
        outputs, own = self.criterion.pick_logits(outputs)
        training = not isinstance(self.model, nn.Module) or self.model.training or self.train_in_eval
        weighs = weight is not None or self.criterion.family.masks
        if weighs or (self.criterion.tempered and self.processes.size > 1):
            goes_on = training and torch.is_grad_enabled() and any(t.requires_grad for t in leaves(outputs))
            add = self.processes.sum if goes_on else None
            own, targets = None if weighs else own, self.criterion.weigh_targets(outputs, targets, weight, add)
        if own is not None and self._live.agreed >= COMPARED:
            value = own
        else:
            value = evaluate_loss(self.criterion, outputs, targets, self.on_trouble == "skip")
        if own is not None and self._live.agreed < COMPARED:
            self._live.agreed += agree_on_loss(own, value, self.criterion)
            value = own
        if torch.is_grad_enabled() and value.requires_grad:
            if training:
                self._record_loss(outputs, targets, value, chosen)
            else:
                rows = count_rows(self.criterion, outputs)
                self._live.record.count_loss(self.criterion, outputs, targets, value, rows)
        return value

    @call_uncompiled
    @keep_gradient_mode
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """One step.

        Args:
            closure: Clears gradients, computes the loss, calls backward and returns the loss. As in LBFGS it may be
                called again, by rules and dampings that re-evaluate the loss, unless `loss()` made that unnecessary.

        Returns:
            The closure's first value, None without one.

        Raises:
            ValueError: If the loss was not computed as it should be; with `on_trouble="raise"` for a loss, a gradient
                or a metric that is not finite. Parameters and state are as before then.

        Ctrl-C leaves the step whole or undone. Called again with nothing new, `step()` finishes it: it takes the step
        that was cut, and none where it had been taken.
        """
        taken, self._live.taken = self._live.taken, None
        if closure is None and taken is not None and taken.holds(self._live.named, self._live.record):
            return None
        return self._run(self._step_on_pass, closure).value

    def _run(self, act: Callable[[Called], object], closure: Closure | None = None) -> Called:
        """The frame of a step: what happens before it, in trouble, and after it."""
        self._follow_groups()
        self._warn_of_unfrozen()
        for group in self.param_groups:
            check_numbers(group, self._live.settings)
        self._settle()
        called, before = Called(), self._live.state.step
        try:
            if closure is not None:
                device = next(iter(self._live.named.values())).device
                called = call_closure(closure, device, self._live.record, self.model)
            self._live.record.warn_of_left_over()
            try:
                act(called)
            except NotFiniteError as trouble:
                if self.on_trouble == "raise":
                    raise
                failures = self._live.state.guard.failures + 1
                state = replace(self._live.state, guard=replace(self._live.state.guard, failures=failures))
                self._bind(*leave_out(state, {}, str(trouble)))
            self._live.history.append(self._report_later())
            loss = self._live.told.numbers.get("loss", math.nan)
            self._live.losses.append(PastLoss(self._live.state.step, self._least_rate(), loss))
            if self._live.state.step == before:  # else that was written with the step
                self._forget_batch()
            elif self._live.state.step == KEPT:
                self._warn_of_carried()
            return called
        except Exception:
            self._forget_batch()  # nothing of a batch outlives its step, failed or not
            raise
        except BaseException:  # Ctrl-C: before the step was written it can be taken yet
            if self._live.state.step > before:
                self._live.taken = TakenGradients.of(self._live.named, self._live.record)
            raise

    def _step_on_pass(self, called: Called) -> None:
        """A step on the gradients that backward passes left."""
        self._warn_of_replaced()
        warn_without_gradient(self._live.named.values(), bool(self._live.record.computed) or called.value is not None)
        self._step(called)

    def __repr__(self) -> str:
        head, _, groups = super().__repr__().replace(f"    {EXTRA}: ()\n", "").partition("\n")
        return "\n".join([head, *(f"    {name}: {value}" for name, value in self._describe()), groups])

    def _repr_html_(self) -> str:
        groups = [{k: show(v) for k, v in group.items() if k not in ("params", EXTRA)} for group in self.param_groups]
        rows = [(f"group {i}", ", ".join(f"{k} {v}" for k, v in group.items())) for i, group in enumerate(groups)]
        return write_table((type(self).__name__, ""), [*self._describe(), *rows])

    def _describe(self) -> Iterator[tuple[str, str]]:
        """What it was built with, what it holds, and how its last step went: a name and a text each."""
        own, params = vars(self), [p for group in self.param_groups for p in group["params"]]
        yield "model", f"{type(self.model).__name__}, {sum(p.numel() for p in params):,} parameters"
        yield from ((name, str(own[name])) for name in CHOICES if name in own)
        if self._live.processes.size == 1 and params:  # of several processes each knows its own part
            yield from describe_memory(self.report(), max(params[0].element_size(), 4))
        yield "last step", str(self.state_report())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            own = type(self).__name__
            if name in LOOPS:
                raise AttributeError(
                    f"{own} has no {name}(), did you mean step()? An optimizer has no loop of its own: write "
                    "for _ in range(100): ..., with zero_grad(), the loss, backward() and step() in it"
                )
            raise AttributeError(f"{own!r} object has no attribute {name!r}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the count of what they are a sum of.

        Args:
            set_to_none: False sets them to zero instead of None.
        """
        super().zero_grad(set_to_none)
        self._live.record.forget_gradients()

    def report(self) -> Report:
        """What each parameter gets.

        Returns:
            One `Row` per parameter: its structure, its entries, and the numbers remembered between steps. Printed, it
            says also where the metric is not the Fisher of the criterion but an empirical one.
        """
        describe = self._describer()
        try:
            note = self.criterion.family.note
        except TypeError:  # a metric without a criterion
            note = ""
        return Report((Row(name, *describe(name, p)) for name, p, _ in self._by_group()), note)

    def state_report(self) -> StateReport:
        """How the last step went: KL moved, damping, reduction ratio, length, failures so far."""
        return self._report_later()()

    def explain(self) -> str:
        """What the last steps did, at most 20 of them, and what to try: a text to print.

        Whether mini-batch noise limits the loss is read from the last 100 losses.

        Example:
            >>> model = nn.Linear(4, 3)
            >>> ng.kfac(model, nn.CrossEntropyLoss()).explain()[:12]
            'No step yet:'
        """
        return explain_steps(self._list_steps())

    def _list_steps(self) -> Steps:
        latest = {report.step: report for report in (make() for make in self._live.history)}
        reports = [report for report in latest.values() if report.step]
        settings = {"lr": self._least_rate()} | self._options()
        scheduled = any("initial_lr" in group for group in self.param_groups)  # which torch's schedulers write
        shrinkage = max((float(g["lr"]) * float(g.get("weight_decay", 0.0)) for g in self.param_groups), default=0.0)
        past = {loss.step: loss for loss in self._live.losses if loss.step}
        noise = self._live.state.noise
        return Steps(reports, self.rule, settings, scheduled, noise, shrinkage, tuple(past.values()))

    def _least_rate(self) -> float:
        return min((float(group["lr"]) for group in self.param_groups), default=0.0)

    def _report_later(self) -> Callable[[], StateReport]:
        """The report of the last step, for later: numbers are not asked for yet."""
        guard = self._live.state.guard
        return partial(state_report, self._live.told.numbers, self._live.state.step, guard.failures, guard.refused)

    def detach(self) -> None:
        """Take the hooks off the model. Also happens when the optimizer dies."""
        if self._live.finalizer is not None:
            self._live.finalizer()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that were unfrozen or created later.

        Args:
            param_group: A group as in torch.optim: "params", and the group keys that differ from the defaults.

        Raises:
            ValueError: For parameters of another model, or a number out of range.
        """
        known = self._live.names
        super().add_param_group(checked_group(param_group, known or self._names_by_id(), self.defaults))
        self.param_groups[-1][EXTRA] = ()  # flattened states come back with the keys that are here
        # empty, torch.distributed.checkpoint would call step()
        self.state.update({p: {} for p in self.param_groups[-1]["params"]})
        self._live.places = ()
        if known is None:
            self._follow_groups()

    def _names_by_id(self) -> dict[int, str]:
        return {id(p): name for name, p in name_parameters(self.model).items()}

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: groups, per-parameter state, damping, memory, the generator.

        Plain values and tensors: `torch.load(weights_only=True)` and `get_state_dict` keep them. Saved, loaded in a new
        process and continued, training on the CPU is bit for bit as if it had never stopped.

        Between backward passes and their step it is the state that the last step left, with a warning: gradients are
        not in it, as in torch. A run that goes on from it begins with the first of these passes again.

        With `share="memory"` all processes call it, and each gets the whole state; what others hold is on the CPU.

        Raises:
            ExchangeError: If some process does not call it then within five minutes.
        """
        self._follow_names()
        if self._live.record.holds_gradients():
            warnings.warn(
                "state_dict() holds the run as the last step left it, without the gradients of the backward passes "
                "since: call it after step(), or begin this batch again, from its first micro-batch, after loading",
                stacklevel=2,
            )
        labels = self._labels()
        extra = {"kind": self.FORMAT.kind, "structure": type(self.structure).__name__, **self._live.state.save()}
        extra |= {"generator": None if labels is None else labels.get_state(), "order": list(self._live.named)}
        named, plain, memory = name_positions(self), super().state_dict(), self._by_parameter()
        plain["state"] = {i: memory.get(name, {}) for i, (name, _) in enumerate(named)}
        return write_checkpoint(plain, named, extra)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`, as often as you like, whatever this optimizer did before.

        What a trainer or a scheduler wrote into the groups is loaded too; where the state has none of it, it stays.

        Args:
            state_dict: What that returned, as it is or after `torch.distributed.checkpoint`.

        Raises:
            ValueError: If it is of another kind of optimizer, structure, metric or model, or if a part of it was lost.
                The optimizer is as before then.
        """
        self._follow_names()
        self._follow_parameters()
        saved = read_checkpoint(self.FORMAT, state_dict, self, name_positions(self), self._labels())
        restore = self._fit(saved)
        # all of it fits
        super().load_state_dict({"param_groups": saved.groups, "state": {}})
        restore()
        if saved.moved:
            self._move_memory(saved.moved)
        self._live.history.clear()  # `explain` tells of one run
        self._live.losses.clear()

    def __copy__(self) -> NoReturn:
        self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its model and is not copied: build a new one on the copied model and "
            "load optimizer.state_dict() into it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels with the model that it listens to: built anew on that one's copy, in the same state."""
        args, options = self._given
        if options.get("params") is not None:  # which may have been an iterator
            options = options | {"params": [dict(group) for group in self.param_groups]}
        return build_again, (type(self), args, options, self.state_dict())

    # what a flow supplies

    def _warn_of_replaced(self) -> None:
        """Warn, once, of parameters that are not the model's any more."""
        live = self._live
        idle = {name for name, p in live.named.items() if p.requires_grad and (p.grad is None or id(p) in live.gone)}
        if idle <= live.idle or not isinstance(self.model, nn.Module):
            return
        live.idle |= idle
        own = {id(p) for p in self.model.parameters()}
        gone = sorted(name for name in idle if id(live.named[name]) not in own)
        if gone:
            warnings.warn(
                f"parameters {gone} are no longer the model's: a layer or its weight was replaced, and the new one "
                'is not trained. Add its parameters with optimizer.add_param_group({"params": ...}), or build the '
                "optimizer anew",
                stacklevel=3,
            )

    def _warn_of_unfrozen(self) -> None:
        """Warn, once, of parameters that can be trained since the optimizer was built, and are in no group."""
        freed = {id(p) for ref in self._live.frozen if (p := ref()) is not None and p.requires_grad}
        if not freed:
            return
        self._live.frozen = [ref for ref in self._live.frozen if id(ref()) not in freed]
        freed -= {id(p) for group in self.param_groups for p in group["params"]}
        names = sorted(name for name, p in self.model.named_parameters() if id(p) in freed)
        if names:
            warnings.warn(
                f"parameters {names} were frozen when the optimizer was built, and are not trained: add them with "
                'optimizer.add_param_group({"params": ...}), or freeze them again',
                stacklevel=3,
            )

    def _warn_of_carried(self) -> None:
        """Warn of a learning rate and a weight decay that are another optimizer's."""
        for text in tell_decay(self._list_steps()):
            warnings.warn(text, stacklevel=3)
        rates = [float(group[key]) for group in self.param_groups for key in ("lr", "initial_lr") if key in group]
        if 0 < max(rates, default=0.0) < SMALL_RATE:
            warn_of_rate(max(rates), (make().cuts.get("lr", 1.0) for make in self._live.history))

    def _follow_names(self) -> None:
        """Call the parameters as the model does now: pruning and parametrisations rename them within a run."""
        if not isinstance(self.model, nn.Module):
            return
        if self._live.places and all(held.get(key) is part for held, key, part in self._live.places):
            return
        if any_split(self._live.named.values()):  # `fully_shard` has others in their place now and then
            return
        self._live.places = find_places(self.model)
        names = {id(p): name for name, p in self.model.named_parameters()}
        self._live.gone = frozenset(id(p) for p in self._live.named.values() if id(p) not in names)
        renamed = {name: new for name, p in self._live.named.items() if (new := names.get(id(p), name)) != name}
        if renamed:
            self._rename(renamed)

    def _rename(self, renamed: Mapping[str, str]) -> None:
        """Take new names by old ones; the order stays, in which vectors are remembered."""
        taken = set(renamed.values())  # a parameter that is the model's no more may have such a name
        entries = [(name, p) for name, p in self._live.named.items() if name in renamed or name not in taken]
        self._live.named.clear()
        self._live.named.update({renamed.get(name, name): p for name, p in entries})

    def _adopt(self, named: Mapping[str, Tensor]) -> None:
        """Go on with these parameters. What is remembered under a name that another one has now is forgotten."""
        replaced = {name: name for name, p in self._live.named.items() if named.get(name, p) is not p}
        if replaced:
            self._rename(replaced)
        self._live.named.clear()
        self._live.named.update(named)
        self._live.record.watched = list(named.values())

    def _settle(self) -> None:
        """Look, before a step, at what may have happened to the model since the last one."""

    def _follow_parameters(self) -> None:
        """Bring what is remembered to the dtypes and devices of the parameters, after `model.double()` and the like."""
        live = self._live
        kinds = {name: (p.dtype, p.device) for name, p in live.named.items()}
        before, live.kinds = live.kinds, kinds
        changed = [name for name, kind in before.items() if kinds.get(name, kind) != kind]
        if changed:
            self._move_memory(changed)

    @abstractmethod
    def _move_memory(self, changed: Sequence[str]) -> None:
        """Bring what is remembered to the dtypes and devices that these parameters have now."""

    def _follow_groups(self) -> None:
        """Name the parameters that the groups hold and that are trainable, as the model does now."""
        self._follow_names()
        if not isinstance(self.model, nn.Module):
            return
        held = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        known = {id(p) for p in self._live.named.values()}
        if held <= known | self._live.gone:
            return
        named = {name: p for name, p in self.model.named_parameters() if id(p) in held | known}
        self._live.gone = frozenset(held - {id(p) for p in named.values()})  # of layers that were replaced
        self._adopt(named)

    @abstractmethod
    def _record_loss(self, outputs: Any, targets: Any, value: Tensor, chosen: bool) -> None:
        """Note a loss of a training pass."""

    @abstractmethod
    def _step(self, called: Called) -> None:
        """One step, whole or not at all. NotFiniteError for trouble with numbers."""

    def _take(self, choices: Choices, evidence: Evidence) -> StepReport:
        """Take a step on this evidence, all of it or nothing."""
        moved, state, report = natural_step(choices, self._live.state, evidence)
        if report.trouble and self.on_trouble == "raise":
            raise NotFiniteError(report.trouble)
        self._bind(moved, state, report)
        return report

    def _bind(self, moved: Move, state: State, report: StepReport) -> None:
        """Write the step: known values to known places, so that a second time finishes what Ctrl-C cut."""
        before = self._live.state.guard

        def write() -> None:
            write_all([self._live.named[name] for name in moved], list(moved.values()))
            self._write_dampings(report.dampings)
            self._live.state, self._live.told = state, report
            self._forget_batch()

        try:
            write()
        except BaseException:
            write()
            raise
        if state.guard.unmoved != before.unmoved:
            watch_unmoved(state.guard.unmoved)
        watch_skipped(state.guard.skipped, self.model)

    def _write_dampings(self, dampings: Mapping[str, float]) -> None:
        """The damping of the next step, by parameter, where groups have it."""

    def _forget_batch(self) -> None:
        """The step is over."""
        self._live.record.clear(p for group in self.param_groups for p in group["params"])

    @abstractmethod
    def _describer(self) -> Callable[[str, Tensor], tuple[str, int, int]]:
        """Of a parameter: the structure that it gets, its entries, and the numbers remembered for it."""

    @abstractmethod
    def _by_parameter(self) -> dict[str, dict[str, Any]]:
        """What is remembered of each parameter, by name; with several processes of all of them."""

    @abstractmethod
    def _fit(self, saved: Checkpoint) -> Callable[[], None]:
        """Check a checkpoint against this optimizer, and return what takes it over. ValueError where it does not fit.

        Nothing changes before that is called.
        """

    @abstractmethod
    def _labels(self) -> torch.Generator | None:
        """The source of labels."""

    def _by_group(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """The parameters of the groups by name, each with its group."""
        names = {id(p): name for name, p in self._live.named.items()}
        for group in self.param_groups:
            for p in group["params"]:
                if id(p) in names:
                    yield names[id(p)], p, group

    def _options(self) -> dict[str, float]:
        """The rule's settings as the parameter groups have them: the least over the groups."""
        return {key: min(float(group[key]) for group in self.param_groups) for key in self.rule.options}


def find_places(model: nn.Module) -> list[tuple[Mapping[str, Any], str, Any]]:
    """Where a model holds its modules and parameters: a module's own ones, the key there, and what it holds."""
    kinds = [vars(module)[kind] for module in model.modules() for kind in ("_modules", "_parameters")]
    return [(held, key, part) for held in kinds for key, part in held.items() if part is not None]


def count_rows(criterion: Criterion, outputs: Any) -> int:
    """Rows of outputs: what a micro-batch weighs."""
    return len(criterion.family.rows(map_tensors(outputs, torch.detach)))
