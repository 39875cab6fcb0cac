"""From expectation to natural coordinates by Newton's method, differentiable to any order."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from natgrad.ground.linalg import all_finite, factor_or_nan, is_concrete, solve_or_nan

NEWTON_STEPS = 100
FLAT_HALVINGS = 3  # so near the maximum Newton's whole step is right, or round-off leaves nothing
EXACT_STEPS = 3  # k steps from a solution have its derivatives up to the order 2^k - 1


class Dual(Protocol):
    """What Newton's method asks of a family."""

    def invert(self, eta: Tensor) -> Tensor: ...
    def log_partition(self, theta: Tensor) -> Tensor: ...
    def expectation(self, theta: Tensor) -> Tensor: ...
    def covariance(self, theta: Tensor) -> Tensor: ...
    def inside(self, theta: Tensor) -> Tensor: ...


def find_natural(family: Dual, eta: Tensor) -> Tensor:
    """The inverse of grad psi at eta (b, n), with its derivatives."""
    if is_concrete(eta):
        return Inversion.apply(eta, family)
    # within torch.func by a few more steps, right to the seventh order: torch takes the derivative of a custom `jvp`
    # for zero where a second forward mode asks for it
    theta = Inversion.apply(eta.detach(), family)
    for _ in range(EXACT_STEPS):
        theta = theta + solve_covariance(family, theta, eta - family.expectation(theta))
    return theta


class Inversion(torch.autograd.Function):
    """eta (b, n) -> theta (b, n), the inverse of grad psi; its derivative is Cov(T)^-1 at theta."""

    @staticmethod
    def forward(eta: Tensor, family: Dual) -> Tensor:
        """What the family finds; by default Newton's method from its guess."""
        with torch.no_grad():
            return family.invert(eta)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps theta, at which the derivatives are taken."""
        ctx.family = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Cov(T)^-1 g."""
        return solve_covariance(ctx.family, ctx.saved_tensors[0], grads[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Cov(T)^-1 d eta."""
        return solve_covariance(ctx.family, ctx.saved_tensors[0], tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], eta: Tensor, family: Dual) -> tuple[Tensor, int]:
        """One more dimension of the batch."""
        many = eta.expand(info.batch_size, *eta.shape) if in_dims[0] is None else eta.movedim(in_dims[0], 0)
        return Inversion.apply(many.flatten(0, 1), family).unflatten(0, many.shape[:2]), 0


def solve_covariance(family: Dual, theta: Tensor, vector: Tensor) -> Tensor:
    """Cov(T)^-1 v for every row; NaN where theta is so near the edge that Cov(T) is singular."""
    return solve_or_nan(family.covariance(theta), vector.unsqueeze(-1)).squeeze(-1)


def maximise_by_newton(family: Dual, eta: Tensor, theta: Tensor) -> Tensor:
    """theta (b, n) that maximises theta . eta - psi(theta), concave, by steps halved until it grows."""
    if not len(eta):
        return theta  # none to find, and no largest residual
    eps = torch.finfo(eta.dtype).eps
    misfit = eta.new_full((), torch.inf)
    for _ in range(NEWTON_STEPS):
        residual, covariance = eta - family.expectation(theta), family.covariance(theta)
        misfit = (residual.abs() / (1 + eta.abs())).amax()
        factor = factor_or_nan(covariance)
        both = torch.stack([residual, 30 * eps * eta.abs()], dim=2)
        step, doubt = torch.cholesky_solve(both, factor).unbind(2)
        if not all_finite(step):
            break
        # on the edge the residual vanishes too, but theta runs off in steps of about one, or round-off decides on it
        width = 1 + theta.abs()
        steady = bool(((step.abs() <= 1e-3 * width) & (doubt.abs() <= 0.1 * width)).all())
        if steady and misfit <= 30 * eps:
            return theta
        moved = search_line(family, eta, theta, step, (residual * step).sum(1), factor)
        if torch.equal(moved, theta):
            # theta rounded in its last digits moves the expectation by Cov(T) |theta| eps: no step gets below that
            rounded = (covariance.abs() @ theta.abs().unsqueeze(2)).squeeze(2)
            if steady and bool((residual.abs() <= 1e3 * eps * (30 * (1 + eta.abs()) + rounded)).all()):
                return theta
            break
        theta = moved
    else:
        if misfit <= 3e4 * eps and steady:
            return theta
    raise ValueError(
        f"eta is not reached: Newton's method left {float(misfit):.2g}; expected means of the statistics of {family!r} "
        "in the interior of what they can be (a mean of 0 or 1 of a bit is on its edge)"
    )


def search_line(family: Dual, eta: Tensor, theta: Tensor, step: Tensor, size: Tensor, factor: Tensor) -> Tensor:
    """theta + step / 2^k for every row, with the least k that is better; size: r^T Cov(T)^-1 r at theta, (b,)."""

    def gain(at: Tensor) -> Tensor:
        return ((at * eta).sum(1) - family.log_partition(at)).nan_to_num(nan=-torch.inf)

    # better is a gain that does not fall; near the maximum, where it is flat to round-off, a smaller r^T Cov(T)^-1 r
    terms = (theta * eta).abs().sum(1) + family.log_partition(theta).abs()
    noise = 10 * torch.finfo(theta.dtype).eps * (1 + terms)
    before, flat = gain(theta), size <= noise
    rate = torch.ones(len(theta), 1, dtype=theta.dtype, device=theta.device)
    for k in range(60):
        trial = theta + rate * step
        inside = family.inside(trial)
        trial = torch.where(inside.unsqueeze(1), trial, theta)
        worse = ~inside | (gain(trial) < before - noise)
        if bool(flat.any()):
            residual = (eta - family.expectation(trial)).unsqueeze(2)
            after = (residual * torch.cholesky_solve(residual, factor)).sum((1, 2))
            worse = torch.where(flat, ~inside | ~(after <= (1 - rate[:, 0] / 2) * size), worse)
        stuck = worse & flat & (k >= FLAT_HALVINGS)
        if not bool((worse & ~stuck).any()):
            break
        rate = torch.where(worse.unsqueeze(1), rate / 2, rate)
    return torch.where(worse.unsqueeze(1), theta, trial)
