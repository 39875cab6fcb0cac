"""How a metric is remembered from step to step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from natgrad.ground.messages import Explained
from natgrad.ground.pure import RandomState
from natgrad.ground.spaces import Params
from natgrad.metrics import Metric
from natgrad.operators import Operator

Memory = dict[str, Any]


class Structure(Explained):
    """Turns a metric at a point, and what is remembered, into the operator that is solved with."""

    @abstractmethod
    def update(
        self, memory: Memory | None, metric: Metric, params: Params, inputs: Any, *, random: RandomState | None = None
    ) -> tuple[Operator, Memory]:
        """The operator for this step and the memory for the next.

        Args:
            memory: What the last call returned, None at first. It holds tensors and plain values only, so that a
                checkpoint holds all of it. It is not changed.
            metric: Which G.
            params: The point, by name.
            inputs: The metric's data, as for `Metric.at`.
            random: The random numbers of the pass, for dropout, as for `Metric.at`.

        Returns:
            The operator, of size n, and the memory.
        """

    def kind_of(self, name: str, memory: Memory | None) -> str:
        """What a parameter got at the last update, for reports.

        Args:
            name: The parameter's name.
            memory: What the last call of `update` returned.
        """
        return type(self).__name__

    def count_numbers(self, size: int, total: int) -> int:
        """How many numbers are remembered between steps for one parameter tensor.

        Args:
            size: The number of its entries.
            total: The number of entries of all parameters that are trained.
        """
        return 0


class OperatorStructure(Structure):
    """A structure that needs nothing of a metric but its operator at the point."""

    @abstractmethod
    def average(self, memory: Memory | None, operator: Operator, params: Params) -> tuple[Operator, Memory]:
        """`update` from the metric's operator.

        Args:
            memory: As for `update`.
            operator: G at the point.
            params: The point, by name.
        """

    def update(
        self, memory: Memory | None, metric: Metric, params: Params, inputs: Any, *, random: RandomState | None = None
    ) -> tuple[Operator, Memory]:
        return self.average(memory, metric.at(params, inputs, random=random), params)


# running averages with weights: sum_s decay^(t - s) x_s / sum_s decay^(t - s), kept as a total and its weight


def accumulate_total(before: Tensor | None, fresh: Tensor, decay: float, *, reuse: bool = False) -> Tensor:
    """decay * before + fresh.

    Args:
        before: The total so far; None at first.
        fresh: What is new, in the total's shape.
        decay: Weight of the past, in [0, 1).
        reuse: True to write into the storage of `fresh`.
    """
    if before is None:
        return fresh
    return fresh.add_(before, alpha=decay) if reuse else decay * before + fresh


def accumulate_weight(before: float | None, decay: float, fresh: float = 1.0) -> float:
    """decay * before + fresh: what a total is divided by, to be an average.

    Args:
        before: The weight so far; None at first.
        decay: Weight of the past, in [0, 1).
        fresh: The weight of what is new.
    """
    return fresh if before is None else decay * before + fresh


def average_tensor(memory: Memory | None, fresh: Tensor, decay: float, names: list[str]) -> tuple[Tensor, Memory]:
    """The running average of one tensor over steps, and what to keep of it."""
    if not decay:
        return fresh, {}
    before = memory if memory and memory["names"] == names else {"total": None, "weight": None}
    total = accumulate_total(before["total"], fresh, decay)
    weight = accumulate_weight(before["weight"], decay)
    return total / weight, {"total": total, "weight": weight, "names": names}
