"""What the user's own pass saw: inputs, random state, targets. Nothing of it holds a graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from natgrad.densities import listen_to
from natgrad.families import Criterion
from natgrad.metrics import Metric
from natgrad.pure import Call, RandomState, is_evaluating, leaves, map_tensors


@dataclass(frozen=True)
class Data:
    """Inputs and targets for a metric or for trial points, and the random state to replay on them."""

    inputs: Any
    targets: Any
    random: RandomState | None


@dataclass(frozen=True)
class Pass:
    """One training-mode forward pass: its inputs, and the random state that it started from."""

    call: Call
    random: RandomState
    versions: tuple[int, ...]
    modes: tuple[bool, ...] | None

    @contextmanager
    def modes_of(self, model: nn.Module) -> Iterator[None]:
        """Inside, every submodule is in the mode (train or eval) that it had during the pass, where that is known."""
        if self.modes is None:
            yield
            return
        now = modes_of(model)
        try:
            set_modes(model, self.modes)
            yield
        finally:
            set_modes(model, now)

    def check(self) -> None:
        """ValueError if the inputs were changed in place since: the metric would belong to other data."""
        if self.versions != versions_of(self.call):
            raise ValueError(
                "the inputs of the model's last forward were changed in place before step(); copy them, or call "
                "optimizer.observe(inputs) with the data that the metric should use"
            )


class Loss(NamedTuple):
    """One loss in units of its mean, the rows that it weighs, and what reduction='sum' multiplied it by, else 0."""

    value: Tensor
    rows: int
    count: float


class Recall:
    """What happened since the last step: the last training pass, the last loss's targets, data to observe.

    paired: the pass that the last loss came from.   loss: the last loss in units of its mean.   last_scale: what it was
    divided by.   dtype: of its outputs.   losses: those that `backward` went through since the gradients were cleared.
    computed: all losses since the last step.   watched: the parameters whose gradients tell when they were cleared.
    observed: for the metric, searched: for trial points, in place of the pass's own data.   floor: of the damping on
    observed data.
    """

    def __init__(self) -> None:
        self.watched: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything, so that nothing of a batch outlives its step."""
        self.last: Pass | None = None
        self.paired: Pass | None = None
        self.targets: Any = None
        self.target_versions: tuple[int, ...] = ()
        self.loss: Tensor | None = None
        self.last_scale = 1.0
        self.dtype: torch.dtype | None = None
        self.computed: list[Loss] = []
        self.forget_gradients()
        self.observed: Data | None = None
        self.floor = 0.0
        self.searched: Data | None = None

    def forget_gradients(self) -> None:
        """The gradients are cleared: forget the losses that they came from."""
        self.losses: list[Loss] = []
        self._going = False  # whether a backward pass that reached a loss is under way
        self._left: set[tuple[int, int]] = set()  # the marks of the gradients at its end

    @property
    def scale(self) -> float:
        """What to divide the gradient by under reduction='sum': micro-batches have the sum of their counts; else 0.

        Where another optimizer's loss went backward, that of the losses computed here counts.
        """
        return sum(loss.count for loss in self.losses or self.computed)

    def passed(self) -> Pass | None:
        """The pass that the gradient belongs to: the last loss's, else the last one. ValueError if its data changed."""
        chosen = self.paired or self.last
        if chosen is not None:
            chosen.check()
        if self.target_versions != versions_of(Call((self.targets,))):
            raise ValueError("the targets of the last loss were changed in place before step(); copy them")
        return chosen

    def whole(self) -> Data:
        """All of the pass that the gradient belongs to. ValueError if there was none."""
        last = self.passed()
        if last is None:
            raise ValueError(
                "no inputs for the metric: the model has had no forward pass in training mode since the last step; "
                "call model.train() and the model itself (not a copy of it), or optimizer.observe(inputs); to train in "
                "evaluation mode on purpose, build the optimizer with train_in_eval=True"
            )
        return Data(last.call, self.targets, last.random)

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
        if self.loss is None:
            raise ValueError(
                "search_batch draws from the batch of optimizer.loss(outputs, targets): compute the loss with it, or "
                "give the data with optimizer.search_on(inputs, targets)"
            )
        return part(self.whole(), size, seed, last=True)

    def record_pass(self, model: nn.Module, call: Call) -> None:
        """Keep the inputs of a forward pass, detached, and the random state before it."""
        kept = call.map(torch.detach)
        random = RandomState.capture(*{t.device for t in call.tensors()})
        self.last = Pass(kept, random, versions_of(kept), modes_of(model))

    def hear(self, log_p: object, inputs: Tensor) -> None:
        """A loss of a density went backward on X: the metric of that density is taken there."""
        call = Call((inputs,))
        self.last = Pass(call, RandomState.capture(inputs.device), versions_of(call), None)

    def record_loss(self, criterion: Criterion, outputs: Any, targets: Any, value: Tensor, rows: int = 0) -> None:
        """Keep the targets and units of a loss. rows: what it weighs among the losses of a step."""
        loss, self.last_scale = self.count_loss(criterion, outputs, targets, value, rows)
        self.targets = map_tensors(targets, torch.detach)
        self.target_versions = versions_of(Call((targets,)))
        self.paired = self.last
        self.loss, self.dtype = loss.value, next(leaves(outputs)).dtype
        self.computed = [*self.computed, loss]

    def count_loss(
        self, criterion: Criterion, outputs: Any, targets: Any, value: Tensor, rows: int = 0
    ) -> tuple[Loss, float]:
        """Count a loss once it goes backward, whatever mode its pass was in; the loss, and what it was divided by."""
        scale = float(criterion.scale(map_tensors(outputs, torch.detach), targets))
        # without a single target that counts, reduction='sum' adds nothing to the gradient, and nothing to the mean
        loss = Loss(value.detach() / scale, rows if scale else 0, scale if criterion.summed else 0.0)
        self._going = False  # an error may have ended it
        if self._were_cleared():
            self.forget_gradients()
        if value.requires_grad:
            value.register_hook(Counter(self, loss))
        return loss, scale

    def goes_backward(self, loss: Loss) -> None:
        """`backward` reached a loss: its gradient is about to be added to those that are there."""
        if not self._going:
            if self._were_cleared():
                self.forget_gradients()
            self._going, me = True, weakref.ref(self)
            # as torch's own data parallelism hears that a backward pass is over; there is no public name for it
            Variable._execution_engine.queue_callback(lambda: end_backward(me()))
        self.losses = [*self.losses, loss]

    def _were_cleared(self) -> bool:
        """Whether somebody else cleared the gradients (`model.zero_grad()`, p.grad = None) since losses went backward.

        Gradients that are zero on their own, as those of a batch that is fitted exactly, were not touched since.
        """
        if not self.losses or not self.watched:
            return False
        there = [p.grad for p in self.watched if p.grad is not None]
        return all(mark_of(grad) not in self._left and not holds_anything(grad) for grad in there)


def part(data: Data, size: int, seed: int, last: bool = False) -> Data:
    """`size` of the examples, inputs and targets together: the first of a drawn order, or its last."""
    inputs, targets = Call((data.inputs, data.targets)).sample(size, seed, last).args
    return Data(inputs, targets, data.random)


def end_backward(recall: Recall | None) -> None:
    """A backward pass is over: remember what its gradients are."""
    if recall is not None:
        recall._going = False
        recall._left = {mark_of(p.grad) for p in recall.watched if p.grad is not None}


def mark_of(gradient: Tensor) -> tuple[int, int]:
    """What changes when somebody writes into a gradient, or puts another in its place."""
    return 0 if gradient.is_sparse else gradient.data_ptr(), gradient._version


def holds_anything(gradient: Tensor) -> bool:
    """Whether an entry is not zero."""
    return bool((gradient.to_dense() if gradient.is_sparse else gradient).any())


class Counter:
    """Tensor hook that counts a loss when `backward` reaches it. Keeps no recall alive."""

    def __init__(self, recall: Recall, loss: Loss) -> None:
        self.recall, self.loss = weakref.ref(recall), loss

    def __call__(self, gradient: Tensor) -> None:
        recall = self.recall()
        if recall is not None:
            recall.goes_backward(self.loss)


class Listener:
    """Forward pre-hook that tells a `Recall` about training passes. A copied or pickled model carries a deaf one.

    traceable: deaf inside a compiled graph too, where it would break the graph.   in_eval: passes in evaluation mode
    are for training too.
    """

    def __init__(self, recall: Recall | None = None, traceable: bool = False, in_eval: bool = False) -> None:
        self.recall = None if recall is None else weakref.ref(recall)
        self.traceable, self.in_eval = traceable, in_eval

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.traceable and torch.compiler.is_compiling():
            return
        recall = None if self.recall is None else self.recall()
        training = module.training or self.in_eval
        if recall is not None and training and torch.is_grad_enabled() and not is_evaluating():
            recall.record_pass(module, Call(args, dict(kwargs)))

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()


def listen(model: nn.Module, recall: Recall, *, traceable: bool = False, in_eval: bool = False) -> Any:
    """Attach a listener; returns the handle whose remove() takes it off. traceable: it may be part of a graph."""
    return model.register_forward_pre_hook(Listener(recall, traceable, in_eval), with_kwargs=True)


def overhear(metric: Metric, recall: Recall) -> None:
    """Tell `recall` about the losses of the density that a metric belongs to, if it belongs to one."""
    log_p = getattr(metric, "log_p", None)
    if log_p is not None:
        listen_to(log_p, recall)


def modes_of(model: nn.Module) -> tuple[bool, ...]:
    """The mode of every submodule, in the order of `modules()`."""
    return tuple(module.training for module in model.modules())


def set_modes(model: nn.Module, modes: tuple[bool, ...]) -> None:
    """Set the mode of every submodule, in the order of `modules()`."""
    for module, training in zip(model.modules(), modes, strict=True):
        module.training = training


def versions_of(call: Call) -> tuple[int, ...]:
    """In-place version counters of the inputs; 0 for inference tensors, which have none."""
    return tuple(0 if t.is_inference() else t._version for t in call.tensors())
