"""The metric itself: matrix-free and exact, or as a matrix with a running average."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.ground.checks import check_share
from natgrad.ground.linalg import symmetrise
from natgrad.ground.spaces import Params
from natgrad.operators import DenseOperator, Operator
from natgrad.structures.base import Memory, OperatorStructure, average_tensor


@dataclass(frozen=True)
class Exact(OperatorStructure):
    """G of this step's data, as products. Remembers nothing. Memory: the graph of one forward and backward pass.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> fisher = ng.fisher(model, nn.CrossEntropyLoss())
        >>> opt = ng.NaturalGradient(model, fisher, structure=ng.Exact(), solver=ng.CG())
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    def average(self, memory: Memory | None, operator: Operator, params: Params) -> tuple[Operator, Memory]:
        return operator, {}


@dataclass(frozen=True)
class Dense(OperatorStructure):
    """G as a matrix (n, n), with an exponential running average over steps and bias correction.

    The first batch counts as itself: the average is sum_s decay^(t - s) G_s over sum_s decay^(t - s). Memory: n^2
    numbers.

    Args:
        decay: Weight of the past, in [0, 1); 0 keeps this step's matrix alone.

    Raises:
        ValueError: For a decay outside [0, 1).

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> fisher = ng.fisher(model, nn.CrossEntropyLoss())
        >>> opt = ng.NaturalGradient(model, fisher, structure=ng.Dense(decay=0.9))
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    decay: float = 0.0

    def __post_init__(self) -> None:
        check_share("decay", self.decay)

    def average(self, memory: Memory | None, operator: Operator, params: Params) -> tuple[Operator, Memory]:
        average, state = average_tensor(memory, operator.dense(), self.decay, list(params))
        average = symmetrise(average)  # what was kept in float32 is symmetric to its round-off alone
        return DenseOperator(average, indefinite=operator.indefinite).declare(nats=operator.nats), state

    def count_numbers(self, size: int, total: int) -> int:
        return size * total if self.decay else 0
