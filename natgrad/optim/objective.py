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
from natgrad.optim.recall import Recall
from natgrad.pure import PureModel, RandomState
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
            value = self._evaluate(self.space.unflatten(vector))
            self._last = vector, value if math.isfinite(value) else math.nan
        return self._last[1]

    @abstractmethod
    def _evaluate(self, step: dict[str, Tensor]) -> float:
        """The loss at theta + step."""


class Replay(Objective):
    """The remembered pass again, as a pure function: nothing of the user's moves."""

    def __init__(
        self, model: nn.Module, criterion: Criterion, recall: Recall, params: dict[str, Tensor], space: Space
    ) -> None:
        last = recall.passed()
        assert last is not None
        assert recall.loss is not None
        super().__init__(params, space, float(recall.loss))
        self.pure = PureModel(model, last.call, last.random)
        self.criterion, self.targets, self.scale = criterion, recall.targets, recall.last_scale

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        with torch.no_grad():
            outputs = self.pure({name: p + step[name] for name, p in self.params.items()})
            return float(self.criterion.value(outputs, self.targets)) / self.scale


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
        with self.random.replayed(), self._restored(), torch.enable_grad():
            for name, p in self.params.items():
                p.data.add_(step[name])
            return number(self.closure()) / self.scale

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
) -> Objective | None:
    """The cheapest way to re-evaluate the loss: a replay after `opt.loss`, else the closure, else None."""
    if recall.loss is not None and recall.passed() is not None and isinstance(model, nn.Module):
        return Replay(model, criterion(), recall, params, space)
    if closure is not None and value is not None:
        return Reclose(model, closure, recall, params, space, value, random)
    return None


def number(value: Tensor | float) -> float:
    """A closure's value: a scalar tensor, or a number as LBFGS allows."""
    return float(value.detach() if isinstance(value, Tensor) else value)
