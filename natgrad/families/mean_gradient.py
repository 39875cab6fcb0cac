"""The natural gradient of E_p[f] over an exponential family: from draws, exactly, and by duality."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.families.event_checks import floating_dtype
from natgrad.families.exponential import ExponentialFamily
from natgrad.ground.linalg import eigh, gram, require_solution, svd
from natgrad.ground.messages import show_shape
from natgrad.ground.pure import leave_autocast

RIDGES = tuple(10.0**k for k in range(-7, 3))
METHODS = ("regression", "ridge", "fisher")
LEAST = 2.0
"""Effective draws below which an estimate says nothing."""


@leave_autocast
def natural_gradient_of_mean(
    family: ExponentialFamily,
    theta: Tensor,
    f_values: Tensor,
    x: Tensor,
    *,
    method: str | None = None,
    baseline: float | str | Tensor | None = None,
    sampled_from: Tensor | None = None,
    log_weights: Tensor | None = None,
) -> Tensor:
    """I_theta^-1 grad_theta E[f] = Cov(T, T)^-1 Cov(T, f) from draws: it ascends f; minus it descends.

    With a batch of distributions theta is (..., n), x (N, ..., event) as `sample` gives it, f_values (N, ...) or (N,
    ..., k). Weights are normalised to sum one.

    Args:
        family: The exponential family.
        theta: Natural parameters, shape (n,).
        f_values: f(x), shape (N,), or (N, k) for k functions.
        x: Draws, shape (N, event).
        method: "regression" is least squares of f on T over the draws: exact for f in the span of T, from n + 1 draws
            in general position on, whatever their distribution. "fisher" is I_theta^-1 times the unbiased covariance of
            f and T with the family's own Fisher matrix, for any number of draws. "ridge" is regression with as much
            shrinkage as left-out draws ask for. None: regression where there are more (effective) draws than n, else
            fisher.
        baseline: What is subtracted from f with method "fisher", which leaves the mean of the estimate as it is: None
            for the mean of f over the other draws (the unbiased covariance, n - 1), "optimal" for the one of least
            variance in every component, from the other draws too, or a number. Regression needs none.
        sampled_from: The theta of earlier draws that are used again, shape (n,), or (N, n) for one each: they are
            weighted by p(x; theta) / p(x; sampled_from).
        log_weights: The same for draws from anywhere else, shape (N,), up to a constant.

    Returns:
        Shape (n,), or (k, n) for k functions.

    Raises:
        ValueError: Where fewer than two draws are left in effect.

    Reference:
        Malago 2023.

    Example:
        >>> family, theta = ng.Bernoulli(3), torch.zeros(3)
        >>> x = family.sample(theta, 20)
        >>> ng.natural_gradient_of_mean(family, theta, x @ torch.tensor([1.0, 2.0, 3.0]), x)
        tensor([1.0000, 2.0000, 3.0000])
    """
    draws, shape = lay_out_draws(family, theta, f_values, x, sampled_from, log_weights)
    if method not in (None, *METHODS):
        raise ValueError(f"method is {method!r}, expected one of {', '.join(METHODS)}, or None to choose by the draws")
    count, size = len(x), theta.shape[-1]
    if method == "regression" and count <= size:
        raise ValueError(
            f"method 'regression' has {count} draws for {size} statistics, expected more draws than that; "
            "draw more, or take method='fisher' or 'ridge'"
        )
    if baseline is not None and method in ("regression", "ridge"):
        raise ValueError(f"baseline is for method 'fisher'; {method!r} subtracts the mean of f by itself")
    slopes = [estimate_slope(family, each, method, baseline) for each in draws]
    return torch.cat([theta.new_zeros(0, size), *slopes]).view(*shape, size)


@leave_autocast
def gradient_of_mean(
    family: ExponentialFamily,
    theta: Tensor,
    f_values: Tensor,
    x: Tensor,
    *,
    baseline: float | str | Tensor | None = None,
    sampled_from: Tensor | None = None,
    log_weights: Tensor | None = None,
) -> Tensor:
    """grad_theta E[f] = Cov(T, f) from draws, which is the natural gradient in the expectation parameters eta.

    Unbiased for draws from theta, with every baseline.

    Args:
        family: The exponential family.
        theta: Natural parameters, shape (n,).
        f_values: f(x), shape (N,), or (N, k) for k functions.
        x: Draws, shape (N, event).
        baseline: As in `natural_gradient_of_mean`.
        sampled_from: As in `natural_gradient_of_mean`.
        log_weights: As in `natural_gradient_of_mean`.

    Returns:
        Shape (n,), or (k, n) for k functions.
    """
    draws, shape = lay_out_draws(family, theta, f_values, x, sampled_from, log_weights)
    slopes = [estimate_covariance(family, each, baseline) for each in draws]
    return torch.cat([theta.new_zeros(0, theta.shape[-1]), *slopes]).view(*shape, theta.shape[-1])


@leave_autocast
def exact_natural_gradient_of_mean(
    family: ExponentialFamily, theta: Tensor, f: Callable[[Tensor], Tensor] | Tensor
) -> Tensor:
    """Cov(T, T)^-1 Cov(T, f) summed over all outcomes of a family that can list them, without draws.

    Args:
        family: The exponential family.
        theta: Natural parameters, shape (..., n).
        f: A function of x (S, event) -> (S,) or (S, k), or its values at `family.outcomes(theta)`.

    Returns:
        Shape (..., n) or (..., k, n); the shortest solution where the statistics depend on one another (Categorical).

    Example:
        >>> ng.exact_natural_gradient_of_mean(ng.Bernoulli(2), torch.zeros(2), lambda x: x[:, 0] * x[:, 1])
        tensor([0.5000, 0.5000])
    """
    x = family.outcomes(family.check(theta))
    values = f(x) if callable(f) else f
    if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != len(x):
        raise ValueError(
            f"f gives {show_shape(values)}, expected a tensor ({len(x)},) or ({len(x)}, k): one row per outcome"
        )
    flat = theta.reshape(-1, theta.shape[-1])
    values, statistics = values.to(theta), family.statistics(x).to(theta)
    columns = require_finite(values.reshape(len(x), -1), "f")
    slopes = [regress(statistics, columns, torch.softmax(family.log_prob(row, x), dim=0)) for row in flat]
    return torch.cat([torch.zeros_like(flat[:0]), *slopes]).view(*theta.shape[:-1], *values.shape[1:], theta.shape[-1])


@leave_autocast
def dual_gradient(
    family: ExponentialFamily,
    objective: Callable[[Tensor], Tensor],
    *,
    theta: Tensor | None = None,
    eta: Tensor | None = None,
) -> Tensor:
    """The natural gradient without a Fisher matrix: it is the plain gradient in the dual coordinates.

    Args:
        family: The exponential family.
        objective: A function (..., n) -> (...) of the dual coordinates: of eta where theta is given, of theta where eta
            is.
        theta: Where, in natural parameters, shape (..., n).
        eta: Where, in expectation parameters, shape (..., n).

    Returns:
        In the coordinates that were given, shape (..., n).

    Raises:
        ValueError: Unless one of theta and eta is given.
    """
    if theta is not None and eta is None:
        at = family.expectation(theta)
    elif eta is not None and theta is None:
        at = family.natural(eta)
    else:
        raise ValueError(
            "dual_gradient takes theta=..., with an objective of eta, or eta=..., with an objective of theta"
        )
    return torch.func.grad(lambda dual: objective(dual).sum())(at)


def effective_draws(log_weights: Tensor) -> Tensor:
    """1 / sum share^2 of weights: how many equally weighted draws tell as much.

    Args:
        log_weights: Shape (N, ...), up to a constant.

    Returns:
        Shape (...).
    """
    return 1 / torch.softmax(log_weights, dim=0).square().sum(0)


class WeightedDraws(NamedTuple):
    """Of one distribution: theta (n,), statistics (N, n), values (N, k) and shares (N,)."""

    theta: Tensor
    statistics: Tensor
    values: Tensor
    shares: Tensor


def lay_out_draws(
    family: ExponentialFamily,
    theta: Tensor,
    f_values: Tensor,
    x: Tensor,
    sampled_from: Tensor | None,
    log_weights: Tensor | None,
) -> tuple[list[WeightedDraws], tuple[int, ...]]:
    """The draws of each theta, checked, and the shape of what is asked of them, less the last axis."""
    batch, n = family.check(theta).shape[:-1], theta.shape[-1]
    statistics = family.statistics(family.as_numbers(x, theta.dtype)).to(theta.dtype)
    count = len(statistics)
    if statistics.shape != (count, *batch, n):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, whose statistics have {tuple(statistics.shape)}; expected "
            f"({count}, {', '.join(map(str, (*batch, n)))}): draws first, then the batch of theta"
        )
    if not isinstance(f_values, Tensor) or f_values.shape[: 1 + len(batch)] != (count, *batch):
        wanted = ", ".join(map(str, (count, *batch)))
        raise ValueError(f"f_values is {show_shape(f_values)}, expected ({wanted}) or one more: f(x)")
    if count < LEAST:
        raise ValueError(f"x has {count} draws, expected at least 2: a covariance")
    values = require_finite(f_values.to(theta.dtype), "f_values")
    log_share = read_log_weights(family, theta, statistics, sampled_from, log_weights)
    shares = torch.softmax(log_share.expand(count, *batch), dim=0).reshape(count, -1).mT
    effective = 1 / shares.square().sum(1)
    if bool((effective < LEAST).any()):
        raise ValueError(
            f"of {count} draws {float(effective.min()):.3g} are left in effect by their weights, expected at least 2: "
            "theta has moved too far from where they were drawn; draw anew"
        )
    columns = (
        each.reshape(count, batch.numel(), each.shape[1 + len(batch) :].numel()).transpose(0, 1)
        for each in (statistics, values)
    )
    rows = zip(theta.reshape(-1, n), *columns, shares, strict=True)
    return [WeightedDraws(*row) for row in rows], (*batch, *f_values.shape[1 + len(batch) :])


def estimate_slope(
    family: ExponentialFamily, draws: WeightedDraws, method: str | None, baseline: float | str | Tensor | None
) -> Tensor:
    """(k, n) of one distribution."""
    if method is None:
        effective = float(1 / draws.shares.square().sum())
        method = "regression" if effective > draws.theta.numel() + 1e-6 * effective and baseline is None else "fisher"
    if method == "regression":
        return regress(draws.statistics, draws.values, draws.shares)
    if method == "ridge":
        slopes = [natural_slope(draws.statistics, column, draws.shares).value for column in draws.values.unbind(1)]
        return torch.stack(slopes)
    operator = family.fisher(draws.theta)
    gradient = estimate_covariance(family, draws, baseline)
    inverse = operator.inverse(0.0)
    if inverse is not None:
        return (inverse @ gradient.mT).mT
    return require_solution(operator.dense(), gradient.mT, family.explain_singular()).mT


def estimate_covariance(
    family: ExponentialFamily, draws: WeightedDraws, baseline: float | str | Tensor | None
) -> Tensor:
    """Cov(f, T), (k, n), of one distribution."""
    share, values = draws.shares.unsqueeze(1), draws.values
    if baseline is None:
        centred = values - (share * values).sum(0)
        moments = (share * centred).mT @ (draws.statistics - draws.shares @ draws.statistics)
        return moments / (1 - share.square().sum())  # 1 - 1 / N for equal shares
    moved = draws.statistics - family.expectation(draws.theta)
    if isinstance(baseline, str):
        if baseline != "optimal":
            raise ValueError(f"baseline is {baseline!r}, expected None, 'optimal' or a number")
        # b_i = E[f t_i^2] / E[t_i^2], over the other draws so that nothing is biased
        weight = (share * moved).square()  # (N, n)
        both = values.unsqueeze(2) * weight.unsqueeze(1)  # (N, k, n)
        rest = (weight.sum(0) - weight).clamp(min=torch.finfo(values.dtype).tiny).unsqueeze(1)
        best = (both.sum(0) - both) / rest
        return (share.unsqueeze(2) * (values.unsqueeze(2) - best) * moved.unsqueeze(1)).sum(0)
    return (share * (values - baseline)).mT @ moved


def read_log_weights(
    family: ExponentialFamily,
    theta: Tensor,
    statistics: Tensor,
    sampled_from: Tensor | None,
    log_weights: Tensor | None,
) -> Tensor:
    """log p(x; theta) / q(x) up to a constant, (N, ...)."""
    if log_weights is not None:
        if sampled_from is not None:
            raise ValueError("sampled_from and log_weights are two ways to say the same, expected one of them")
        if log_weights.shape not in (statistics.shape[:1], statistics.shape[:-1]):
            raise ValueError(
                f"log_weights has shape {tuple(log_weights.shape)}, expected {tuple(statistics.shape[:-1])}"
            )
        trailing = statistics.dim() - 1 - log_weights.dim()
        return require_finite(log_weights.to(theta.dtype), "log_weights").view(*log_weights.shape, *[1] * trailing)
    if sampled_from is None:
        return statistics.new_zeros(statistics.shape[:-1])
    family.check(sampled_from)
    if sampled_from.shape not in (theta.shape, statistics.shape):
        raise ValueError(
            f"sampled_from has shape {tuple(sampled_from.shape)}, expected that of theta, {tuple(theta.shape)}, or one "
            f"theta per draw, {tuple(statistics.shape)}"
        )
    logs = ((theta - sampled_from) * statistics).sum(-1)
    # one distribution for all: its constant goes out with the normalisation, and need not be known
    return logs if sampled_from.dim() == theta.dim() else logs + family.log_partition(sampled_from)


def require_finite(values: Tensor, name: str) -> Tensor:
    """The values as they are. ValueError for entries that are not finite."""
    if not bool(torch.isfinite(values.detach()).all()):
        raise ValueError(
            f"{name} has entries that are not finite, expected numbers; replace them, by the worst of the others say"
        )
    return values


# Regression of f on T


@dataclass(frozen=True)
class Slope:
    """b, the natural gradient in natural parameters, and how well f is a + b T.

    Args:
        value: b, shape (K,).
        explained: Share of f's variance that predictions of the left-out explain: 1 where f lies in the span of T,
            negative where they are worse than the mean.
        ridge: The shrinkage, relative to the mean variance of a statistic.
    """

    value: Tensor
    explained: float
    ridge: float


def natural_slope(
    statistics: Tensor, values: Tensor, weights: Tensor | None = None, *, ridges: tuple[float, ...] = RIDGES
) -> Slope:
    """Weighted ridge regression of f on T, the ridge chosen by the error on left-out draws.

    In natural parameters the Fisher matrix is Cov(T, T) and the gradient Cov(T, f): the natural gradient is the
    regression's slope, exact for f in the span of T from N > K draws on, whatever their distribution. Where N is
    smaller the ridge decides.

    Args:
        statistics: T, shape (N, K).
        values: f, shape (N,).
        weights: Importance weights, shape (N,). None: equal.
        ridges: To choose from, relative to the mean variance of a statistic.

    Reference:
        Malago 2023.
    """
    values = values.to(floating_dtype(values))
    statistics, weights = statistics.to(values), torch.ones_like(values) if weights is None else weights.to(values)
    share = weights / weights.sum()
    root = share.sqrt()
    centred = (statistics - share @ statistics) * root.unsqueeze(1)
    target = (values - share @ values) * root
    total = float(target.square().sum())
    if total == 0 or len(values) < 3:
        return Slope(torch.zeros_like(statistics[0]), 0.0, 0.0)
    left, sizes, right = thin_svd(centred)
    coordinates = left.mT @ target
    scale = float(sizes.square().sum()) / statistics.shape[1]
    # errors of the left-out: all ridges in two products with U and its squares, a pass for each took longer than U
    powers = sizes.square().unsqueeze(1)
    shifts = torch.tensor([ridge * scale for ridge in ridges], dtype=powers.dtype, device=powers.device)
    shrink = powers / (powers + shifts)  # (r, ridges)
    predicted = left @ (shrink * coordinates.unsqueeze(1))
    leverage = left.square() @ shrink + share.unsqueeze(1)
    residual = (target.unsqueeze(1) - predicted) / (1 - leverage).clamp(min=1e-12)
    errors = [error if error == error else math.inf for error in residual.square().sum(0).tolist()]
    error = min(errors)
    ridge = ridges[errors.index(error)] if math.isfinite(error) else ridges[-1]
    slope = right.mT @ (sizes / (sizes.square() + ridge * scale) * coordinates)
    return Slope(slope, 1 - error / total, ridge)


def thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (N, r), sizes (r,), V^T (r, K) from the smaller Gram matrix; sizes below 1e-7 of the largest are left out."""
    tall = matrix.shape[0] > matrix.shape[1]
    values, vectors = eigh(gram(matrix if tall else matrix.mT))
    large = values > 1e-14 * values[-1].clamp(min=1e-300)
    sizes, basis = values[large].sqrt(), vectors[:, large]
    if tall:
        return (matrix @ basis).div_(sizes), sizes, basis.mT
    return basis, sizes, (basis.mT @ matrix) / sizes.unsqueeze(1)


def regress(statistics: Tensor, values: Tensor, share: Tensor) -> Tensor:
    """The weighted least-squares slope, of least norm.

    Columns are scaled to one size first, so that statistics that hardly vary keep their digits. Where they depend on
    one another the scaling would choose another of the solutions, and is left out.

    Args:
        statistics: T, shape (N, K).
        values: f, shape (N, k).
        share: Weights that sum to one, shape (N,).

    Returns:
        Shape (k, K).
    """
    root = share.sqrt().unsqueeze(1)
    centred = (statistics - share @ statistics) * root
    target = (values - share @ values) * root
    sizes = torch.linalg.vector_norm(centred, dim=0)
    slope, rank = solve_least_norm(centred / torch.where(sizes > 0, sizes, 1), target)
    if rank == centred.shape[1]:
        return (slope / sizes.unsqueeze(1)).mT
    return solve_least_norm(centred, target)[0].mT


def solve_least_norm(matrix: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """argmin |A X - B| of least norm and the rank of A, by QR and the singular values of R."""
    q, r = torch.linalg.qr(matrix)
    left, sizes, right = svd(r)
    large = sizes > max(matrix.shape) * torch.finfo(matrix.dtype).eps * sizes.amax()
    inverse = torch.where(large, 1 / torch.where(large, sizes, 1), 0)
    return right.mT @ (inverse.unsqueeze(1) * (left.mT @ (q.mT @ target))), int(large.sum())
