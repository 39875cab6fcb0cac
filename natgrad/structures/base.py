"""How a metric is remembered from step to step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from natgrad.ground.messages import Explained
from natgrad.ground.pure import Holding, RandomState, ScopedValue
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


Exchange = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Solve = Callable[[Callable[[], Tensor], Tensor], Tensor]

Shared = tuple[Exchange | None, Solve | None, Exchange | None]
_SHARED: ScopedValue[Shared] = ScopedValue("natgrad_shared", (None, None, None))


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


def exchanging(
    exchange: Exchange | None, solve: Solve | None = None, add_up: Exchange | None = None
) -> Holding[Shared]:
    """Inside, `exchange_sums`, `solve_once` and `add_up_now` are these.

    Args:
        exchange: This process's sums, by name -> those of all. None: there is one process, or they are added up later.
        solve: A function of totals and a tensor like its result -> the result, computed by one process for all.
        add_up: As exchange, of a few numbers that this process's sums are made with. None: as exchange.
    """
    return _SHARED.holding((exchange, solve, add_up or exchange))


def exchange_sums(fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics that add over examples, added up over the processes; as they are where there is only one."""
    exchange = _SHARED.get()[0]
    return fresh if exchange is None else exchange(fresh)


def add_up_now(numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """A few numbers that add over examples, added up over all processes before this one's statistics are made."""
    add_up = _SHARED.get()[2]
    return numbers if add_up is None else add_up(numbers)


def sums_are_whole() -> Holding[Shared]:
    """Inside, what is summed is that of all processes already; what one of them computes still comes to all."""
    return _SHARED.holding((None, _SHARED.get()[1], None))


def solve_once(make: Callable[[], Tensor], like: Tensor) -> Tensor:
    """What `make` gives, computed by one of the processes for all; here where there is only one.

    like: A tensor of the result's shape and dtype.
    """
    solve = _SHARED.get()[1]
    return make() if solve is None else solve(make, like)
