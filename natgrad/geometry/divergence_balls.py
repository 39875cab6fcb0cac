"""Balls of a divergence: the points where it has a given value, along rays from the centre."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily
from natgrad.geometry.base import require_family
from natgrad.ground.checks import check_integer, check_positive
from natgrad.ground.pure import leave_autocast

DOUBLINGS, BISECTIONS = 200, 100


@leave_autocast
def kl_ball(
    family: ExponentialFamily, theta: Tensor, radius: float, directions: Tensor | int = 100, *, reverse: bool = False
) -> Tensor:
    """The points theta' with KL(theta, theta') = radius, exactly, one along every direction from theta.

    Args:
        family: The exponential family.
        theta: The centre, in natural parameters, shape (n,).
        radius: In nats.
        directions: Shape (m, n), in the natural parameters; or, for n = 2, a number of them, evenly spread over the
            circle.
        reverse: Of KL(theta', theta).

    Returns:
        Shape (m, n). NaN along a direction that never gets there: with `reverse`, and of `InverseGaussian`, whose KL to
        the edge of its domain is finite.

    Example:
        >>> normal = ng.Normal()
        >>> theta = normal.from_mean_std(torch.tensor(0.0), torch.tensor(1.0))
        >>> points = ng.geometry.kl_ball(normal, theta, 0.1, directions=4)
        >>> normal.kl(theta, points)
        tensor([0.1000, 0.1000, 0.1000, 0.1000])
    """

    def divergence(points: Tensor) -> Tensor:
        inside = family.inside(points) & torch.isfinite(points).all(-1)
        safe = torch.where(inside.unsqueeze(-1), points, theta)
        value = family.kl(safe, theta.expand_as(safe)) if reverse else family.kl(theta.expand_as(safe), safe)
        return torch.where(inside, value, torch.inf)

    return level_set(divergence, require_family(family).single(theta, "theta"), radius, directions)


@leave_autocast
def level_set(
    divergence: Callable[[Tensor], Tensor], centre: Tensor, radius: float, directions: Tensor | int = 100
) -> Tensor:
    """The first points on the rays from a centre where a divergence reaches radius.

    By doubling and bisection, to round-off.

    Args:
        divergence: A function of points, (m, n) -> (m,): zero at the centre, growing along the rays, infinite outside
            of where it is defined.
        centre: Shape (n,).
        radius: In the units of the divergence.
        directions: Shape (m, n); or, for n = 2, a number of them, evenly spread over the circle.

    Returns:
        Shape (m, n). NaN where a ray does not get there.
    """
    check_positive("radius", radius, hint=": a positive number of nats")
    if not isinstance(directions, Tensor):
        directions = check_integer("directions", directions, hint=f", or a tensor (m, {len(centre)})")
        if len(centre) != 2:
            raise ValueError(f"directions is a number, which serves 2 dimensions; expected a tensor (m, {len(centre)})")
        angles = torch.linspace(0, 2 * math.pi, directions, dtype=centre.dtype, device=centre.device)
        directions = torch.stack([angles.cos(), angles.sin()], dim=1)  # the last is the first: a line drawn is closed
    if directions.dim() != 2 or directions.shape[1] != len(centre):
        raise ValueError(f"directions have shape {tuple(directions.shape)}, expected (m, {len(centre)})")
    directions = directions.to(centre)
    low, high = directions.new_zeros(len(directions), 1), directions.new_full((len(directions), 1), 1e-6)
    for _ in range(DOUBLINGS):
        short = (divergence(centre + high * directions) < radius).unsqueeze(1)
        if not bool(short.any()):
            break
        low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        short = (divergence(centre + middle * directions) < radius).unsqueeze(1)
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    points = centre + low * directions
    beyond = divergence(centre + high * directions)  # infinite where the ray leaves before it gets there
    reached = torch.isfinite(points).all(1) & torch.isfinite(beyond) & (beyond >= radius)
    return torch.where(reached.unsqueeze(1), points, torch.nan)
