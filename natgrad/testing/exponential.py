"""Exponential families: statistics, log-partition, coordinates, Fisher, divergence and draws speak of one family."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily
from natgrad.testing.operators import check_operator
from natgrad.testing.requirements import (
    require,
    require_close,
    require_mean,
    require_raises,
    require_untouched,
    tolerance,
)


def check_exponential_family(
    family: ExponentialFamily, theta: Tensor, *, samples: int = 20_000, rtol: float | None = None
) -> None:
    """A family has the properties of exponential families at two natural parameters.

    Exactly: expectation = grad psi, covariance = Hess psi = fisher, natural undoes expectation, KL is the Bregman
    divergence of psi, the Fisher matrix in the expectation parameters is the inverse, batches are rows, gradients flow
    through `natural`. By draws, within six standard errors: E[T] = eta, Cov(T) = fisher, E[log p - log q] = KL, -E[log
    p] = entropy.

    Args:
        family: With n linearly independent statistics.
        theta: Two natural parameters inside the domain, shape (2, n).
        samples: Number of draws.
        rtol: Allowed relative error, default 1e4 eps of theta's dtype. `natural` may be off by its square root.

    Raises:
        AssertionError: With a sentence, for a property that does not hold.

    Example:
        >>> from natgrad.testing import check_exponential_family
        >>> theta = torch.tensor([[0.3, -1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> check_exponential_family(ng.Bernoulli(2), theta, samples=2000)
    """
    require(theta.dim() == 2 and len(theta) == 2, f"theta has shape {tuple(theta.shape)}, expected (2, n): two points")
    theta, rtol = theta.detach(), tolerance(rtol, theta.dtype)
    with require_untouched({"theta": theta}, None, "family"):
        _require_derivatives(family, theta, rtol)
        _require_coordinates(family, theta, rtol)
        _require_divergence(family, theta, rtol)
        _require_draws(family, theta, samples)
        require_raises("theta of integers", lambda: family.expectation(torch.ones_like(theta, dtype=torch.long)))


def _require_derivatives(family: ExponentialFamily, theta: Tensor, rtol: float) -> None:
    psi = family.log_partition(theta)
    require(psi.shape == (2,), f"family.log_partition(theta) has shape {tuple(psi.shape)}, expected (2,)")
    alone = torch.stack([family.log_partition(point) for point in theta])
    require_close("family.log_partition of a batch against one by one", psi, alone, rtol)
    with torch.enable_grad():
        slope = torch.func.vmap(torch.func.grad(family.log_partition))(theta)
        bend = torch.func.vmap(torch.func.jacrev(torch.func.grad(family.log_partition)))(theta)
    require_close("family.expectation(theta) against grad psi", family.expectation(theta), slope, rtol)
    require_close("family.covariance(theta) against Hess psi", family.covariance(theta), bend, rtol)
    for point, matrix in zip(theta, bend, strict=True):
        check_operator(family.fisher(point), rtol=rtol)
        require_close("family.fisher(theta) against Hess psi", family.fisher(point).dense(), matrix, rtol)


def _require_coordinates(family: ExponentialFamily, theta: Tensor, rtol: float) -> None:
    eta = family.expectation(theta)
    root = rtol**0.5
    require_close("family.natural(family.expectation(theta))", family.natural(eta), theta, root, 1 + theta.abs().max())
    legendre = family.conjugate(eta) + family.log_partition(theta) - (theta * eta).sum(-1)
    require_close("phi(eta) + psi(theta) - theta . eta", legendre, torch.zeros_like(legendre), root, 1.0)
    for point, mean in zip(theta, eta, strict=True):
        matrix = family.fisher(point).dense()
        unit = torch.eye(len(point), dtype=point.dtype, device=point.device)
        require_close("I_theta I_eta", matrix @ family.fisher_expectation(mean).dense(), unit, len(point) * root)
        with torch.enable_grad():
            moved = torch.func.jacrev(family.natural)(mean)
        require_close("I_theta d natural / d eta", matrix @ moved, unit, len(point) * root)


def _require_divergence(family: ExponentialFamily, theta: Tensor, rtol: float) -> None:
    p, q = theta
    expected = family.log_partition(q) - family.log_partition(p) - family.expectation(p) @ (q - p)
    require_close("family.kl(p, q) against psi", family.kl(p, q), expected, rtol, 1 + expected.abs())
    require_close("family.kl(p, p)", family.kl(p, p), torch.zeros_like(expected), rtol, 1.0)


def _require_draws(family: ExponentialFamily, theta: Tensor, samples: int) -> None:
    first, second = (
        family.sample(theta, samples, generator=torch.Generator(theta.device).manual_seed(0)) for _ in range(2)
    )
    require(torch.equal(first, second), "family.sample draws differently from one generator state")
    require(
        first.shape[:2] == (samples, 2), f"family.sample has shape {tuple(first.shape)}, expected ({samples}, 2, ...)"
    )
    statistics = family.statistics(first)
    require_mean("E[T] against family.expectation", statistics, family.expectation(theta))
    centred = statistics - family.expectation(theta)
    both = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    require_mean("Cov(T) against family.covariance", both, family.covariance(theta))
    log_p = family.log_prob(theta, first)
    require_mean("-E[log p] against family.entropy", -log_p, family.entropy(theta))
    ratio = log_p[:, 0] - family.log_prob(theta[1], first[:, 0])
    require_mean("E[log p - log q] against family.kl", ratio, family.kl(theta[0], theta[1]))
