"""Blocks of a metric as a rule sees them that shapes the directions of layers: one by one, or as stacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from natgrad.ground.stacks import stack_tensors
from natgrad.operators import Operator


def require_values() -> Tensor:
    """ValueError: a point that was made without its parameters."""
    raise ValueError("this block's parameters are not known: give BlockPoint values=")


@dataclass(frozen=True)
class BlockPoint:
    """What a rule may know of one layer, or of one parameter without a layer, when it shapes its direction.

    Attributes:
        names: The block's parameters; the first is where its numbers are kept.
        kind: What the block got: "Kronecker", "EigenKronecker", ..., "Diagonal" for a parameter without a layer.
        mean: The gradient's running mean as the layer's matrix, (groups, outputs, inputs), a bias as the last column.
        gradient: Makes the step's own gradient in the same shape.
        inverse: (G + damping I)^-1 on the matrix flattened row-major; None where the rule needs none.
        metric: Makes G on the matrix flattened row-major, from today's averages; the rule's `prepare` had it as it was
            inverted, which is mostly what is wanted.
        level: The damping of the block, as it was inverted with.
        shape: Of a parameter without a layer, as the model has it; () for a layer.
        positions: Examples times positions of a step that the layer sees; infinite for a parameter without a layer.
        prepared: What the rule's `prepare` made when the block was inverted.
        memory: What the rule's `shape` returned for this block at the last step, {} at first.
        steps: Steps taken so far.
        values: Makes the parameters in the shape of `mean`.
        renewed: True at the first step after `prepare`.
        examples: Of the step.
        unit: How large the block's outputs must become, at least 1: for a regression's last layers the root of the mean
            squared error in units of two standard deviations of the likelihood.
    """

    names: tuple[str, ...]
    kind: str
    mean: Tensor
    gradient: Callable[[], Tensor]
    inverse: Operator | None
    metric: Callable[[], Operator]
    level: float
    prepared: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    memory: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    steps: int = 0
    positions: float = math.inf
    shape: tuple[int, ...] = ()
    values: Callable[[], Tensor] = field(default_factory=lambda: require_values)
    renewed: bool = False
    examples: float = math.inf
    unit: float = 1.0

    def natural(self) -> Tensor:
        """(G + damping I)^-1 times the mean, in its shape."""
        assert self.inverse is not None
        return self.inverse.mv(self.mean.reshape(-1)).view(self.mean.shape)


@dataclass(frozen=True)
class BlockStack:
    """k blocks whose matrices are alike, as tensors with a leading axis. What was prepared and kept of them is alike.

    Attributes:
        mean: The gradients' running means, shape (k, groups, outputs, inputs).
        gradient: The step's own gradients in the same shape.
        prepared: What the rule's `prepare` made, with a leading axis.
        memory: What the rule returned at the last step, likewise.
        shape: Of parameters without a layer, as the model has them; () for layers.
        units: `BlockPoint.unit` by block.
        steps: Steps taken so far.
        renewed: True at the first step after `prepare`.
        examples: Of the step.
        points: Makes the blocks one by one.
    """

    mean: Tensor
    gradient: Tensor
    prepared: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]
    shape: tuple[int, ...]
    units: Sequence[float]
    steps: int
    renewed: bool
    examples: float
    points: Callable[[], Sequence[BlockPoint]]

    @staticmethod
    def of(points: Sequence[BlockPoint]) -> BlockStack:
        """The stack of blocks that are alike.

        Args:
            points: The blocks.
        """
        first = points[0]
        return BlockStack(
            stack_tensors([point.mean for point in points]),
            stack_tensors([point.gradient().to(point.mean) for point in points]),
            {name: stack_tensors([point.prepared[name] for point in points]) for name in first.prepared},
            {name: stack_tensors([point.memory[name] for point in points]) for name in first.memory},
            first.shape,
            [point.unit for point in points],
            first.steps,
            first.renewed,
            first.examples,
            lambda: points,
        )

    def stack_values(self) -> Tensor:
        """The parameters in the shape of `mean`."""
        return stack_tensors([point.values() for point in self.points()]).to(self.mean)
