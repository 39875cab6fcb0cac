"""lambda in (G + lambda I)^-1 g: constant, relative to the metric's scale, or adapted to the model's success.

Each class counts in one unit, which its docstring says and which is the same for every optimizer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import Tensor

from natgrad.ground.messages import Explained

Unit = Literal["nats", "loss", "metric", "block"]
UNITS = get_args(Unit)


class Scale(Protocol):
    """What a damping may ask of a metric, or of one of its blocks: an operator, or less than that."""

    @property
    def nats(self) -> float:
        """Nats per example in one unit of d^T G d / 2."""
        ...

    def mean_eigenvalue(self) -> Tensor | float:
        """Trace over n: a scalar tensor, or a number where it was read already."""
        ...


class Damping(Explained):
    """A strategy. What changes between steps is one number, passed in and returned."""

    @property
    def per_block(self) -> bool:
        """Whether every block of the metric has a lambda of its own: `amount` is then asked for each block's operator.

        A metric that is not made of blocks is one block.
        """
        return False

    @property
    def of_whole(self) -> float:
        """The share of the mean eigenvalue over all blocks that is added to each block's own."""
        return 0.0

    @property
    def every(self) -> int | None:
        """Steps between two uses of the reduction ratio; None: what the optimizer's flow has as its default."""
        return None

    @abstractmethod
    def initial(self) -> float:
        """The number at the first step."""

    @property
    def needs_ratio(self) -> bool:
        """Whether `update` uses the reduction ratio, so that the loss must be evaluated after the step."""
        return False

    def predict_change(self, change: float, slope: float) -> float:
        """The predicted change of the loss that the ratio divides by.

        Args:
            change: That of the quadratic model.
            slope: g . d, that of the linear one.
        """
        return change

    def amount(self, damping: float, operator: Scale) -> float:
        """lambda for this operator, from the strategy's number.

        Args:
            damping: The strategy's number.
            operator: The metric, or a block of it: what knows its nats and its mean eigenvalue.
        """
        return damping

    def update(self, damping: float, ratio: float) -> float:
        """The number for the next step.

        Args:
            damping: The number of this step.
            ratio: True over predicted decrease; NaN for a rejected step.
        """
        return damping


@dataclass(frozen=True)
class Constant(Damping):
    """lambda = value / nats, always: in nats per example and squared unit of the parameters.

    `nats` are the nats per example in one unit of the loss, 1 for the mean of a negative log-likelihood. A mean over
    the 784 pixels of an image makes the metric 784 times smaller, and lambda with it.

    Args:
        value: In nats per example and squared unit of the parameters.
        per: "nats"; "loss" counts in the unit of the mean loss instead, lambda = value, as papers do that compare with
            no likelihood.

    Raises:
        ValueError: If the value is negative or not finite, or for another unit.

    Example:
        >>> G = ng.operators.DenseOperator(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        >>> ng.natural_gradient(G, torch.tensor([3.0, 10.0]), damping=ng.Constant(1.0)).value
        tensor([1.0000, 2.0000])
    """

    value: float
    per: Literal["nats", "loss"] = "nats"

    def __post_init__(self) -> None:
        require("value", self.value)
        if self.per not in ("nats", "loss"):
            raise ValueError(f"per is {self.per!r}, expected 'nats' or 'loss'")

    def initial(self) -> float:
        return self.value

    def amount(self, damping: float, operator: Scale) -> float:
        return in_unit(self.per, damping, operator)


@dataclass(frozen=True)
class Relative(Damping):
    """lambda = factor * trace(G) / n, a share of the mean eigenvalue: the same for every scale of the loss.

    The trace is exact for metrics with few outputs per example, else an unbiased estimate with a fixed seed.

    Args:
        factor: A plain number: the share of the mean eigenvalue.
        per: "metric" takes the mean over the whole metric; "block" takes each block's own, so that layers are damped
            alike whatever their scale. A metric that is not made of blocks is one block.
        whole: With "block": this many mean eigenvalues over all blocks are added to each block's own, in
            `ng.kfac` and its like. A block that the loss hardly depends on, behind a layer scale of 1e-6, has hardly
            any damping of its own, and its steps no end.

    Raises:
        ValueError: If factor or whole is negative or not finite, or for another unit.

    Example:
        >>> G = ng.operators.DenseOperator(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        >>> damping = ng.Relative(0.5)  # half of the mean eigenvalue, 3
        >>> damping.amount(damping.initial(), G)
        1.5
    """

    factor: float
    per: Literal["metric", "block"] = "metric"
    whole: float = 0.0

    def __post_init__(self) -> None:
        require("factor", self.factor)
        require("whole", self.whole)
        if self.per not in ("metric", "block"):
            raise ValueError(f"per is {self.per!r}, expected 'metric' or 'block'")

    @property
    def per_block(self) -> bool:
        return self.per == "block"

    @property
    def of_whole(self) -> float:
        return self.whole

    def initial(self) -> float:
        return self.factor

    def amount(self, damping: float, operator: Scale) -> float:
        return in_unit(self.per, damping, operator)


@dataclass(frozen=True)
class LevenbergMarquardt(Damping):
    """Raise lambda where the model promised too much, lower it where it was right.

    ratio < low: lambda * raise_by; ratio > high: lambda * lower_by. A rejected step (NaN) raises. A success never
    raises lambda, and a failure never lowers it.

    Args:
        start: lambda at the first step, at most `ceiling`. One below `floor` is where lambda stays until a failure.
        low: Ratios below it raise lambda.
        high: Ratios above it lower lambda.
        raise_by: Factor above 1.
        lower_by: Factor below 1.
        floor: Successes do not take lambda below it: without one it was seen to run down to 7e-18.
        ceiling: Failures do not take lambda above it.
        linear_model: Predict the decrease by g . d alone, as eq. 30 of Pascanu & Bengio does. With an exact solve on
            a quadratic that ratio is 1 - lr / 2 and not 1, and with these thresholds and lr >= 1/2 lambda is never
            lowered; kept for replication.
        per: The unit of `start`, `floor` and `ceiling`: "nats" per example and squared unit of the parameters, as in
            `Constant`; "metric" or "block", shares of the mean eigenvalue, as in `Relative`; "loss", the unit of the
            mean loss, as in papers that compare with no likelihood.
        every: Steps between two looks at the ratio; None: 1 for `ng.NaturalGradient`, whose solve is the dearer part,
            5 for `ng.kfac` and its like (Martens & Grosse 2015, section 6.5).

    Raises:
        ValueError: For numbers that contradict each other: `ceiling` below `floor` or `start`, `low` not below `high`;
            for an unknown unit, or `every` below 1.

    Reference:
        Martens 2010, section 4.1.

    Example:
        >>> damping = ng.LevenbergMarquardt(start=1.0)
        >>> damping.update(1.0, ratio=0.1), damping.update(1.0, ratio=0.5)  # promised too much; about right
        (1.5, 1.0)
    """

    start: float = 1.0
    low: float = 0.25
    high: float = 0.75
    raise_by: float = 1.5
    lower_by: float = 2 / 3
    floor: float = 1e-4
    ceiling: float = 1e8
    linear_model: bool = False
    per: Unit = "nats"
    every: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride] (a field for a property)

    def __post_init__(self) -> None:
        require("start", self.start)
        require("floor", self.floor)
        if self.per not in UNITS:
            raise ValueError(f"per is {self.per!r}, expected one of {UNITS}")
        if self.every is not None and not (isinstance(self.every, int) and self.every >= 1):
            raise ValueError(f"every is {self.every}, expected a number of steps >= 1, or None")
        if not self.floor <= self.ceiling:
            raise ValueError(f"floor is {self.floor} and ceiling is {self.ceiling}, expected floor <= ceiling")
        if not self.start <= self.ceiling:
            raise ValueError(
                f"start is {self.start}, above the ceiling {self.ceiling} that damping never rises over: lower start, "
                "or raise ceiling"
            )
        if not self.low < self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}, expected low < high")
        if not (self.raise_by > 1 and 0 < self.lower_by < 1):
            raise ValueError(
                f"raise_by is {self.raise_by} and lower_by is {self.lower_by}, expected raise_by > 1 > lower_by > 0"
            )

    def initial(self) -> float:
        return self.start

    def amount(self, damping: float, operator: Scale) -> float:
        return in_unit(self.per, damping, operator)

    @property
    def per_block(self) -> bool:
        return self.per == "block"

    @property
    def needs_ratio(self) -> bool:
        return True

    def predict_change(self, change: float, slope: float) -> float:
        return slope if self.linear_model else change

    def update(self, damping: float, ratio: float) -> float:
        # a damping outside of the bounds, from `start` or set by hand, is not pulled inside against the ratio
        if math.isnan(ratio) or ratio < self.low:
            # from lambda = 0 a product never rises: start from the floor
            raised = damping * self.raise_by if damping > 0 else self.floor or type(self).floor
            return max(damping, min(raised, self.ceiling))
        if ratio > self.high:
            return min(damping, max(damping * self.lower_by, self.floor))
        return damping


def in_unit(unit: Unit, number: float, operator: Scale) -> float:
    """lambda for an operator, from a number in one of the units."""
    if unit == "nats":
        return number / operator.nats
    return number if unit == "loss" else number * float(operator.mean_eigenvalue())


def require(name: str, value: float) -> None:
    """ValueError unless value is a finite number >= 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}, expected a finite number >= 0: damping keeps the metric positive")


def as_damping(damping: float | Damping) -> Damping:
    """A number as `Constant`, in nats.

    Args:
        damping: A number, or a strategy, which is returned.

    Raises:
        TypeError: For anything else.
        ValueError: For a number below 0.
    """
    if isinstance(damping, Damping):
        return damping
    if not isinstance(damping, (int, float)):
        hint = "; did you forget the parentheses?" if isinstance(damping, type) else ""
        raise TypeError(f"damping is {damping!r}, expected a number >= 0 or a strategy such as ng.Relative(1e-3){hint}")
    require("damping", damping)
    return Constant(float(damping))
