"""How a metric is remembered from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from natgrad.metrics import Metric
from natgrad.operators import Operator
from natgrad.pure import RandomState
from natgrad.spaces import Params

Memory = dict[str, Any]


class Structure(ABC):
    """Turns a metric at a point, and what is remembered, into the operator that is solved with."""

    @abstractmethod
    def update(
        self, memory: Memory | None, metric: Metric, params: Params, inputs: Any, *, random: RandomState | None = None
    ) -> tuple[Operator, Memory]:
        """The operator for this step and the memory for the next.

        memory: what the last call returned, None at first; tensors and plain values only, so that a checkpoint
        holds all of it. params, inputs, random: as for `Metric.at`. The memory passed in is not changed.
        """

    def kind_of(self, name: str, memory: Memory | None) -> str:
        """What a parameter got at the last update, for reports."""
        return type(self).__name__

    def held(self, size: int, total: int) -> int:
        """How many numbers are remembered between steps for a parameter of `size` entries, `total` being trained."""
        return 0
