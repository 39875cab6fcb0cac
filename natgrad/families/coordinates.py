"""Other names for the same distributions: coordinates, their Fisher matrices, and how vectors change with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.families.closed_forms import Closed
from natgrad.families.exponential import ExponentialFamily, say_singular
from natgrad.lapack import require_solution
from natgrad.operators import Operator


class Coordinates(ABC):
    """Coordinates xi (..., n) of a family's distributions, one to one with its natural parameters theta (..., n).

    A subclass writes `natural` (xi -> theta) and `of` (theta -> xi), both differentiable; it overrides what it knows in
    closed form. Vectors are velocities (d xi / dt: steps, natural gradients), covectors are derivatives (dF / d xi).
    """

    family: ExponentialFamily

    @abstractmethod
    def natural(self, xi: Tensor) -> Tensor:
        """theta of xi."""

    @abstractmethod
    def of(self, theta: Tensor) -> Tensor:
        """xi of theta."""

    def fisher(self, xi: Tensor) -> Operator:
        """J^T I_theta J with J = d theta / d xi, at xi (n,): by products, no matrix is formed beside the family's own.

        Its inverse is J^-1 I_theta^-1 J^-T where the family's has a closed form.
        """
        theta = self.natural(self.single(xi)).detach()
        inner = self.family.fisher(theta)
        back = inner.inverse(0.0)
        forward, backward = Change.at(self.natural, xi.detach()), Change.at(self.of, theta)
        return Closed(
            xi,
            lambda v: forward.pull(_rows(inner, forward.push(v))),
            None if back is None else lambda v: backward.push(_rows(back, backward.pull(v))),
        )

    def covariance(self, xi: Tensor) -> Tensor:
        """The Fisher matrix in xi as matrices, (..., n) -> (..., n, n), with gradients."""
        flat = xi.reshape(-1, xi.shape[-1])
        jacobian = torch.func.vmap(torch.func.jacrev(self.natural))(flat)
        found = jacobian.mT @ self.family.covariance(self.natural(flat)) @ jacobian
        return found.view(*xi.shape, xi.shape[-1])

    def vector_to_natural(self, xi: Tensor, vector: Tensor) -> Tensor:
        """d theta = J d xi at xi (..., n)."""
        return Change.at(self.natural, xi).push(vector)

    def vector_from_natural(self, xi: Tensor, vector: Tensor) -> Tensor:
        """d xi = J^-1 d theta at xi (..., n)."""
        return Change.at(self.of, self.natural(xi)).push(vector)

    def covector_from_natural(self, xi: Tensor, covector: Tensor) -> Tensor:
        """dF / d xi = J^T dF / d theta at xi (..., n)."""
        return Change.at(self.natural, xi).pull(covector)

    def covector_to_natural(self, xi: Tensor, covector: Tensor) -> Tensor:
        """dF / d theta = J^-T dF / d xi at xi (..., n)."""
        return Change.at(self.of, self.natural(xi)).pull(covector)

    def natural_gradient(self, xi: Tensor, gradient: Tensor) -> Tensor:
        """I_xi^-1 dF / d xi at xi (n,): the same direction in every system of coordinates."""
        fisher = self.fisher(xi)
        inverse = fisher.inverse(0.0)
        if inverse is not None:
            return inverse @ gradient
        return require_solution(fisher.dense(), gradient, say_singular(self.family))

    def single(self, xi: Tensor) -> Tensor:
        """xi as it is. ValueError unless its shape is (n,)."""
        if not isinstance(xi, Tensor) or not xi.is_floating_point() or xi.dim() != 1:
            came = f"has shape {tuple(xi.shape)}, {xi.dtype}" if isinstance(xi, Tensor) else f"is {type(xi).__name__}"
            raise ValueError(
                f"xi {came}, expected a floating-point tensor (n,): an operator is that of one distribution"
            )
        return xi

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.family!r})"


class Change:
    """The derivative of a map of coordinates at a point (..., n), row by row: J v, and J^T v."""

    def __init__(self, push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor]) -> None:
        self.push, self.pull = push, pull

    @classmethod
    def at(cls, change: Callable[[Tensor], Tensor], point: Tensor) -> Change:
        """Of change, (..., n) -> (..., m), a function of every row by itself; more rows of v than points: batches."""

        def spread(v: Tensor) -> Tensor:
            return point.expand(*v.shape[: v.dim() - point.dim()], *point.shape)

        def push(v: Tensor) -> Tensor:
            # J v is linear in v: the derivative of J^T u in u, which spares forward rules that some operations lack
            at = spread(v)
            found = torch.func.vjp(change, at)
            return torch.func.vjp(lambda u: found[1](u)[0], torch.zeros_like(found[0]))[1](v)[0]

        def pull(u: Tensor) -> Tensor:
            return torch.func.vjp(change, spread(u))[1](u)[0]

        return cls(push, pull)


class Natural(Coordinates):
    """theta itself."""

    def __init__(self, family: ExponentialFamily) -> None:
        self.family = family

    def natural(self, xi: Tensor) -> Tensor:
        return self.family.check(xi)

    def of(self, theta: Tensor) -> Tensor:
        return self.family.check(theta)

    def fisher(self, xi: Tensor) -> Operator:
        return self.family.fisher(self.single(xi))


class Expectation(Coordinates):
    """eta = E[T]: probabilities of bits and classes, rates of counts, means of x and its products."""

    def __init__(self, family: ExponentialFamily) -> None:
        self.family = family

    def natural(self, xi: Tensor) -> Tensor:
        return self.family.natural(xi)

    def of(self, theta: Tensor) -> Tensor:
        return self.family.expectation(theta)

    def fisher(self, xi: Tensor) -> Operator:
        return self.family.fisher_expectation(self.single(xi))


class Mapped(Coordinates):
    """Coordinates by two functions of your own: natural(xi) -> theta and of(theta) -> xi, (..., n) each."""

    def __init__(
        self, family: ExponentialFamily, natural: Callable[[Tensor], Tensor], of: Callable[[Tensor], Tensor]
    ) -> None:
        self.family, self._natural, self._of = family, natural, of

    def natural(self, xi: Tensor) -> Tensor:
        return self._natural(xi)

    def of(self, theta: Tensor) -> Tensor:
        return self._of(theta)


def convert(xi: Tensor, source: Coordinates, target: Coordinates) -> Tensor:
    """The same distributions in other coordinates, (..., n) -> (..., n)."""
    return target.of(source.natural(xi))


def convert_vector(xi: Tensor, vector: Tensor, source: Coordinates, target: Coordinates) -> Tensor:
    """The same velocity at source's xi (..., n) in other coordinates: d xi' = (d xi' / d xi) d xi."""
    return Change.at(lambda at: convert(at, source, target), xi).push(vector)


def convert_covector(xi: Tensor, covector: Tensor, source: Coordinates, target: Coordinates) -> Tensor:
    """The same derivative at source's xi (..., n) in other coordinates: dF / d xi' = (d xi / d xi')^T dF / d xi."""
    return Change.at(lambda at: convert(at, target, source), convert(xi, source, target)).pull(covector)


def fisher_in(
    family: ExponentialFamily,
    natural: Callable[[Tensor], Tensor],
    xi: Tensor,
    of: Callable[[Tensor], Tensor] | None = None,
) -> Operator:
    """J^T I_theta J of any differentiable map natural: xi (m,) -> theta (n,), m <= n too: a curved sub-family.

    of: the inverse map, if it has one: then the operator's inverse is closed where the family's is.
    """
    if of is not None:
        return Mapped(family, natural, of).fisher(xi)
    inner = family.fisher(natural(xi.detach()).detach())
    change = Change.at(natural, xi.detach())
    return Closed(xi, lambda v: change.pull(_rows(inner, change.push(v))))


def _rows(operator: Operator, vectors: Tensor) -> Tensor:
    """G v for every row of v (..., n)."""
    flat = vectors.reshape(-1, vectors.shape[-1])
    return operator.mm(flat.mT).mT.reshape(vectors.shape)
