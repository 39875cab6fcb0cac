"""The loss at trial points theta + d, with the data, masks and statistics of the step's own pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Criterion
from natgrad.metrics import Fisher, GaussNewton, Metric, PullbackMetric, SampledFisher
from natgrad.optim.last_pass import Recall
from natgrad.optim.loss_inputs import OTHER_BATCH, Linearised
from natgrad.optim.loss_metrics import weights_of
from natgrad.optim.recorded_pass import Data, RepeatError
from natgrad.pure import RandomState, Select, map_tensors, pure_model, run_detached
from natgrad.rules import Vector
from natgrad.spaces import Space

Closure = Callable[[], Tensor]
NOT_REPEATED = (
    "closure gave {before:.6g}, and at the same parameters {again:.6g}, so that trial losses would be those of another "
    "function. Put back were the global generators of torch, random and NumPy, and buffers, generators and states in "
    "attributes of the model: take the batch out of the closure, and draw from one of these"
)


@dataclass(frozen=True)
class Called:
    """How `step` was called.

    Attributes:
        closure: The user's, None for a step without one.
        value: What its first call returned.
        random: The random state before that call.
    """

    closure: Closure | None = None
    value: Tensor | None = None
    random: RandomState | None = None


class Objective(ABC):
    """d -> loss(theta + d) of the mean loss; NaN where it is not finite. `before` is the value at d = 0.

    d: a vector (n,), or `Parts` by name.

    The last value is kept: a rule and the damping that ask for the same step cost one evaluation.

    Args:
        params: theta, by name.
        space: The order of the parameters in d.
        before: The loss at d = 0.

    Attributes:
        count: What the mean is over: what it weighs beside the same loss of other examples.
    """

    count: float = 1.0

    def __init__(self, params: dict[str, Tensor], space: Space, before: float) -> None:
        self.params, self.space, self.before = params, space, before
        self._last: tuple[Vector, float] | None = None

    def __call__(self, vector: Vector) -> float:
        """The loss at theta + d.

        Args:
            vector: d.
        """
        if self._last is None or self._last[0] is not vector:
            self._keep(vector, self._evaluate(self._by_name(vector)))
        assert self._last is not None
        return self._last[1]

    def gradient(self, vector: Tensor) -> tuple[float, Tensor]:
        """The loss at theta + d, and its gradient (n,) there.

        Args:
            vector: d, shape (n,).
        """
        value, parts = self._differentiate(self.space.unflatten(vector))
        self._keep(vector, value)
        return self(vector), self.space.flatten(parts)

    def _by_name(self, vector: Vector) -> dict[str, Tensor]:
        """The vector as a tensor for every parameter."""
        if isinstance(vector, Tensor):
            return self.space.unflatten(vector)
        return {
            name: vector[name].to(p.dtype) if name in vector.parts else torch.zeros_like(p)
            for name, p in self.params.items()
        }

    def _keep(self, vector: Vector, value: float) -> None:
        self._last = vector, value if math.isfinite(value) else math.nan

    @abstractmethod
    def _evaluate(self, step: dict[str, Tensor]) -> float:
        """The loss at theta + step."""

    @abstractmethod
    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """The loss at theta + step and its gradient."""


class Replay(Objective):
    """A pass again, as a pure function: nothing of the user's moves.

    Args:
        model: The network.
        criterion: The loss.
        passed: The data, and the random state before the pass.
        before: The loss at d = 0 where it is known, else None.
        params: theta, by name.
        space: The order of the parameters in d.
        select: What the criterion is of, given the model's outputs; None for all of them.
        count: What the mean is over; None: found out at the first evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        passed: Data,
        before: float | None,
        params: dict[str, Tensor],
        space: Space,
        select: Select | None = None,
        count: float | None = None,
    ) -> None:
        self.count = math.nan if count is None else count
        self.pure, self.select = pure_model(model, passed.inputs, passed.random), select
        self.criterion, self.targets = criterion, passed.targets
        super().__init__(params, space, math.nan)
        zero = {name: torch.zeros_like(p) for name, p in params.items()}
        self.before = self._evaluate(zero) if before is None else before

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        return float(run_detached(lambda: self._loss(self._move_parameters(step))))

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        with torch.enable_grad():
            points = self._move_parameters(step)
            value = self._loss(points)
            gradients = torch.autograd.grad(value, list(points.values()), materialize_grads=True)
        return float(value.detach()), dict(zip(points, gradients, strict=True))

    def _move_parameters(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """theta + step as leaves that require a gradient, as in training: a forward pass may differentiate in them."""
        return {name: (p.detach() + step[name]).requires_grad_() for name, p in self.params.items()}

    def _loss(self, params: dict[str, Tensor]) -> Tensor:
        """In units of its mean."""
        outputs = self.pure(params)
        outputs = outputs if self.select is None else self.select(outputs)
        if math.isnan(self.count):
            self.count = self.criterion.count(map_tensors(outputs, torch.detach), self.targets)
        return self.criterion.value(outputs, self.targets) / self.criterion.scale(outputs, self.targets)


class Total(Objective):
    """Several losses of a step, each evaluated again, with what they weigh in its gradient."""

    def __init__(self, parts: Sequence[tuple[float, Objective]]) -> None:
        self.parts, first = parts, parts[0][1]
        super().__init__(first.params, first.space, sum(weight * part.before for weight, part in parts))

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        return sum(weight * part._evaluate(step) for weight, part in self.parts)

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        found = [(weight, *part._differentiate(step)) for weight, part in self.parts]
        value = sum((weight * value for weight, value, _ in found), 0.0)
        sums = {name: torch.stack([weight * parts[name] for weight, _, parts in found]).sum(0) for name in step}
        return value, sums


class Beside(Objective):
    """A loss with what another one adds to it, of which its slope and its curvature are known: to second order.

    Args:
        part: The loss that can be evaluated.
        slope: Of the other one, shape (n,).
        curvature: Of the other one, along the way that the parameters came.
    """

    def __init__(self, part: Objective, slope: Tensor, curvature: float) -> None:
        super().__init__(part.params, part.space, part.before)
        self.part, self.slope, self.curvature = part, slope, curvature

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        vector = self.space.flatten(step)
        return self.part._evaluate(step) + float(self.slope @ vector + self.curvature / 2 * vector @ vector)

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        value, parts = self.part._differentiate(step)
        vector = self.space.flatten(step)
        slope = self.space.flatten(parts) + self.slope + self.curvature * vector
        value += float(self.slope @ vector + self.curvature / 2 * vector @ vector)
        return value, self.space.unflatten(slope)


class Proximal:
    """d -> g . d + KL(theta, theta + d), in units of the mean loss: a loss that is known by its gradient alone.

    It is the change of -log p itself, to the digit, where the outputs are an exponential family's natural parameters
    and linear in the model's.

    Args:
        metric: Of the likelihood.
        data: Of the pass.
        params: theta, by name.
        space: Their order.
        gradient: g, shape (n,).
    """

    before = 0.0

    def __init__(
        self, metric: PullbackMetric, data: Data, params: Mapping[str, Tensor], space: Space, gradient: Tensor
    ) -> None:
        self.metric, self.params, self.space, self.gradient = metric, params, space, gradient
        self.pure = pure_model(metric.model, data.inputs, data.random)

    def __call__(self, vector: Vector) -> float:
        assert isinstance(vector, Tensor)
        rows = self._rows(self.space.unflatten(vector))
        try:
            moved = self.metric.criterion.family.kl(self._start, rows)
        except NotImplementedError:  # nothing is known of a step then
            return self.before
        return float(self.gradient @ vector + moved.mean())

    @cached_property
    def _start(self) -> Tensor:
        return self._rows({name: torch.zeros_like(p) for name, p in self.params.items()})

    def _rows(self, step: Mapping[str, Tensor]) -> Tensor:
        moved = {name: (p.detach() + step[name]).requires_grad_() for name, p in self.params.items()}
        select: Select = self.metric.outputs or (lambda outputs: outputs)
        return run_detached(lambda: self.metric.layout(select(self.pure(moved))))


class Reclose(Objective):
    """The user's closure again, from the random state before its first call; everything is put back afterwards."""

    def __init__(
        self,
        model: Any,
        closure: Closure,
        recall: Recall,
        params: dict[str, Tensor],
        space: Space,
        value: Tensor,
        random: RandomState,
    ) -> None:
        self.scale = recall.scale or 1.0
        super().__init__(params, space, number(value) / self.scale)
        self.model, self.closure, self.recall, self.random = model, closure, recall, random

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        self._check_repeated()
        return self._value(step)

    def _value(self, step: dict[str, Tensor]) -> float:
        with self._move_parameters(step):
            return number(self.closure()) / self.scale

    def _check_repeated(self) -> None:
        """RepeatError, at an optimizer's first step with a closure, if that gives something else the second time."""
        if self.recall.repeats:
            return
        again = self._value({name: torch.zeros_like(p) for name, p in self.params.items()})
        if abs(again - self.before) > torch.finfo(self.space.dtype).eps ** 0.5 * abs(self.before):
            raise RepeatError(NOT_REPEATED.format(before=self.before, again=again))
        self.recall.repeats = True

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        self._check_repeated()
        with self._move_parameters(step):
            value = number(self.closure()) / self.scale
            gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.params.items()}
            return value, {name: gradient.to_dense() / self.scale for name, gradient in gradients.items()}

    @contextmanager
    def _move_parameters(self, step: dict[str, Tensor]) -> Generator[None]:
        with self.random.replay(), self._restore_parameters(), torch.enable_grad():
            if self.random.held is not None:
                self.random.held.put_back_buffers()
            for name, p in self.params.items():
                p.data.add_(step[name])
            yield

    @contextmanager
    def _restore_parameters(self) -> Generator[None]:
        tensors = list(self.model.buffers()) if isinstance(self.model, nn.Module) else []
        tensors += list(self.params.values())
        values = [t.detach().clone() for t in tensors]
        grads = [None if p.grad is None else p.grad.clone() for p in self.params.values()]
        # a closure adds to its lists, and a listener is none of a batch
        remembered = {key: copy(kept) for key, kept in vars(self.recall).items() if key != "begins"}
        try:
            yield
        finally:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data.copy_(value)
            for p, grad in zip(self.params.values(), grads, strict=True):
                p.grad = grad
            vars(self.recall).update(remembered)


def call_closure(closure: Closure, device: torch.device, recall: Recall, model: object) -> Called:
    """The closure's first call. ValueError if it returns nothing, and no loss of the step is known otherwise.

    Lightning steps by an empty closure where the user goes backward by hand: as without one then.
    """
    if not callable(closure):
        raise TypeError(
            f"closure is {type(closure).__name__}, expected a function that computes the loss, calls backward() on it "
            "and returns it: define one and give it without calling it, or call step() with nothing"
        )
    random = RandomState.capture(device, model=model)
    with torch.enable_grad():
        value = closure()
    if value is None and recall.computed:
        return Called()
    if value is None:
        raise ValueError("closure returned None, expected the loss; end it with `return loss`")
    return Called(closure, value, random)


def objective_of(
    model: Any,
    criterion: Callable[[], Criterion],
    recall: Recall,
    params: dict[str, Tensor],
    space: Space,
    called: Called,
    searched: Data | None = None,
    needed: bool = True,
) -> Objective | None:
    """The cheapest way to re-evaluate the loss: a replay after `opt.loss`, else the closure, else None.

    needed: whether it will be evaluated. ValueError then for a loss of something that cannot be made again.
    """
    used = recall.used_losses()
    if isinstance(model, nn.Module) and searched is not None:
        select = recall.outputs if not used else used[-1].settle(model, params, recall.outputs)
        if isinstance(select, Linearised):
            raise ValueError(OTHER_BATCH)
        return Replay(model, criterion(), searched, None, params, space, select)
    if isinstance(model, nn.Module) and used and recall.find_pass() is not None:
        problem = next((told.route.problem for told in used if told.route.problem), "") if needed else ""
        if not problem:
            return replay_losses(model, criterion(), recall, params, space)
        if called.closure is None:
            raise ValueError(problem)
    if called.closure is not None and called.value is not None and called.random is not None:
        return Reclose(model, called.closure, recall, params, space, called.value, called.random)
    return None


def replay_losses(
    model: nn.Module, criterion: Criterion, recall: Recall, params: dict[str, Tensor], space: Space, exact: bool = True
) -> Objective:
    """The step's losses as `opt.loss` saw them, evaluated again. exact: whether their values are those of a replay."""
    used, parts = recall.used_losses(), list[Objective]()
    for told in used:
        before = float(told.value) if exact else None
        select = told.settle(model, params, recall.outputs)
        parts.append(Replay(model, criterion, told.data(), before, params, space, select, told.count))
    if len(parts) == 1:
        return parts[0]
    return Total(list(zip(weights_of(used, recall.scale), parts, strict=True)))


def proximal_of(
    metric: Metric, data: Data, params: Mapping[str, Tensor], space: Space, gradient: Tensor
) -> Proximal | None:
    """What stands for a loss that cannot be evaluated; None for a metric that is of no likelihood."""
    if not isinstance(metric, (Fisher, SampledFisher, GaussNewton)) or not isinstance(metric.model, nn.Module):
        return None
    return Proximal(metric, data, params, space, gradient)


def tells_another(called: Called, objective: Objective, recall: Recall) -> bool:
    """Whether the closure returned another number than the losses that `opt.loss` told: a penalty was added, say."""
    if called.closure is None or called.value is None or isinstance(objective, Reclose):
        return False
    value = number(called.value) / (recall.scale or 1.0)
    size = max(abs(value), abs(objective.before))
    return math.isfinite(size) and abs(value - objective.before) > torch.finfo(objective.space.dtype).eps ** 0.5 * size


def number(value: Tensor | float) -> float:
    """A closure's value: a scalar tensor, or a number as LBFGS allows."""
    return float(value.detach() if isinstance(value, Tensor) else value)
