"""The loss at other parameters: passes done again, what a closure returns, and how a step is judged by it."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, Likelihood
from natgrad.ground.constants import DRAWS, SCALER, TOO_FAR, TRIALS
from natgrad.ground.linalg import as_columns
from natgrad.ground.pure import RandomState, Select, call_within, map_tensors, run_detached, run_uncompiled
from natgrad.ground.spaces import Params, Space
from natgrad.ground.typed_torch import list_numbers, measure_norms
from natgrad.ground.whole_tensors import any_split
from natgrad.metrics import Covariance, Fisher, GaussNewton, Metric, PullbackMetric, SampledFisher
from natgrad.operators import Operator, Scaled, Sum
from natgrad.optim.checks import inputs_of
from natgrad.optim.passes import OTHER_BATCH, BatchRecord, Data, Linearised, Loss, RepeatError, function_of
from natgrad.optim.processes import Processes
from natgrad.optim.state import OutsideLosses
from natgrad.rules import Damping, Parts, Relative, Vector, as_damping


@dataclass(frozen=True)
class SumOverData(Metric):
    """The weighted sum of metrics on data of their own: several losses of one pass."""

    parts: Sequence[tuple[float, Metric, Data]]

    def at(self, params: Params, inputs: Any, *, random: RandomState | None = None) -> Operator:
        terms = [
            Scaled(metric.at(params, inputs_of(metric, data), random=data.random), weight)
            for weight, metric, data in self.parts
        ]
        return Sum(tuple(terms))


def metric_of_step(metric: Metric, record: BatchRecord, model: Any, params: Mapping[str, Tensor]) -> Metric:
    """The metric of the outputs that the step's last loss was computed on, added up over the losses of its pass.

    Gradients of several passes (micro-batches) keep the metric of the last one. ValueError for a loss of something that
    cannot be followed.
    """
    used, last = record.used_losses(), record.last_told
    if last is None or not isinstance(model, nn.Module):
        return metric
    group = [loss for loss in used if loss.passes == last.passes]
    metrics = [choose_outputs(metric, loss.settle(model, params, record.outputs)) for loss in group]
    if record.observed is not None:
        if any(isinstance(chosen_outputs(part), Linearised) for part in metrics):
            raise ValueError(OTHER_BATCH)
        return metrics[-1]
    if len(group) == 1:
        return metrics[-1]
    weights = weights_of(used, record.scale)
    share = sum(weights) / sum(w for w, loss in zip(weights, used, strict=True) if loss in group)
    parts = [(share * weights[used.index(loss)], part, loss.data()) for loss, part in zip(group, metrics, strict=True)]
    return SumOverData(parts)


def chosen_outputs(metric: Metric) -> Select | None:
    """What a metric takes of the model's outputs, None for all of them."""
    return getattr(metric.moment if isinstance(metric, Covariance) else metric, "outputs", None)


def choose_outputs(metric: Metric, select: Select | None) -> Metric:
    """The same metric, of what `select` makes of the model's outputs. ValueError for one that cannot be of that."""
    if isinstance(metric, Covariance):
        return replace(metric, moment=choose_outputs(metric.moment, select))
    if is_dataclass(metric) and "outputs" in {field.name for field in fields(metric)}:
        return replace(metric, outputs=select)  # type: ignore[call-arg]
    if select is None:
        return metric
    raise ValueError(
        f"optimizer.loss was given a part or a function of the model's outputs, and {metric!r} is of the outputs as "
        "they are: let the model return what the loss is computed on"
    )


def weights_of(used: Sequence[Loss], scale: float) -> list[float]:
    """What each loss, as a mean, weighs in the gradient. ValueError where a gradient scaler hides it.

    scale: what the gradient is divided by.
    """
    weights = [1.0 if loss.slope is None else float(loss.slope) for loss in used]
    if len(used) > 1 and min(weights) >= SCALER:
        raise ValueError(
            f"the step has {len(used)} losses with weights {weights}, as from a GradScaler: what each weighs in the "
            "gradients is not known; make one optimizer.loss(outputs, targets) of them, or do without scaling"
        )
    return [weight * (loss.scale / scale if scale else 1.0) for weight, loss in zip(weights, used, strict=True)]


# The loss at trial points theta + d, with the data, masks and statistics of the step's own pass

Closure = Callable[[], Tensor]
NOT_REPEATED = (
    "closure gave {before:.6g}, and at the same parameters {again:.6g}, so that trial losses would be those of another "
    "function. Put back were the global generators of torch, random and NumPy, and buffers, generators and states in "
    "attributes of the model: take the batch out of the closure, and draw from one of these"
)


@dataclass(frozen=True)
class Called:
    """How `step` was called."""

    closure: Closure | None = None  # the user's, None for a step without one
    value: Tensor | None = None  # what its first call returned
    random: RandomState | None = None  # the random state before that call


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
        self.outputs_at = function_of(model, passed, select)
        self.model, self.criterion, self.targets = model, criterion, passed.targets
        super().__init__(params, space, math.nan)
        zero = {name: torch.zeros_like(p) for name, p in params.items()}
        self.before = self._evaluate(zero) if before is None else before

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        return float(run_detached(lambda: self._loss(move_parameters(self.params, step))))

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        points = move_parameters(self.params, step)

        def differentiate() -> tuple[Tensor, tuple[Tensor, ...]]:
            value = self._loss(points)
            return value, torch.autograd.grad(value, list(points.values()), materialize_grads=True)

        with torch.enable_grad():  # what is checkpointed is computed again while it goes backward
            value, gradients = call_within(self.model, points, differentiate)
        return float(value.detach()), dict(zip(points, gradients, strict=True))

    def _loss(self, params: dict[str, Tensor]) -> Tensor:
        """In units of its mean."""
        outputs = self.outputs_at(params)
        if math.isnan(self.count):
            self.count = self.criterion.count(map_tensors(outputs, torch.detach), self.targets)
        return self.criterion.value(outputs, self.targets) / self.criterion.scale(outputs, self.targets)


def move_parameters(params: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """theta + step as leaves that require a gradient, as in training: a forward pass may differentiate in them."""
    return {name: (p.detach() + step[name]).requires_grad_() for name, p in params.items()}


class Total(Objective):
    """Several losses of a step, each evaluated again, with what they weigh in its gradient."""

    def __init__(self, parts: Sequence[tuple[float, Objective]]) -> None:
        self.parts, first = parts, parts[0][1]
        super().__init__(first.params, first.space, sum(weight * part.before for weight, part in parts))

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        return sum(weight * part._evaluate(step) for weight, part in self.parts)

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        terms = [(weight, *part._differentiate(step)) for weight, part in self.parts]
        value = sum((weight * value for weight, value, _ in terms), 0.0)
        sums = {name: torch.stack([weight * parts[name] for weight, _, parts in terms]).sum(0) for name in step}
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
        self.outputs_at = function_of(metric.model, data, metric.outputs)

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
        return run_detached(lambda: self.metric.layout(self.outputs_at(move_parameters(self.params, step))))


class Reclose(Objective):
    """The user's closure again, from the random state before its first call; everything is put back afterwards."""

    def __init__(
        self,
        model: Any,
        closure: Closure,
        record: BatchRecord,
        params: dict[str, Tensor],
        space: Space,
        value: Tensor,
        random: RandomState,
    ) -> None:
        self.scale = record.scale or 1.0
        super().__init__(params, space, number(value) / self.scale)
        self.model, self.closure, self.record, self.random = model, closure, record, random

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        self._check_repeated()
        return self._value(step)

    def _value(self, step: dict[str, Tensor]) -> float:
        with self._move_parameters(step):
            return number(self.closure()) / self.scale

    def _check_repeated(self) -> None:
        """RepeatError, at an optimizer's first step with a closure, if that gives something else the second time."""
        if self.record.repeats:
            return
        again = self._value({name: torch.zeros_like(p) for name, p in self.params.items()})
        if abs(again - self.before) > torch.finfo(self.space.dtype).eps ** 0.5 * abs(self.before):
            raise RepeatError(NOT_REPEATED.format(before=self.before, again=again))
        self.record.repeats = True

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
        remembered = {key: copy(value) for key, value in vars(self.record).items() if key != "begins"}
        try:
            yield
        finally:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data.copy_(value)
            for p, grad in zip(self.params.values(), grads, strict=True):
                p.grad = grad
            vars(self.record).update(remembered)


def call_closure(closure: Closure, device: torch.device, record: BatchRecord, model: object) -> Called:
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
    if value is None and record.computed:
        return Called()
    if value is None:
        raise ValueError("closure returned None, expected the loss; end it with `return loss`")
    return Called(closure, value, random)


def objective_of(
    model: Any,
    criterion: Callable[[], Criterion],
    record: BatchRecord,
    params: dict[str, Tensor],
    space: Space,
    called: Called,
    searched: Data | None = None,
    needed: bool = True,
) -> Objective | None:
    """The cheapest way to re-evaluate the loss: a replay after `opt.loss`, else the closure, else None.

    needed: whether it will be evaluated. ValueError then for a loss of something that cannot be made again.
    """
    used = record.used_losses()
    if isinstance(model, nn.Module) and searched is not None:
        select = record.outputs if not used else used[-1].settle(model, params, record.outputs)
        if isinstance(select, Linearised):
            raise ValueError(OTHER_BATCH)
        return Replay(model, criterion(), searched, None, params, space, select)
    if isinstance(model, nn.Module) and used and record.find_pass() is not None:
        problem = next((loss.problem for loss in used if loss.problem), "") if needed else ""
        if not problem:
            return replay_losses(model, criterion(), record, params, space)
        if called.closure is None:
            raise ValueError(problem)
    if called.closure is not None and called.value is not None and called.random is not None:
        return Reclose(model, called.closure, record, params, space, called.value, called.random)
    return None


def replay_losses(
    model: nn.Module,
    criterion: Criterion,
    record: BatchRecord,
    params: dict[str, Tensor],
    space: Space,
    exact: bool = True,
) -> Objective:
    """The step's losses as `opt.loss` saw them, evaluated again. exact: whether their values are those of a replay."""
    used, parts = record.used_losses(), list[Objective]()
    for loss in used:
        before = float(loss.value) if exact else None
        select = loss.settle(model, params, record.outputs)
        parts.append(Replay(model, criterion, loss.data(), before, params, space, select, loss.count))
    if len(parts) == 1:
        return parts[0]
    return Total(list(zip(weights_of(used, record.scale), parts, strict=True)))


def proximal_of(
    metric: Metric, data: Data, params: Mapping[str, Tensor], space: Space, gradient: Tensor
) -> Proximal | None:
    """What stands for a loss that cannot be evaluated; None for a metric that is of no likelihood."""
    if not isinstance(metric, (Fisher, SampledFisher, GaussNewton)) or not isinstance(metric.model, nn.Module):
        return None
    return Proximal(metric, data, params, space, gradient)


def tells_another(called: Called, objective: Objective, record: BatchRecord) -> bool:
    """Whether the closure returned another number than the losses that `opt.loss` told: a penalty was added, say."""
    if called.closure is None or called.value is None or isinstance(objective, Reclose):
        return False
    value = number(called.value) / (record.scale or 1.0)
    size = max(abs(value), abs(objective.before))
    return math.isfinite(size) and abs(value - objective.before) > torch.finfo(objective.space.dtype).eps ** 0.5 * size


def number(value: Tensor | float) -> float:
    """A closure's value: a scalar tensor, or a number as LBFGS allows."""
    return float(value.detach() if isinstance(value, Tensor) else value)


# Levenberg-Marquardt for metrics in blocks: the loss at a step, beside what the quadratic model promises of it


class PooledLoss:
    """d -> the loss at theta + d, the mean over all processes' rows, penalty included; `before` is that at d = 0.

    Args:
        objective: The loss of this process's rows.
        rows: What they weigh: how many they are; 0 where this process has none.
        processes: The processes.
        before: The mean loss over all rows.
        named: The parameters.
        strengths: The l2 of a penalty l2 / 2 |theta|^2, by name.
        outside: What is known of losses that `opt.loss` was not told of.
    """

    def __init__(
        self,
        objective: Objective,
        rows: float,
        processes: Processes,
        before: float,
        named: Mapping[str, Tensor],
        strengths: Mapping[str, float],
        outside: OutsideLosses,
    ) -> None:
        self.outside = OutsideLosses() if isinstance(objective, Reclose) else outside
        self.objective, self.rows, self.processes = objective, rows, processes
        self.before, self.named, self.strengths = before, named, strengths
        self._last: tuple[Vector, float] | None = None

    def __call__(self, vector: Vector) -> float:
        return self.before + self.change(vector)

    def change(self, vector: Vector) -> float:
        """loss(theta + d) - loss(theta); NaN where it is not finite."""
        if self._last is None or self._last[0] is not vector:
            assert isinstance(vector, Parts)
            change = self.objective(vector) - self.objective.before if self.rows else 0.0
            pair = torch.tensor([change * self.rows, self.rows], dtype=torch.float64, device=self._device)
            total, weight = self.processes.sum(pair)
            self._last = vector, float(total / weight) + self._penalty(vector)
        return self._last[1]

    @property
    def _device(self) -> torch.device:
        return next(iter(self.named.values())).device

    def _penalty(self, vector: Parts) -> float:
        """How l2 / 2 |theta|^2 changes, and the losses outside of `opt.loss`, to second order."""
        total = 0.0
        for name in vector:
            if self.strengths[name]:
                move = vector[name]
                total += self.strengths[name] * float((self.named[name] * move).sum() + 0.5 * move.square().sum())
            if name in self.outside.levels:
                total += self.outside.change(name, self.named[name], vector[name])
        return total


def objective_of_blocks(
    model: nn.Module, criterion: Criterion, record: BatchRecord, params: dict[str, Tensor], called: Called, asks: object
) -> Objective:
    """The loss of this step at other parameters: its one pass replayed, or the closure called again."""
    space, used = Space(params), record.used_losses()
    problem = next((loss.problem for loss in used if loss.problem), "")
    if len(used) == 1 and record.find_pass() is not None and not problem:
        exact = used[0].dtype == space.dtype  # under autocast the loss was rounded, and a replay is not
        replayed = replay_losses(model, criterion, record, params, space, exact)
        if not tells_another(called, replayed, record):
            return replayed
    if called.closure is None or called.value is None or called.random is None:
        hint = f"which has {len(used)} losses of optimizer.loss(outputs, targets) and not one:"
        if len(used) == 1:
            hint = (
                "and the model's inputs are not known, as inside of a compiled graph: give the optimizer the compiled "
                "model, or"
            )
        raise ValueError(
            problem or f"{asks} compares the loss before and after a step, {hint} call optimizer.step(closure)"
        )
    return Reclose(model, called.closure, record, params, space, called.value, called.random)


@contextmanager
def replaying(model: nn.Module, record: BatchRecord) -> Generator[None]:
    """Inside, modules are in the mode of the last pass, and compiled ones run as they were written: no new graph."""
    last = record.find_pass()
    with nullcontext() if last is None else last.modes_of(model), run_uncompiled():
        yield


def as_block_damping(damping: float | Damping) -> Damping:
    """A strategy; a number stands for `Relative(number, per="block")`. TypeError or ValueError for anything else."""
    if isinstance(damping, Damping):
        return damping
    as_damping(damping)  # checks it
    return Relative(float(damping), per="block")


# d^T G d on a step's own batch, exact over labels, from the model's outputs at a point a little further along d

# in float64, and in less
MOVED = {True: 1e-10, False: 3e-8}  # nats that the trial point lies away, as far as is known
LEAST = {True: 1e-7, False: 1e-5}  # share of the parameters that it moves at least


class BatchForm:
    """d -> d^T G d of the pass that a step's gradient came from, G exact over labels: one forward pass per question.

    J d = (f(theta + h d) - f(theta)) / h, on the pass's own inputs, dropout masks and batch statistics. Nothing of the
    model changes.

    Args:
        model: The network.
        criterion: Its loss.
        record: What happened since the last step.
        named: The parameters.
        processes: The processes that train the model.
        nats: Nats per example in one unit of d^T G d / 2.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        record: BatchRecord,
        named: Mapping[str, Tensor],
        processes: Processes,
        nats: Tensor | float,
    ) -> None:
        self.model, self.criterion, self.record = model, criterion, record
        self.named, self.processes, self.nats = named, processes, float(nats)

    def measure(self, vector: Parts, nats: float) -> float:
        """d^T G d, a mean over the rows of all processes; NaN where the pass cannot be done again."""
        if any_split(self.named.values()):  # a pass at other parameters has no place in a model in parts
            return math.nan
        least, form = self._least_share(vector), math.nan
        share = self._share(vector, nats, least)
        for _ in range(TRIALS):
            form = self._pool_form(vector, share)
            moved = 0.5 * self.nats * form
            if not share**2 * moved > TOO_FAR * self._near(vector) or share <= least:
                break
            share = max(least, math.sqrt(self._near(vector) / moved))  # it went much farther than was known
        return form

    def _pool_form(self, vector: Parts, share: float) -> float:
        """The form over all processes' rows."""
        try:
            form, rows = self._own(vector, share)
        except RepeatError as error:
            warnings.warn(f"{error}. Steps are measured on averages instead of on their own batch", stacklevel=2)
            form, rows = math.nan, 1.0
        except (ValueError, NotImplementedError, RuntimeError):
            # written over since, no known function of the outputs, only one pass allowed: not known
            form, rows = math.nan, 1.0
        pair = torch.tensor([form * rows, rows], dtype=torch.float64, device=next(iter(self.named.values())).device)
        total, weight = list_numbers(self.processes.sum(pair))
        return total / weight if weight else math.nan

    def _share(self, vector: Parts, nats: float, least: float) -> float:
        """h: so small that the outputs go straight, so large that they are told from rounding."""
        near = math.sqrt(self._near(vector) / nats) if nats > 0 else 1.0
        return min(1.0, max(least, near))

    def _near(self, vector: Parts) -> float:
        """How many nats the trial point lies away."""
        return MOVED[self._is_double(vector)]

    def _least_share(self, vector: Parts) -> float:
        """The least h: a shorter step would be lost in the parameters' own rounding."""
        if any(torch.finfo(self.named[name].dtype).bits < 32 for name in vector):
            return 1.0
        moved = float(vector.norm())
        sizes = measure_norms([self.named[name].detach() for name in vector])
        size = math.hypot(*list_numbers(torch.stack([norm.to(sizes[0]) for norm in sizes]))) if sizes else 0.0
        return min(1.0, LEAST[self._is_double(vector)] * size / moved) if moved > 0 else 1.0

    def _is_double(self, vector: Parts) -> bool:
        return all(self.named[name].dtype == torch.float64 for name in vector)

    def _own(self, vector: Parts, share: float) -> tuple[float, float]:
        """The form on this process's rows, and their number."""
        forms, weights = list[float](), list[float]()
        moved = {
            name: p.detach() + share * vector[name].to(p.dtype) if name in vector.parts else p.detach()
            for name, p in self.named.items()
        }
        with replaying(self.model, self.record):
            for loss in self.record.used_losses():
                if loss.problem:
                    raise ValueError(loss.problem)
                if loss.rows:
                    forms.append(self._form(loss, moved, share))
                    weights.append(loss.weight)
        rows = sum(weights)
        if not rows:  # a batch without rows, beside those of other processes
            return 0.0, 0.0
        return sum(w * form for w, form in zip(weights, forms, strict=True)) / rows, rows

    def _form(self, loss: Loss, moved: Mapping[str, Tensor], share: float) -> float:
        """Of one loss: sum_i (J_i d)^T w_i^1/2 M_i w_i^1/2 (J_i d)."""
        select, data = loss.settle(self.model, self.named, self.record.outputs), loss.data()
        compute = function_of(self.model, data, select)

        def outputs_at(params: Mapping[str, Tensor]) -> Any:
            return run_detached(lambda: compute({name: p.detach().requires_grad_() for name, p in params.items()}))

        same = loss.dtype == next(iter(self.named.values())).dtype  # under autocast the pass was rounded
        before = loss.outputs if same else outputs_at(self.named)
        start, end = (map_tensors(tree, widen) for tree in (before, outputs_at(moved)))
        change = (self.criterion.family.rows(end) - self.criterion.family.rows(start)) / share
        scales = as_columns(self.criterion.weights(start, data.targets).sqrt())
        return float(squares_of(self.criterion.family, start, scales * change).sum())


def squares_of(family: Likelihood, outputs: Any, change: Tensor) -> Tensor:
    """t_i^T M_i t_i of every row, shape (R,).

    change: t, (R, m).
    """
    rows = family.rows(outputs)
    if type(family).fisher is not Likelihood.fisher or type(family).mv is not Likelihood.mv:
        return (change * family.mv(rows, change)).sum(-1)
    generator = torch.Generator(rows.device).manual_seed(0)
    scores = (family.score(outputs, family.sample(outputs, generator)) for _ in range(DRAWS))
    return torch.stack([(score * change).sum(-1).square() for score in scores]).mean(0)


def widen(outputs: Tensor) -> Tensor:
    """At least in float32."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32)) if outputs.is_floating_point() else outputs
