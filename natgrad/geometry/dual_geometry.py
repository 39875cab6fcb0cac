"""The two flat geometries of an exponential family: straight lines, projections, and mirror descent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily, SubModel
from natgrad.geometry.base import require_family
from natgrad.ground.checks import check_positions, check_positive
from natgrad.ground.derivatives import jacobians
from natgrad.ground.linalg import all_finite, is_positive_definite, require_solution, solve_or_nan, symmetrise
from natgrad.ground.pure import leave_autocast

STEPS, CHEAP = 100, 20
"""Steps of the e-projection, and those of them without the third derivatives of psi."""
SETTLED, FLAT = 4096, 64  # of a step and of a value, in units of the dtype's precision
EDGE = "the e-projection ran to the edge of the sub-model, where its metric is singular: give another start"


@leave_autocast
def e_geodesic(family: ExponentialFamily, theta: Tensor, other: Tensor, t: Tensor | float) -> Tensor:
    """(1 - t) theta + t other: the straight line in the natural parameters, log p mixed and normalised.

    From 0 to 1 it stays inside the domain.

    Args:
        family: The exponential family.
        theta: Where it starts, in natural parameters, shape (..., n).
        other: Where it is at t = 1, in natural parameters.
        t: A number, or (T,) for T points along a new first dimension.

    Returns:
        Shape (..., n), or (T, ..., n).

    Example:
        >>> ng.geometry.e_geodesic(ng.Bernoulli(1), torch.tensor([0.0]), torch.tensor([4.0]), 0.5)
        tensor([2.])
    """
    require_family(family).check(theta)
    return _interpolate(theta, family.check(other), t)


@leave_autocast
def m_geodesic(family: ExponentialFamily, theta: Tensor, other: Tensor, t: Tensor | float) -> Tensor:
    """theta of (1 - t) E_theta[T] + t E_other[T]: the straight line in the expectations.

    Args:
        family: The exponential family.
        theta: Where it starts, in natural parameters, shape (..., n).
        other: Where it is at t = 1, in natural parameters.
        t: A number, or (T,) for T points along a new first dimension.

    Returns:
        Shape (..., n), or (T, ..., n).

    Example:
        >>> ng.geometry.m_geodesic(ng.Bernoulli(1), torch.tensor([-1.0]), torch.tensor([1.0]), 0.5)
        tensor([0.])
    """
    return require_family(family).natural(_interpolate(family.expectation(theta), family.expectation(other), t))


def _interpolate(start: Tensor, end: Tensor, t: Tensor | float) -> Tensor:
    if isinstance(t, Tensor) and t.dim():
        t = t.reshape(-1, *(1,) * torch.broadcast_tensors(start, end)[0].dim())
    return start + t * (end - start)


@leave_autocast
def m_projection(sub: SubModel, theta: Tensor) -> Tensor:
    """The theta of the sub-model nearest in KL(whole, sub): it has the same means of its statistics.

    It is unique. For every q of the sub-model KL(p, q) = KL(p, projection) + KL(projection, q): Pythagoras' theorem.

    Args:
        sub: The sub-model.
        theta: Natural parameters of the whole family, shape (..., n).

    Returns:
        The sub-model's natural parameters, shape (..., k).

    Example:
        >>> whole = ng.Ising(2)  # two single variables, and their pair
        >>> sub = ng.SubModel(whole, [0, 1])  # independent variables
        >>> ng.geometry.m_projection(sub, torch.tensor([0.5, 0.0, 1.0])).tanh()  # the means of both
        tensor([0.4621, 0.3519])
    """
    return sub.natural(sub.family.expectation(theta)[..., list(sub.free)])


@leave_autocast
def e_projection(sub: SubModel, theta: Tensor, start: Tensor | None = None) -> Tensor:
    """A theta of the sub-model where KL(sub, whole) is stationary, by steps that descend.

    They are natural gradient steps, and Newton's where twenty of these do not settle. There may be several such points:
    a sub-model is straight in theta, not in the means.

    Args:
        sub: The sub-model.
        theta: Natural parameters of the whole family, shape (..., n).
        start: Where to begin, shape (..., k). None: the m-projection, or theta's own free parameters where its means
            are too near the edge for that.

    Returns:
        The sub-model's natural parameters, shape (..., k).
    """
    point = (_find_start(sub, theta) if start is None else start).detach()
    free, goal, eps = list(sub.free), theta.detach(), torch.finfo(theta.dtype).eps

    def differentiate(at: Tensor) -> Tensor:
        full = sub.whole(at)  # grad KL = I (theta_q - theta_p)
        return (sub.family.covariance(full) @ (full - goal).unsqueeze(-1)).squeeze(-1)[..., free]

    for k in range(STEPS):
        gradient, matrix = differentiate(point).unsqueeze(-1), sub.covariance(point)
        if k >= CHEAP:
            curvature = jacobians(differentiate, point)
            matrix = torch.where(is_positive_definite(symmetrise(curvature))[..., None, None], curvature, matrix)
        step = require_solution(matrix, gradient, EDGE).squeeze(-1)
        if bool((step.abs() <= SETTLED * eps * (1 + point.abs())).all()):
            return point
        point = _descend(sub.inside, lambda q: sub.family.kl(sub.whole(q), goal), point, -step)
    raise ValueError(f"the e-projection did not settle within {STEPS} steps: give another start")


def _find_start(sub: SubModel, theta: Tensor) -> Tensor:
    """The m-projection; theta's own free parameters where that is not reached and they lie inside."""
    try:
        return m_projection(sub, theta)
    except ValueError:
        point = theta[..., list(sub.free)]
        if not bool(sub.inside(point).all()):
            raise
        return point


def _descend(
    inside: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor], point: Tensor, step: Tensor
) -> Tensor:
    """point + step / 2^k for every row, with the least k at which a value, infinite outside, does not rise."""

    def measure(at: Tensor) -> Tensor:
        within = inside(at)
        return torch.where(within, value(torch.where(within.unsqueeze(-1), at, point)), torch.inf)

    before, rate = measure(point), torch.ones_like(point[..., :1])
    for _ in range(60):
        worse = ~(measure(point + rate * step) <= before + FLAT * torch.finfo(before.dtype).eps * (1 + before.abs()))
        if not bool(worse.any()):
            break
        rate = torch.where(worse.unsqueeze(-1), rate / 2, rate)
    return point + rate * step


@leave_autocast
def tilt(family: ExponentialFamily, theta: Tensor, positions: list[int], means: Tensor) -> Tensor:
    """The theta nearest in KL(., theta) among those with E[T_i] = means at the positions: an e-projection.

    theta moves at these positions alone (exponential tilting), by Newton's method on the sub-family. Pythagoras: KL(q,
    theta) = KL(q, found) + KL(found, theta) for every q with these means.

    Args:
        family: The exponential family.
        theta: Natural parameters, shape (..., n).
        positions: i.
        means: E[T_i], shape (..., len(positions)).

    Returns:
        Shape (..., n).

    Raises:
        ValueError: Where the means are not reached.

    Example:
        >>> ng.geometry.tilt(ng.Bernoulli(2), torch.zeros(2), [0], torch.tensor([0.5**0.5]))
        tensor([0.8814, 0.0000])
    """
    require_family(family)
    positions = list(check_positions("positions", positions, family.check(theta).shape[-1]))
    means, batch = means.to(theta), torch.broadcast_shapes(theta.shape[:-1], means.shape[:-1])
    point = theta.detach().expand(*batch, theta.shape[-1]).clone()
    places = torch.tensor(positions, device=theta.device)
    eps = torch.finfo(theta.dtype).eps

    def dual(at: Tensor) -> Tensor:
        """psi - means . theta, which is convex."""
        return family.log_partition(at) - (means * at[..., positions]).sum(-1)

    for _ in range(STEPS):
        gap = means - family.expectation(point)[..., positions]
        block = family.covariance(point)[..., positions, :][..., positions]
        step = solve_or_nan(block, gap.unsqueeze(-1)).squeeze(-1)
        if not all_finite(step):
            break  # theta ran off: the means are on the edge, or beyond
        if bool((step.abs() <= SETTLED * eps * (1 + point[..., positions].abs())).all()):
            return point
        along = torch.zeros_like(point).scatter(-1, places.expand(step.shape), step)
        point = _descend(family.inside, dual, point, along)
    raise ValueError("means are not reached: expected values in the interior of what these statistics' means can be")


@leave_autocast
def mirror_step(
    family: ExponentialFamily, theta: Tensor, gradient: Tensor, rate: float, *, backtracks: int = 0
) -> Tensor:
    """Mirror descent with the mirror map psi: theta' with grad psi(theta') = grad psi(theta) - rate * gradient.

    It minimises <gradient, theta'> + D_psi(theta', theta) / rate, and is the natural gradient step in the *expectation*
    parameters, eta - rate * I_eta^-1 dF/d eta, because I_eta^-1 dF/d eta = dF/d theta; in theta the two steps differ.

    Args:
        family: The exponential family.
        theta: Natural parameters, shape (..., n).
        gradient: dF / d theta, shape (..., n).
        rate: The step length.
        backtracks: How many halvings of the rate (for the whole batch) are allowed, where a long step leaves the means
            that are possible.

    Returns:
        theta', shape (..., n).

    Raises:
        ValueError: If the step leaves the means that are possible.
    """
    check_positive("rate", rate)
    eta = require_family(family).expectation(theta)
    for count in range(backtracks + 1):
        try:
            return family.natural(eta - rate * gradient)
        except ValueError as error:
            if count == backtracks:
                raise ValueError(
                    f"rate {rate:g} leaves the possible means ({error}); lower it or give backtracks"
                ) from error
            rate /= 2
    raise AssertionError
