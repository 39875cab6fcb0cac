"""What the user's own pass saw: inputs, random state, targets. Nothing of it holds a graph."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from natgrad.families import Criterion
from natgrad.held_states import HeldState
from natgrad.loss_listeners import listen_to
from natgrad.metrics import Metric
from natgrad.optim.loss_inputs import Route, find_route, mark
from natgrad.optim.recorded_pass import Data, RecordedLoss, RecordedPass, modes_of, part, rounding, versions_of
from natgrad.pure import Call, RandomState, Select, is_evaluating, keep, leaves, map_tensors, refuse_jagged
from natgrad.typed_torch import hook_gradient
from natgrad.whole_tensors import any_split, local_part

KEYS = itertools.count()
"""Under which optimizers write passes into graphs, one each."""
BATCHES = itertools.count()
"""One for each time that gradients were cleared."""


class Loss(NamedTuple):
    """One loss in units of its mean, the rows that it weighs, and what reduction='sum' multiplied it by, else 0.

    Besides that what it weighs among the losses of several processes; 0 where nobody asked.
    """

    value: Tensor
    rows: int
    count: float  # pyright: ignore[reportIncompatibleMethodOverride] (nobody counts the entries of one)
    weight: float = 0.0


class Recall:
    """What happened since the last step: the last training pass, the losses, data to observe.

    Attributes:
        last: The last training pass.
        latest: The last loss.
        gone: The losses that `backward` went through since the gradients were cleared. A loss that was only looked at
            (validation, logging) is none of them.
        losses: The same in units of their means, with those in evaluation mode.
        computed: All training losses since the last step.
        outputs: The optimizer's own choice among the model's outputs.
        batch: Another number each time that the gradients were cleared.
        density: The name of the unnormalised model that the metric belongs to; empty for a model with outputs.
        is_stale: True if the gradient is a sum with that of the step before.
        watched: The parameters whose gradients tell when they were cleared. Besides them a loss depends on nothing but
            passes.
        key: Under which passes are written into the graphs of their outputs.
        begins: What is called before a training pass.
        observed: Data for the metric, in place of the pass's own.
        searched: Data for trial points, in place of the pass's own.
        floor: The least damping on observed data.
        repeats: True once a closure was called again, and gave what it had given.
    """

    def __init__(self, outputs: Select | None = None, watched: Iterable[Tensor] = ()) -> None:
        self.outputs, self.key = outputs, f"natgrad.{next(KEYS)}"
        self.watched: list[Tensor] = list(watched)
        self.returned: tuple[type, list[weakref.ref[Tensor]]] | None = None
        self.is_stale = self._warned = self.repeats = False
        self.density = ""
        self.begins: weakref.WeakMethod[Callable[[], None]] | None = None
        self._held: HeldState | None = None
        self.clear()

    def clear(self, moved: Iterable[Tensor] = ()) -> None:
        """Forget everything, so that nothing of a batch outlives its step, but the gradients that `moved` followed."""
        self._stepped = [(weakref.ref(p.grad), p.grad._version) for p in moved if p.grad is not None]
        self.last: RecordedPass | None = None
        self.latest: RecordedLoss | None = None
        self.computed: list[Loss] = []
        self.forget_gradients()
        self.observed: Data | None = None
        self.floor = 0.0
        self.searched: Data | None = None

    def forget_gradients(self) -> None:
        """The gradients are cleared: forget the losses that they came from."""
        self.batch = next(BATCHES)
        self.losses: list[Loss] = []
        self.gone: list[RecordedLoss] = []
        self._going = False  # whether a backward pass that reached a loss is under way
        self._left: set[tuple[int, int]] = set()  # the marks of the gradients at its end
        self._kept_back = False  # whether `fully_shard` then had them aside, to be averaged after a later one

    @property
    def scale(self) -> float:
        """What to divide the gradient by under reduction='sum': micro-batches have the sum of their counts; else 0.

        Where another optimizer's loss went backward, that of the losses computed here counts.
        """
        return sum(loss.count for loss in self.losses or self.computed)

    def mean_loss(self) -> Tensor | None:
        """The mean over the rows of this step's losses, NaN where no target counts; None if none was told."""
        losses = self.losses or self.computed
        if not losses:
            return None
        rows = sum(loss.rows for loss in losses)
        parts = [loss.value * loss.rows for loss in losses if loss.rows]
        return torch.stack(parts).sum() / rows if parts else losses[0].value * math.nan

    def used_losses(self) -> list[RecordedLoss]:
        """The losses of this step: those that went backward, or the last one if none is known to have."""
        return self.gone or ([] if self.latest is None else [self.latest])

    @property
    def last_told(self) -> RecordedLoss | None:
        """The last of the losses of this step."""
        used = self.used_losses()
        return used[-1] if used else None

    def find_pass(self) -> RecordedPass | None:
        """The pass that the gradient belongs to: the last loss's, else the last one. ValueError if its data changed."""
        told = self.last_told
        chosen = told.route.passes[0] if told is not None and told.route.passes else self.last
        if told is not None:
            told.check()
        if chosen is not None:
            chosen.check()
        return chosen

    def whole(self) -> Data:
        """All of the pass that the gradient belongs to. ValueError if there was none."""
        last = self.find_pass()
        if last is None:
            if self.density:
                raise ValueError(
                    f"no inputs for the metric: no loss of its log p, {self.density}, went backward. Give one and the "
                    "same function to ng.score_metric(log_p) and ng.score_matching_loss(log_p, params, X), since two "
                    "functions that are written alike are two densities; or call optimizer.observe(X)"
                )
            raise ValueError(
                "no inputs for the metric: the model has had no forward pass in training mode since the last step; "
                "call model.train() and the model itself (not a copy of it), or optimizer.observe(inputs); to train in "
                "evaluation mode on purpose, build the optimizer with train_in_eval=True"
            )
        told = self.last_told
        if told is not None and told.route.passes:
            return told.data()
        return Data(last.call, None if told is None else told.targets, last.random)

    def count_examples(self) -> int:
        """Examples of the passes that the gradient belongs to."""
        passes = {id(one): one for told in self.used_losses() for one in told.route.passes}
        known = list(passes.values()) or ([] if self.last is None else [self.last])
        return sum(one.call.batch() for one in known)

    def metric_data(self, size: int | None, seed: int) -> Data:
        """What was observed, else the pass, or `size` examples of it, drawn from the seed."""
        if self.observed is not None:
            return self.observed
        # drawn: consecutive examples were seen to be alike and trained worse
        return self.whole() if size is None else part(self.whole(), size, seed)

    def search_data(self, size: int | None, seed: int) -> Data | None:
        """For trial points: what was given, else `size` examples of the pass; None for all of it.

        The same seed draws examples that `metric_data` does not, as far as there are enough.
        """
        if self.searched is not None or size is None:
            return self.searched
        if self.last_told is None:
            raise ValueError(
                "search_batch draws from the batch of optimizer.loss(outputs, targets): compute the loss with it, or "
                "give the data with optimizer.search_on(inputs, targets)"
            )
        return part(self.whole(), size, seed, last=True)

    def record_pass(self, model: nn.Module, call: Call) -> None:
        """Keep the inputs of a forward pass, detached, and the random state before it."""
        refuse_jagged(call.tensors(), "an input of the model")
        kept = keep(call)
        random = RandomState.capture(*{t.device for t in call.tensors()}, model=model, last=self._held)
        self._held = random.held
        self.last = RecordedPass(kept, random, versions_of(kept), modes_of(model), rounding(call.tensors()))

    def hear(self, log_p: object, inputs: Tensor) -> None:
        """A loss of a density went backward on X: the metric of that density is taken there."""
        call = Call((inputs,))
        self.last = RecordedPass(call, RandomState.capture(inputs.device), versions_of(call), None)

    def record_outputs(self, outputs: Any, passed: RecordedPass | None) -> None:
        """Remember which tensors a pass returned, and write it into their graph. passed: None for one not recorded."""
        self.returned = type(outputs), [weakref.ref(t) for t in leaves(outputs)]
        if passed is not None:
            mark(outputs, passed, self.key)
            passed.keep_outputs(outputs)

    def choose(self, outputs: Any) -> tuple[Any, bool]:
        """What the loss is computed on, and whether the optimizer's own choice made it of the model's outputs."""
        if self.outputs is None:
            return outputs, False
        kind, tensors = self.returned or (None, [])
        own = not isinstance(outputs, Tensor) or (len(tensors) == 1 and tensors[0]() is outputs)
        whole = type(outputs) is kind and own if kind is not None else not isinstance(outputs, Tensor)
        return (self.outputs(outputs), True) if whole else (outputs, False)

    def record_loss(
        self,
        criterion: Criterion,
        outputs: Any,
        targets: Any,
        value: Tensor,
        rows: int = 0,
        weight: float | None = None,
        *,
        chosen: bool = False,
        needed: bool = True,
    ) -> None:
        """Keep the targets and units of a loss.

        Args:
            criterion: What it is a value of.
            outputs: What it was computed on.
            targets: Its targets.
            value: The loss.
            rows: What it weighs among the losses of a step.
            weight: What it weighs among those of several processes; None for one process.
            chosen: True if `choose` made the outputs.
            needed: True if the step will ask how the outputs came from the model's.
        """
        known = map_tensors(outputs, torch.detach)
        route = self._route(outputs, known, chosen) if needed else self._last_route(chosen)
        targets = keep(targets)
        self.latest = told = RecordedLoss(route, known, targets, versions_of(Call((targets,))))
        loss, told.scale = self.count_loss(criterion, outputs, targets, value, rows, told, weight or 0.0)
        told.count = math.nan if weight is None else weight
        told.value, told.dtype, told.rows = loss.value, next(leaves(known)).dtype, rows
        told.followed = needed
        self.computed = [*self.computed, loss]

    def follow(self, outputs: Any) -> RecordedLoss:
        """The loss just told, on these outputs, with how they came from the passes."""
        assert self.latest is not None
        chosen = self.latest.route.select is not None
        return replace(self.latest, route=self._route(outputs, self.latest.outputs, chosen))

    def _route(self, outputs: Any, known: Any, chosen: bool) -> Route:
        if chosen:
            return self._last_route(chosen)
        passes = self._last_route(chosen).passes
        return find_route(outputs, self.key, self.watched) or Route(passes, unsure=known)

    def _last_route(self, chosen: bool) -> Route:
        return Route(() if self.last is None else (self.last,), self.outputs if chosen else None)

    def count_loss(
        self,
        criterion: Criterion,
        outputs: Any,
        targets: Any,
        value: Tensor,
        rows: int = 0,
        told: RecordedLoss | None = None,
        weight: float = 0.0,
    ) -> tuple[Loss, float]:
        """Count a loss once it goes backward, whatever mode its pass was in; the loss, and what it was divided by."""
        scale = float(criterion.scale(map_tensors(outputs, torch.detach), targets))
        # without a single target that counts, reduction='sum' adds nothing to the gradient, and nothing to the mean
        loss = Loss(value.detach() / scale, rows if scale else 0, scale if criterion.summed else 0.0, weight)
        self._going = False  # an error may have ended it
        if self._were_cleared():
            self.forget_gradients()
        if value.requires_grad:
            hook_gradient(value, Counter(self, loss, told))
        return loss, scale

    def goes_backward(self, loss: Loss, told: RecordedLoss | None, gradient: Tensor) -> None:
        """`backward` reached a loss: its gradient is about to be added to those that are there."""
        if not self._going:
            if self._were_cleared():
                self.forget_gradients()
            if not self.losses:  # the first of a batch
                self.is_stale = self._is_left_over()
            self._going, me = True, weakref.ref(self)
            # as torch's own data parallelism hears that a backward pass is over; there is no public name for it
            engine: Any = getattr(Variable, "_execution_engine")  # noqa: B009
            engine.queue_callback(lambda: end_backward(me()))
        self.losses = [*self.losses, loss]
        if told is not None:
            fresh = told not in self.gone
            told.weight = gradient.detach() if fresh or told.weight is None else told.weight + gradient.detach()
            self.gone = [*self.gone, told] if fresh else self.gone

    def _is_left_over(self) -> bool:
        """Whether a gradient of the last step is still there, just as that step left it; a warning, the first time."""
        left = [grad for ref, version in self._stepped if (grad := ref()) is not None and grad._version == version]
        there = {id(p.grad) for p in self.watched}
        stale = any(id(grad) in there and holds_anything(grad) for grad in left)
        if stale and not self._warned:
            self._warned = True
            warnings.warn(
                "the gradients of the last step were not cleared, so that those of this batch are added to them: call "
                "optimizer.zero_grad() before loss.backward(), once for each step",
                stacklevel=2,
            )
        return stale

    def end_backward(self) -> None:
        """A backward pass is over: remember what its gradients are."""
        self._going = False
        self._left = {mark_of(p.grad) for p in self.watched if p.grad is not None}
        self._kept_back = not self._left and any_split(self.watched)

    def _were_cleared(self) -> bool:
        """Whether somebody else cleared the gradients (`model.zero_grad()`, p.grad = None) since losses went backward.

        Gradients that are zero on their own, as those of a batch that is fitted exactly, were not touched since.
        """
        if not self.losses or not self.watched or self._kept_back:
            return False
        there = [p.grad for p in self.watched if p.grad is not None]
        return all(mark_of(grad) not in self._left and not holds_anything(grad) for grad in there)


def end_backward(recall: Recall | None) -> None:
    """Tell what remembers a backward pass that it is over, if it is still there."""
    if recall is not None:
        recall.end_backward()


def mark_of(gradient: Tensor) -> tuple[int, int]:
    """What changes when somebody writes into a gradient, or puts another in its place."""
    return 0 if gradient.is_sparse else local_part(gradient).data_ptr(), gradient._version


def holds_anything(gradient: Tensor) -> bool:
    """Whether an entry is not zero."""
    return bool((gradient.to_dense() if gradient.is_sparse else local_part(gradient)).any())


class Counter:
    """Tensor hook that counts a loss when `backward` reaches it. Keeps no recall alive."""

    def __init__(self, recall: Recall, loss: Loss, told: RecordedLoss | None) -> None:
        self.recall, self.loss, self.told = weakref.ref(recall), loss, told

    def __call__(self, gradient: Tensor) -> None:
        recall = self.recall()
        if recall is not None:
            recall.goes_backward(self.loss, self.told, gradient)


class Listener:
    """Forward pre-hook that tells a `Recall` about training passes. A copied or pickled model carries a deaf one.

    Args:
        recall: What it tells; None for a hook that does nothing.
        traceable: True to do nothing inside a compiled graph too, where it would break the graph.
        in_eval: True if passes in evaluation mode are for training too.
    """

    def __init__(self, recall: Recall | None = None, traceable: bool = False, in_eval: bool = False) -> None:
        self.recall = None if recall is None else weakref.ref(recall)
        self.traceable, self.in_eval = traceable, in_eval
        self.ending: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.traceable and torch.compiler.is_compiling():
            return
        recall = None if self.recall is None else self.recall()
        if recall is None or is_evaluating():
            return
        heard = (module.training or self.in_eval) and torch.is_grad_enabled()
        if heard:
            begin = None if recall.begins is None else recall.begins()
            if begin is not None:
                begin()
            recall.record_pass(module, Call(args, dict(kwargs)))
        if (heard or recall.outputs is not None) and not torch.compiler.is_compiling():
            self.remove()  # a pass that raised has left it
            self.ending = module.register_forward_hook(Ending(self, recall, recall.last if heard else None))

    def remove(self) -> None:
        """Take the hook of the pass under way off."""
        if self.ending is not None:
            self.ending.remove()
            self.ending = None

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()


class Ending:
    """Forward hook of one pass: writes the pass into the graph of what it returned, and goes."""

    def __init__(self, listener: Listener, recall: Recall, passed: RecordedPass | None) -> None:
        self.listener, self.recall, self.passed = weakref.ref(listener), weakref.ref(recall), passed

    def __call__(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        listener, recall = self.listener(), self.recall()
        if listener is not None:
            listener.remove()
        if recall is not None:
            recall.record_outputs(outputs, self.passed)

    def __reduce__(self) -> tuple[type[Deaf], tuple[()]]:
        return Deaf, ()


class Deaf:
    """What a copied model carries in place of a hook of its original."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """Nothing."""


def listen(model: nn.Module, recall: Recall, *, traceable: bool = False, in_eval: bool = False) -> Any:
    """Attach a listener.

    Args:
        model: The network.
        recall: What it tells.
        traceable: True if it may be part of a compiled graph.
        in_eval: True if passes in evaluation mode are for training too.

    Returns:
        The handle whose remove() takes it off.
    """
    return model.register_forward_pre_hook(Listener(recall, traceable, in_eval), with_kwargs=True)


def overhear(metric: Metric, recall: Recall) -> None:
    """Tell `recall` about the losses of the density that a metric belongs to, if it belongs to one."""
    log_p = getattr(metric, "log_p", None)
    if log_p is not None:
        recall.density = getattr(log_p, "__name__", type(log_p).__name__)
        listen_to(log_p, recall)
