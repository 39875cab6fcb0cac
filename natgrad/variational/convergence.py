"""When a fit has converged: what is left to gain, and how bounds change from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.variational.targets import Moments

WINDOW, LEFT, UNKNOWN = 10, 1e-2, 0.1
"""Steps over which bounds are compared; nats that a converged q may lack, and to which its bound must be known: a tenth
of the odds of two models."""
FAR, OUT_OF_REACH = 1e3, 1e6
"""Times the first bound's size that a fit of a density does not gain ever faster, and not at all: a start that is far
off is far below."""


class Bounds(list[float]):
    """The bounds that `fit` found, in nats, one before each step.

    Attributes:
        converged: True if the fit ended since nothing was left to gain over its points; False if it ran out of steps,
            or of rate, or if `error` is above the tolerance and .1 nats: then the points do not determine q.
        known: True if `error` is at most the tolerance.
        error: How far `q.elbo()`, by the points of the fit, may be from that of the same q, in nats: the difference
            from the mean over other points, and two standard errors of that. Where points are drawn anew, the standard
            deviation of a bound. NaN where it is not known.
        gap: Half of the natural gradient's squared length before the last step, in nats: what a full step would gain of
            a bound that is quadratic. Noise keeps it from zero where points are drawn anew.
    """

    converged: bool = False
    known: bool = False
    error: float = math.nan
    gap: float = math.inf


def has_ended(bounds: Bounds, tolerance: float) -> bool:
    """True if the gap is below the tolerance, or below `LEFT` while `WINDOW` steps gained less than it each.

    The second case is how fits over points end where log p has kinks: the gap jumps when a point crosses one.
    """
    still = len(bounds) > WINDOW and abs(bounds[-1] - bounds[-1 - WINDOW]) < WINDOW * tolerance
    return bounds.gap < tolerance or (still and bounds.gap < LEFT)


def has_settled(bounds: Bounds, tolerance: float) -> bool:
    """True if the last `WINDOW` bounds gained less than the tolerance on those before, two standard errors included."""
    if len(bounds) < 2 * WINDOW:
        return False
    before, after = torch.tensor(bounds[-2 * WINDOW :], dtype=torch.float64).view(2, WINDOW)
    error = ((before.var() + after.var()) / WINDOW).sqrt()
    return float((after.mean() - before.mean()).abs() + 2 * error) < tolerance


def measure_error(bound: float, others: Sequence[float]) -> float:
    """How far a bound may be from the expectation that others estimate: their difference and two standard errors."""
    values = torch.tensor([bound, *others], dtype=torch.float64)
    if not bool(torch.isfinite(values).all()):
        return math.inf
    return float((values[0] - values[1:].mean()).abs() + 2 * values[1:].std() / len(others) ** 0.5)


def squared_length(found: Moments, root: Tensor) -> float:
    """|natural gradient|^2 of the bound in the Fisher metric: g^T P^-1 g + |L^T E[Hess] L + I|^2 / 2, in nats.

    root: L (d, d) with L L^T the covariance, or standard deviations (d,) where q is diagonal.
    """
    if root.dim() == 1:
        return float((root * found.gradient).square().sum() + (root.square() * found.hessian + 1).square().sum() / 2)
    turned = root.mT @ found.hessian @ root
    turned.diagonal().add_(1)
    return float((root.mT @ found.gradient).square().sum() + turned.square().sum() / 2)


def runs_away(bounds: Sequence[float]) -> bool:
    """True if the bound rose so far above the size of the first one that log p can have no maximum."""
    if len(bounds) < 2:
        return False
    first, half, last = bounds[0], bounds[len(bounds) // 2], bounds[-1]
    gained = (last - first) / (1 + abs(first))
    return gained > OUT_OF_REACH or (gained > FAR and last - half >= half - first)
