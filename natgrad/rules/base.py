"""What every rule is: from the quadratic model of the loss to a step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from natgrad.ground.messages import Explained
from natgrad.ground.stacks import stack_tensors
from natgrad.operators import Operator
from natgrad.rules.quadratic import Memory, Quadratic, Step, Vector

# blocks of a metric as a rule sees them that shapes the directions of layers: one by one, or as stacks


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


class ShapedStack(NamedTuple):
    """The directions of k blocks that are alike.

    Attributes:
        directions: Shape (k, groups, outputs, inputs).
        memory: What to remember of the blocks: tensors with a leading axis, or one mapping for each block.
        lengths: What each block's direction is multiplied by; (): 1.
        slopes: g . d of each block at that length and a learning rate of 1; (): nobody asked.
    """

    directions: Tensor
    memory: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
    lengths: Sequence[float] = ()
    slopes: Sequence[float] = ()


Objective = Callable[[Vector], float]


class Rule(Explained):
    """From the quadratic model of the loss to a step. Frozen: what changes between steps is passed in and returned.

    A rule supplies `step`. One that shapes the directions of layers, for `ng.kfac` and its like, also has `shape`, and
    `prepare` where that needs more of a block's metric than its damped inverse.
    """

    needs_form: ClassVar[bool] = True
    """False if the rule never asks for `Quadratic.kl` or another form along a step: nothing is measured then."""

    @property
    def needs_loss(self) -> bool:
        """Whether the rule re-evaluates the loss at trial points."""
        return False

    @property
    def uses_loss(self) -> bool:
        """Whether the rule looks at the loss at trial points where it can be had."""
        return self.needs_loss

    def measures(self, turned: bool) -> bool:
        """Whether the metric along a step is measured on passes.

        Args:
            turned: Whether steps have the rule's own directions, for a rule that turns to them.
        """
        return self.needs_form

    @property
    def shapes(self) -> bool:
        """Whether the rule makes directions of its own."""
        return type(self).shape is not Rule.shape

    @property
    def needs_inverse(self) -> bool:
        """Whether its directions are made of `block.inverse`: not those that moments of inputs were prepared for."""
        return type(self).prepare_inputs is Rule.prepare_inputs

    @property
    def turns_at(self) -> float | None:
        """The share of signal in gradients below which `shape` takes over; 0: never, None: from the start."""
        return None

    def turns_after(self, model: Quadratic) -> bool:
        """Whether `shape` takes over from the next step on, as the step says that was just made of this model.

        Args:
            model: With the cuts that the step had. Only asked of a rule that has not turned yet.
        """
        return False

    @property
    def options(self) -> dict[str, float]:
        """Settings that a parameter group may change, by name; `Quadratic.options` has the least over the groups."""
        return {}

    def rate_after(self, steps: int) -> float:
        """The factor on the learning rate of a step with a direction of the rule's own: 1 where it does not fall.

        Args:
            steps: With such directions so far.
        """
        return 1.0

    def rate_at(self, step: int, turned: int) -> float:
        """The factor on the learning rate of a step, 1 for a rule that has not turned to its own directions yet.

        Args:
            step: Steps taken before it.
            turned: The step at which the rule turned, -1 before; not asked for where `turns_at` is None.
        """
        if self.turns_at is None:
            return self.rate_after(step)
        return self.rate_after(step - turned) if turned >= 0 else 1.0

    @abstractmethod
    def step(self, model: Quadratic, loss_at: Objective | None, memory: Memory) -> tuple[Step, Memory]:
        """The step and the memory for the next.

        Args:
            model: The quadratic model with its proposal.
            loss_at: d -> loss(theta + d), NaN where it is not finite; None if the loss cannot be re-evaluated.
            memory: Vectors by name, empty at first: flat ones (n,), or `Parts`.
        """

    def prepare(self, metric: Operator, level: float) -> dict[str, Tensor]:
        """What `shape` needs of a block's metric until the next inversion, such as the roots of its factors.

        Called when a block is inverted. Tensors by name: they are kept in the optimizer's state, and saved.

        Args:
            metric: G of the block, on its matrix flattened row-major: a `KroneckerOperator` (`.left`, `.right`), a
                `Spectral` (`.eigen`, `.spectrum`), a `Tiled` of either, `Units`, or a `DiagonalOperator`.
            level: The damping of the block.
        """
        return {}

    def prepare_inputs(self, moment: Tensor, tokens: bool, positions: float) -> dict[str, Tensor] | None:
        """What `shape` needs of the second moment A of a layer's inputs; None, the default: `prepare` is called.

        A rule that supplies it, and measures nothing, needs no derivatives: they are read no more.

        Args:
            moment: A, shape (n, n), or a diagonal (n,); (k, n, n) for the groups of a layer and for layers that are
                alike, of each of which the tensors that are returned have a row.
            tokens: True for an embedding, whose A has the frequencies of the tokens (n,).
            positions: Examples times positions of a step that the layer sees; infinite where nobody knows.
        """
        return None

    def reads_inputs(self, turned: bool) -> bool:
        """Whether directions of the rule's own need nothing of a metric but the moments of layers' inputs.

        Args:
            turned: As for `measures`.
        """
        return type(self).prepare_inputs is not Rule.prepare_inputs and not self.measures(turned)

    def shape(self, block: BlockPoint) -> tuple[Tensor, dict[str, Tensor]]:
        """The block's direction, in the shape of `block.mean`, and the block's memory for the next step.

        The step goes against it. Default: the damped inverse times the gradient's running mean.

        Args:
            block: What is known of the block.
        """
        return block.natural(), {}

    def shape_stacks(self, stacks: Sequence[BlockStack]) -> Sequence[ShapedStack]:
        """`shape` of every block of a step, stack by stack. This is what is called.

        Args:
            stacks: All blocks that this process holds, those that are alike together.
        """
        shaped = [[self.shape(point) for point in stack.points()] for stack in stacks]
        return [ShapedStack(stack_tensors([d for d, _ in pairs]), [each for _, each in pairs]) for pairs in shaped]


def require_loss(rule: Rule, loss_at: Objective | None) -> None:
    """ValueError where a rule needs the loss at trial points and it cannot be had.

    Args:
        rule: Who needs it.
        loss_at: The loss at trial points; None where it cannot be had.
    """
    if rule.needs_loss and loss_at is None:
        raise ValueError(
            f"{rule} re-evaluates the loss: call optimizer.step(closure), or compute the loss with optimizer.loss(...)"
        )
