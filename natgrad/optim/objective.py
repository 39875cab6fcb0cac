"""The loss at trial points theta + d, with the data, masks and statistics of the step's own pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Criterion
from natgrad.optim.recall import Data, Recall
from natgrad.pure import PureModel, RandomState, as_call, run_detached
from natgrad.spaces import Space

Closure = Callable[[], Tensor]


class Objective(ABC):
    """d (n,) -> loss(theta + d) of the mean loss; NaN where it is not finite. `before` is the value at d = 0.

    The last value is kept: a rule and the damping that ask for the same step cost one evaluation.
    """

    def __init__(self, params: dict[str, Tensor], space: Space, before: float) -> None:
        self.params, self.space, self.before = params, space, before
        self._last: tuple[Tensor, float] | None = None

    def __call__(self, vector: Tensor) -> float:
        if self._last is None or self._last[0] is not vector:
            self._keep(vector, self._evaluate(self.space.unflatten(vector)))
        assert self._last is not None
        return self._last[1]

    def gradient(self, vector: Tensor) -> tuple[float, Tensor]:
        """The loss at theta + d, and its gradient (n,) there."""
        value, parts = self._differentiate(self.space.unflatten(vector))
        self._keep(vector, value)
        return self(vector), self.space.flatten(parts)

    def at(self, step: dict[str, Tensor]) -> float:
        """The loss at theta + step, by name; NaN where it is not finite."""
        value = self._evaluate(step)
        return value if math.isfinite(value) else math.nan

    def _keep(self, vector: Tensor, value: float) -> None:
        self._last = vector, value if math.isfinite(value) else math.nan

    @abstractmethod
    def _evaluate(self, step: dict[str, Tensor]) -> float:
        """The loss at theta + step."""

    @abstractmethod
    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """The loss at theta + step and its gradient."""


class Replay(Objective):
    """A pass again, as a pure function: nothing of the user's moves.

    passed: the data, and the random state before it.   before: the loss at d = 0 where it is known, else None.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        passed: Data,
        before: float | None,
        params: dict[str, Tensor],
        space: Space,
    ) -> None:
        self.pure = PureModel(model, as_call(passed.inputs), passed.random)
        self.criterion, self.targets = criterion, passed.targets
        super().__init__(params, space, math.nan)
        zero = {name: torch.zeros_like(p) for name, p in params.items()}
        self.before = self._evaluate(zero) if before is None else before

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        return float(run_detached(lambda: self._loss(self._moved(step))))

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        with torch.enable_grad():
            points = self._moved(step)
            value = self._loss(points)
            gradients = torch.autograd.grad(value, list(points.values()), materialize_grads=True)
        return float(value.detach()), dict(zip(points, gradients, strict=True))

    def _moved(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """theta + step as leaves that require a gradient, as in training: a forward pass may differentiate in them."""
        return {name: (p.detach() + step[name]).requires_grad_() for name, p in self.params.items()}

    def _loss(self, params: dict[str, Tensor]) -> Tensor:
        """In units of its mean."""
        outputs = self.pure(params)
        return self.criterion.value(outputs, self.targets) / self.criterion.scale(outputs, self.targets)


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
        with self._moved(step):
            return number(self.closure()) / self.scale

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        with self._moved(step):
            value = number(self.closure()) / self.scale
            gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.params.items()}
            return value, {name: gradient.to_dense() / self.scale for name, gradient in gradients.items()}

    @contextmanager
    def _moved(self, step: dict[str, Tensor]) -> Iterator[None]:
        with self.random.replayed(), self._restored(), torch.enable_grad():
            for name, p in self.params.items():
                p.data.add_(step[name])
            yield

    @contextmanager
    def _restored(self) -> Iterator[None]:
        tensors = list(self.model.buffers()) if isinstance(self.model, nn.Module) else []
        tensors += list(self.params.values())
        values = [t.detach().clone() for t in tensors]
        grads = [None if p.grad is None else p.grad.clone() for p in self.params.values()]
        remembered = dict(vars(self.recall))
        try:
            yield
        finally:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data.copy_(value)
            for p, grad in zip(self.params.values(), grads, strict=True):
                p.grad = grad
            vars(self.recall).update(remembered)


def objective_of(
    model: Any,
    criterion: Callable[[], Criterion],
    recall: Recall,
    params: dict[str, Tensor],
    space: Space,
    closure: Closure | None,
    value: Tensor | None,
    random: RandomState,
    searched: Data | None = None,
) -> Objective | None:
    """The cheapest way to re-evaluate the loss: a replay after `opt.loss`, else the closure, else None."""
    if searched is not None and isinstance(model, nn.Module):
        return Replay(model, criterion(), searched, None, params, space)
    if recall.loss is not None and recall.passed() is not None and isinstance(model, nn.Module):
        return Replay(model, criterion(), recall.whole(), float(recall.loss), params, space)
    if closure is not None and value is not None:
        return Reclose(model, closure, recall, params, space, value, random)
    return None


def number(value: Tensor | float) -> float:
    """A closure's value: a scalar tensor, or a number as LBFGS allows."""
    return float(value.detach() if isinstance(value, Tensor) else value)
