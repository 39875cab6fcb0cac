"""lambda in (G + lambda I)^-1 g: constant, relative to the metric's scale, or adapted to the model's success."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from natgrad.operators import Operator


class Damping(ABC):
    """A strategy. What changes between steps is one number, passed in and returned."""

    @abstractmethod
    def initial(self) -> float:
        """The number at the first step."""

    @property
    def needs_ratio(self) -> bool:
        """Whether `update` uses the reduction ratio, so that the loss must be evaluated after the step."""
        return False

    def predicted(self, change: float, slope: float) -> float:
        """The predicted change of the loss that the ratio divides by. change: quadratic model, slope: g . d."""
        return change

    def amount(self, damping: float, operator: Operator) -> float:
        """lambda for this operator, from the strategy's number."""
        return damping

    def update(self, damping: float, ratio: float) -> float:
        """The number for the next step. ratio: true over predicted decrease; NaN for a rejected step."""
        return damping


@dataclass(frozen=True)
class Constant(Damping):
    """lambda = value, always. ValueError if negative or not finite."""

    value: float

    def __post_init__(self) -> None:
        require("value", self.value)

    def initial(self) -> float:
        return self.value


@dataclass(frozen=True)
class Relative(Damping):
    """lambda = factor * trace(G) / n: the same for every scale of the loss, and for every width of a layer.

    The trace is exact for metrics with few outputs per example, else an unbiased estimate with a fixed seed.
    ValueError if factor is negative or not finite.
    """

    factor: float

    def __post_init__(self) -> None:
        require("factor", self.factor)

    def initial(self) -> float:
        return self.factor

    def amount(self, damping: float, operator: Operator) -> float:
        return damping * float(operator.mean_eigenvalue())


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
        per_example: Count damping in nats per example, lambda = damping / operator.nats, instead of in units of the
            mean loss: a mean over the 784 pixels of an image makes the metric 784 times smaller, and 1.0 would drown
            it.

    Raises:
        ValueError: For numbers that contradict each other: `ceiling` below `floor` or `start`, `low` not below `high`.

    Reference:
        Martens 2010, section 4.1.
    """

    start: float = 1.0
    low: float = 0.25
    high: float = 0.75
    raise_by: float = 1.5
    lower_by: float = 2 / 3
    floor: float = 1e-4
    ceiling: float = 1e8
    linear_model: bool = False
    per_example: bool = False

    def __post_init__(self) -> None:
        require("start", self.start)
        require("floor", self.floor)
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

    def amount(self, damping: float, operator: Operator) -> float:
        return damping / operator.nats if self.per_example else damping

    @property
    def needs_ratio(self) -> bool:
        return True

    def predicted(self, change: float, slope: float) -> float:
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


def require(name: str, value: float) -> None:
    """ValueError unless value is a finite number >= 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}, expected a finite number >= 0: damping keeps the metric positive")


def as_damping(damping: float | Damping) -> Damping:
    """A number as `Constant`. TypeError for anything else, ValueError for a number below 0."""
    if isinstance(damping, Damping):
        return damping
    if not isinstance(damping, (int, float)):
        hint = "; did you forget the parentheses?" if isinstance(damping, type) else ""
        raise TypeError(f"damping is {damping!r}, expected a number >= 0 or a strategy such as ng.Relative(1e-3){hint}")
    require("damping", damping)
    return Constant(float(damping))
