"""Potentials of mirror descent: a convex function, its gradient and back, and the regions that a step is kept in."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily
from natgrad.geometry.dual_geometry import mirror_step
from natgrad.ground.checks import check_integer, check_number, check_positive
from natgrad.ground.messages import Explained

HALVINGS = 29
"""How often `LogPartition` halves a step that leaves the means that are possible."""


class Region:
    """A convex set that the steps of mirror descent stay in: `Box`, `Ball`, `ProbabilitySimplex`."""


@dataclass(frozen=True)
class Box(Region):
    """All entries between two numbers.

    Args:
        low: The least value.
        high: The largest value.

    Example:
        >>> ng.geometry.SquaredNorm().project(torch.tensor([-1.0, 0.5]), ng.geometry.Box(0.0, 1.0))
        tensor([0.0000, 0.5000])
    """

    low: float = -torch.inf
    high: float = torch.inf

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}, expected low < high")


@dataclass(frozen=True)
class Ball(Region):
    """Tensors of at most this norm: the 2-norm for `SquaredNorm`, the p-norm for `PNorm(p)`, over all entries.

    Args:
        radius: Positive.
    """

    radius: float

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)


@dataclass(frozen=True)
class ProbabilitySimplex(Region):
    """Entries that are not negative and sum to one along a dimension.

    Args:
        dim: The dimension.

    Example:
        >>> ng.geometry.SquaredNorm().project(torch.tensor([0.8, 0.6, -1.0]), ng.geometry.ProbabilitySimplex())
        tensor([0.6000, 0.4000, 0.0000])
    """

    dim: int = -1

    def __post_init__(self) -> None:
        check_integer("dim", self.dim, -(2**31))


class Potential(Explained):
    """A strictly convex function phi of a parameter: w' = (grad phi)^-1 (grad phi(w) - rate g), nearest in the region.

    That step minimises <g, w'> + D(w', w) / rate over the region, D the Bregman divergence of phi. A potential of your
    own writes `value`, `dual` and `primal`, and `project` where it knows regions.

    Example:
        >>> class Barrier(ng.geometry.Potential):  # phi = -sum log w: w' = w / (1 + rate g w)
        ...     def value(self, point):
        ...         return -point.log().sum()
        ...     def dual(self, point):
        ...         return -1 / point
        ...     def primal(self, dual):
        ...         return -1 / dual
        >>> Barrier().step(torch.tensor([2.0]), torch.tensor([0.5]))
        tensor([1.])
    """

    @abstractmethod
    def value(self, point: Tensor) -> Tensor:
        """phi(w), a scalar.

        Args:
            point: w, any shape.
        """

    @abstractmethod
    def dual(self, point: Tensor) -> Tensor:
        """grad phi(w), in the shape of w.

        Args:
            point: w.
        """

    @abstractmethod
    def primal(self, dual: Tensor) -> Tensor:
        """The w whose gradient of phi is given.

        Args:
            dual: grad phi(w).
        """

    def check(self, point: Tensor, name: str) -> None:
        """ValueError where w is outside of phi's domain. Default: every finite w is inside.

        Args:
            point: w.
            name: What the error message calls it.
        """
        if not bool(torch.isfinite(point.detach()).all()):
            raise ValueError(f"{name} has entries that are not finite")

    def project(self, point: Tensor, region: Region) -> Tensor:
        """The point of a region that is nearest in D(., w).

        Args:
            point: w.
            region: The convex set.

        Raises:
            TypeError: For a region whose nearest points this potential does not know.
        """
        raise TypeError(f"projection is {region!r}, which {self!r} does not know; `project` of your own class may")

    def land(self, dual: Tensor, region: Region | None = None) -> Tensor:
        """`primal`, then `project` where there is a region.

        Args:
            dual: grad phi(w).
            region: The convex set, or None.
        """
        point = self.primal(dual)
        return point if region is None else self.project(point, region)

    def step(self, point: Tensor, change: Tensor, region: Region | None = None) -> Tensor:
        """w', the step of mirror descent.

        Args:
            point: w.
            change: rate g, in the shape of w.
            region: The convex set, or None.
        """
        return self.land(self.dual(point) - change, region)

    def divergence(self, point: Tensor, other: Tensor) -> Tensor:
        """D(w, v) = phi(w) - phi(v) - <grad phi(v), w - v> >= 0, a scalar.

        Args:
            point: w.
            other: v.
        """
        return self.value(point) - self.value(other) - (self.dual(other) * (point - other)).sum()


@dataclass(frozen=True)
class SquaredNorm(Potential):
    """phi = 1/2 |w|^2: gradient descent, and projected gradient descent on every region here."""

    def value(self, point: Tensor) -> Tensor:
        return 0.5 * point.square().sum()

    def dual(self, point: Tensor) -> Tensor:
        return point

    def primal(self, dual: Tensor) -> Tensor:
        return dual

    def project(self, point: Tensor, region: Region) -> Tensor:
        if isinstance(region, Box):
            return point.clamp(region.low, region.high)
        if isinstance(region, Ball):
            return shrink(point, torch.linalg.vector_norm(point), region.radius)
        if isinstance(region, ProbabilitySimplex):
            return project_to_simplex(point, region.dim)
        return super().project(point, region)


@dataclass(frozen=True)
class NegativeEntropy(Potential):
    """phi = sum w log w - w on positive w: exponentiated gradient, w' = w exp(-rate g).

    With `ProbabilitySimplex()` the result is normalised: Kivinen & Warmuth's EG, or multiplicative weights. Entries are
    kept at the smallest normal number of their dtype or above, from where they can grow again.
    """

    def value(self, point: Tensor) -> Tensor:
        return (torch.xlogy(point, point) - point).sum()

    def dual(self, point: Tensor) -> Tensor:
        return point.clamp(min=torch.finfo(point.dtype).tiny).log()

    def primal(self, dual: Tensor) -> Tensor:
        return dual.exp().clamp(min=torch.finfo(dual.dtype).tiny)

    def land(self, dual: Tensor, region: Region | None = None) -> Tensor:
        if isinstance(region, ProbabilitySimplex):  # large exponents cancel
            return dual.softmax(region.dim).clamp(min=torch.finfo(dual.dtype).tiny)
        return super().land(dual, region)

    def check(self, point: Tensor, name: str) -> None:
        super().check(point, name)
        if not bool((point.detach() > 0).all()):
            raise ValueError(
                f"{name} has entries down to {float(point.detach().min()):.4g}, expected positive ones: {self!r} "
                "multiplies them, and zero stays zero"
            )

    def project(self, point: Tensor, region: Region) -> Tensor:
        if isinstance(region, Box):
            if region.high <= 0:
                raise ValueError(f"projection is {region!r}, which has no positive numbers")
            return point.clamp(max(region.low, torch.finfo(point.dtype).tiny), region.high)
        if isinstance(region, ProbabilitySimplex):
            return point / point.sum(region.dim, keepdim=True)
        return super().project(point, region)


@dataclass(frozen=True)
class PNorm(Potential):
    """phi = 1/2 |w|_p^2 over all entries: p = 2 is `SquaredNorm`, p near one is close to exponentiated steps.

    For solutions with few entries out of n that differ from zero, p = 2 log n / (2 log n - 1) has a bound of the order
    log n where gradient descent has n (Gentile 2003). It needs no sign, unlike `NegativeEntropy`.

    Args:
        p: Above one.

    Example:
        >>> ng.geometry.PNorm(1.5).dual(torch.tensor([4.0, 0.0]))
        tensor([4., 0.])
    """

    p: float = 1.5

    def __post_init__(self) -> None:
        check_number("p", self.p)
        if not self.p > 1:
            raise ValueError(f"p is {self.p}, expected a number above 1: at 1 the potential is not strictly convex")

    def value(self, point: Tensor) -> Tensor:
        return 0.5 * torch.linalg.vector_norm(point, self.p).square()

    def dual(self, point: Tensor) -> Tensor:
        return norm_gradient(point, self.p)

    def primal(self, dual: Tensor) -> Tensor:
        return norm_gradient(dual, self.p / (self.p - 1))

    def project(self, point: Tensor, region: Region) -> Tensor:
        if isinstance(region, Ball):
            return shrink(point, torch.linalg.vector_norm(point, self.p), region.radius)
        return super().project(point, region)


@dataclass(frozen=True)
class LogPartition(Potential):
    """phi = psi of an exponential family, the parameters its theta (..., n): eta' = eta - rate dF / d theta.

    This is the natural gradient step in the expectation parameters eta (Raskutti & Mukherjee 2015). A step that leaves
    the means that are possible is halved until it does not.

    Args:
        family: The exponential family.

    Example:
        >>> potential = ng.geometry.LogPartition(ng.Poisson(1))
        >>> potential.step(torch.zeros(1), torch.tensor([0.5])).exp()  # a rate of 1 becomes 1 - .5
        tensor([0.5000])
    """

    family: ExponentialFamily

    def value(self, point: Tensor) -> Tensor:
        return self.family.log_partition(point).sum()

    def dual(self, point: Tensor) -> Tensor:
        return self.family.expectation(point)

    def primal(self, dual: Tensor) -> Tensor:
        return self.family.natural(dual)

    def check(self, point: Tensor, name: str) -> None:
        try:
            self.family.check(point.detach())
        except ValueError as error:
            raise ValueError(f"{name} is no theta of {self.family!r}: {error}") from error

    def step(self, point: Tensor, change: Tensor, region: Region | None = None) -> Tensor:
        if region is not None:
            return self.project(point, region)
        try:
            return mirror_step(self.family, point, change, 1.0, backtracks=HALVINGS)
        except ValueError as error:
            raise ValueError(
                f"no step of {self!r} stays at means that are possible; is the gradient finite?"
            ) from error


def norm_gradient(point: Tensor, p: float) -> Tensor:
    """The gradient of 1/2 |w|_p^2: sign(w_i) (|w_i| / |w|_p)^(p - 1) |w|_p, zero at zero."""
    norm = torch.linalg.vector_norm(point, p)
    safe = torch.where(norm > 0, norm, 1.0)
    return point.sign() * (point.abs() / safe).pow(p - 1) * norm


def shrink(point: Tensor, norm: Tensor, radius: float) -> Tensor:
    """The point scaled to the norm `radius` where it is longer."""
    return point * (radius / norm.clamp(min=radius))


def project_to_simplex(point: Tensor, dim: int) -> Tensor:
    """The nearest probabilities in the 2-norm: max(w - t, 0) with t from the sorted entries."""
    ordered = point.sort(dim, descending=True).values
    counts = torch.ones_like(point).cumsum(dim)
    shifts = (ordered.cumsum(dim) - 1) / counts
    last = (ordered > shifts).sum(dim, keepdim=True).clamp(min=1) - 1
    return (point - shifts.gather(dim, last)).clamp(min=0)


def check_potential(potential: Any, projection: Any) -> None:
    """Refuse what is no potential or no region.

    Args:
        potential: What came for a `Potential`.
        projection: What came for a `Region` or None.

    Raises:
        TypeError: For anything else.
    """
    for name, value, kind in (("potential", potential, Potential), ("projection", projection, Region)):
        if isinstance(value, kind) or (name == "projection" and value is None):
            continue
        hint = "; did you forget the parentheses?" if isinstance(value, type) else ""
        raise TypeError(f"{name} is {value!r}, expected a natgrad.geometry.{kind.__name__}{hint}")
