"""FlowCoordinates of a family in which a flow runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily, Ising
from natgrad.ground.derivatives import jacobians
from natgrad.ground.linalg import invert_or_nan


@dataclass(frozen=True)
class FlowCoordinates:
    """Coordinates xi (..., n) of a family, by the map to its natural parameters.

    Args:
        name: For messages and pictures.
        theta: xi -> natural parameters, both (..., n); differentiable, with batches.
        jacobian: xi -> d theta / d xi, shape (..., n, n), where autograd cannot give it.
        inside: xi -> which points lie in the domain, shape (...) of bool; None asks the family about theta.
    """

    name: str
    theta: Callable[[Tensor], Tensor]
    jacobian: Callable[[Tensor], Tensor] | None = None
    inside: Callable[[Tensor], Tensor] | None = None

    def slope(self, xi: Tensor) -> Tensor:
        """d theta / d xi, shape (..., n, n).

        Args:
            xi: Shape (..., n).
        """
        return jacobians(self.theta, xi) if self.jacobian is None else self.jacobian(xi)


def natural_coordinates(family: ExponentialFamily) -> FlowCoordinates:
    """theta itself.

    Args:
        family: Whose natural parameters.
    """
    return FlowCoordinates(
        "theta", lambda theta: theta, lambda theta: torch.eye(family.size).to(theta).expand(*theta.shape, -1)
    )


def expectation_coordinates(family: ExponentialFamily) -> FlowCoordinates:
    """eta = E[T]; the natural flow in eta is the plain gradient in theta.

    Args:
        family: Whose expectation parameters.
    """

    def inside(eta: Tensor) -> Tensor:
        try:
            family.natural(eta)
        except ValueError:  # of the whole batch: which of the points it is, each tells by itself
            if eta.dim() > 1:
                return torch.stack([inside(each) for each in eta])
            return eta.new_zeros((), dtype=torch.bool)
        return eta.new_ones(eta.shape[:-1], dtype=torch.bool)

    def jacobian(eta: Tensor) -> Tensor:
        return invert_or_nan(family.covariance(family.natural(eta)))

    return FlowCoordinates("eta", family.natural, jacobian, inside)


def probability_coordinates(family: Ising) -> FlowCoordinates:
    """mu_i = P(x_i is the higher value), of an `Ising` of single variables, in their order.

    Args:
        family: An independence model.

    Raises:
        ValueError: If it has cliques of several variables.
    """
    if any(len(clique) != 1 for clique in family.cliques):
        raise ValueError(f"family is {family!r}, expected an independence model: cliques of one variable each")
    width = family.values[1] - family.values[0]

    def jacobian(mu: Tensor) -> Tensor:
        return torch.diag_embed(1 / (mu * (1 - mu)) / width)

    return FlowCoordinates("mu", lambda mu: mu.logit() / width, jacobian, lambda mu: ((mu > 0) & (mu < 1)).all(-1))


def deviation_coordinates() -> FlowCoordinates:
    """(mean, standard deviation) of `MultivariateNormal(1)`."""

    def theta(point: Tensor) -> Tensor:
        mean, deviation = point.unbind(-1)
        return torch.stack([mean / deviation.square(), -0.5 / deviation.square()], dim=-1)

    return FlowCoordinates(
        "mean and deviation", theta, None, lambda point: torch.isfinite(point).all(-1) & (point[..., 1] > 0)
    )
