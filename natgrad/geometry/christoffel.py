"""The right side of the geodesic equation of an exponential family: its Christoffel symbols, contracted."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.derivatives import exact_derivatives
from natgrad.families import ExponentialFamily
from natgrad.lapack import solve_or_nan

FEW = 8
"""Statistics of a family whose matrix of second derivatives is taken column by column."""


def contract_christoffel(
    family: ExponentialFamily, point: Tensor, speed: Tensor, vectors: tuple[Tensor, ...]
) -> list[Tensor]:
    """-1/2 I^-1 (D_speed I) v for every v.

    Args:
        family: Whose Fisher matrix is I.
        point: Natural parameters, shape (b, n).
        speed: Shape (b, n).
        vectors: Shape (b, n) each.

    Returns:
        As many as there are vectors; NaN on the edge, where the metric is singular: as good as outside.
    """
    with exact_derivatives():  # of a psi with a determinant inside, torch's own are wrong
        metric, turned = turn_metric(family, point, speed, torch.stack(vectors, dim=-1))
    return list((-solve_or_nan(metric, turned) / 2).unbind(-1))


def turn_metric(family: ExponentialFamily, point: Tensor, speed: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """I, and (D_speed I) v for the columns v, from I where it is closed, else from derivatives of psi."""
    if type(family).covariance is not ExponentialFamily.covariance:
        metric, moved, *_ = torch.func.jvp(family.covariance, (point,), (speed,))
        return metric, moved @ vectors
    if family.size > FEW:
        return turn_large_metric(family, point, speed, vectors)
    metric, pull, *_ = torch.func.vjp(lambda theta: differentiate_twice(family, theta), point)
    turned = [pull(speed.unsqueeze(-1) * v.unsqueeze(-2))[0] for v in vectors.unbind(-1)]
    return metric, torch.stack(turned, dim=-1)


def differentiate_twice(family: ExponentialFamily, point: Tensor) -> Tensor:
    """I by a backward pass per column: for few statistics cheaper than batched transforms."""
    _, pull, *_ = torch.func.vjp(torch.func.grad(lambda theta: family.log_partition(theta).sum()), point)
    units = torch.eye(family.size, dtype=point.dtype, device=point.device)
    return torch.stack([pull(unit.expand_as(point))[0] for unit in units], dim=-1)


def turn_large_metric(
    family: ExponentialFamily, point: Tensor, speed: Tensor, vectors: Tensor
) -> tuple[Tensor, Tensor]:
    """As `turn_metric`: third derivatives of psi as the gradient of its second ones, with no matrix but I."""
    psi, jvp = family.log_partition, torch.func.jvp
    metric = family.covariance(point)  # first: a family may build its tables now, not inside a derivative

    def second(at: Tensor, v: Tensor) -> Tensor:
        return jvp(lambda t: jvp(psi, (t,), (v,))[1], (at,), (speed,))[1].sum()

    turned = [torch.func.grad(second)(point, v) for v in vectors.unbind(-1)]
    return metric, torch.stack(turned, dim=-1)
