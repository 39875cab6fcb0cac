"""Where q starts, and what it is fitted to, on one process or several: read from what the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer, check_positive, check_precision
from natgrad.ground.linalg import all_finite, require_factor
from natgrad.ground.spaces import trainable
from natgrad.ground.typed_torch import as_tensor_like
from natgrad.optim import Processes, meet_processes, refuse_processes
from natgrad.variational.network import Network, NetworkData
from natgrad.variational.quadrature import Draws, Points
from natgrad.variational.targets import DensityTarget, LogJoint, Target, is_batched


def as_mean(start: Any) -> Tensor:
    """The mean of q at the start, shape (d,). start: A floating-point vector (d,), numbers, or d for zeros."""
    if isinstance(start, (int, np.integer)) and start >= 1:
        return torch.zeros(int(start), dtype=torch.float64)
    if isinstance(start, (list, tuple, np.ndarray)):
        with suppress(TypeError, ValueError, RuntimeError):
            start = torch.as_tensor(start, dtype=torch.float64)
    if not isinstance(start, Tensor) or start.dim() != 1 or len(start) == 0 or not start.is_floating_point():
        came = f"{start.dtype} {tuple(start.shape)}" if isinstance(start, Tensor) else repr(start)
        raise ValueError(f"start is {came}, expected the mean of q, a floating-point vector (d,), or d")
    check_precision("start", start.dtype, "call start.double()")
    if not all_finite(start):
        raise ValueError("start is not finite")
    return start.detach()


def as_precision(covariance: Tensor | float, mean: Tensor, diagonal: bool) -> Tensor:
    """The precision of q at the start, shape (d, d), or (d,) where q is diagonal."""
    given, d = as_tensor_like(covariance, mean), len(mean)
    if given.shape not in ((), (d,), (d, d)) or (diagonal and given.dim() == 2):
        wanted = f"a number or ({d},)" + ("" if diagonal else f" or ({d}, {d})")
        raise ValueError(f"covariance has shape {tuple(given.shape)}, expected {wanted}")
    if given.dim() < 2:
        if not bool((given > 0).all()) or not all_finite(given):
            raise ValueError("covariance has entries that are not positive and finite")
        return (1 / given).expand(d).clone() if diagonal else torch.diag((1 / given).expand(d))
    return torch.cholesky_inverse(require_factor(given, "covariance is not positive definite"))


def read_target(
    target: LogJoint | Target | nn.Module,
    start: Tensor | Sequence[float] | int | None,
    covariance: Tensor | float | None,
    points: Points | None,
    data: NetworkData,
    lr: float,
) -> tuple[Target, Tensor, Tensor | float]:
    """What q is fitted to, and q's mean (d,) and covariance at the start; the arguments as a user gives them."""
    check_positive("lr", lr)
    if points is not None and not isinstance(points, Points):
        raise TypeError(f"points is {points!r}, expected Sobol(), GaussHermite() or Draws()")
    if isinstance(target, nn.Module):
        refuse_processes(target, "target")
        if data.criterion is None:
            raise ValueError("criterion is None, expected a torch.nn loss or an ng likelihood: what the outputs mean")
        size = check_integer("data_size", data.data_size, of="the number of examples in the whole set")
        check_positive("prior_precision", data.prior_precision)
        net = Network(target, data.criterion, size, data.prior_precision, points or Draws(2))
        spread = 1e-2 / data.prior_precision if covariance is None else covariance
        mean = net.start if start is None else as_mean(start)
        check_precision("target" if start is None else "start", mean.dtype, "call target.float()")
        return net, mean, spread
    if data.criterion is not None or data.data_size is not None:
        raise TypeError("criterion and data_size belong to a network; a log joint has its data inside")
    if start is None:
        raise ValueError("start is None, expected the mean of q at the start (d,), or the number of dimensions d")
    density, mean = read_density(target, start, points)
    return density, mean, 1.0 if covariance is None else covariance


def read_density(
    target: LogJoint | Target, start: Tensor | Sequence[float] | int, points: Points | None
) -> tuple[Target, Tensor]:
    """A log joint density as a target, and the mean of q at the start (d,) in a dtype that it takes."""
    mean = as_mean(start)
    if isinstance(target, Target):
        if points is not None:
            raise TypeError("points belong to a log joint or a network; Projected has its own order")
        target.check(len(mean))
        return target, mean
    if not callable(target):
        raise TypeError(f"target is {type(target).__name__}, expected a function z -> log p(z, data), or a module")
    try:
        batched = is_batched(target, mean)
    except ValueError as error:
        if isinstance(start, Tensor) or error.__cause__ is None:
            raise
        # torch does not mix dtypes in products: the function has tensors of the default one inside
        mean = mean.to(torch.get_default_dtype())
        batched = is_batched(target, mean)
    return DensityTarget(target, points, batched), mean


def meet_targets(target: Target, group: Any, mean: Tensor, covariance: Tensor | float, *settings: object) -> Processes:
    """The processes of a group, which all call this with their part of the target; this one alone for no group."""
    start = trainable(target.model) if isinstance(target, Network) else {}
    numbers = covariance if isinstance(covariance, Tensor) else torch.tensor(float(covariance), dtype=torch.float64)
    return meet_processes({**start, "mean": mean, "covariance": numbers}, group, type(target).__name__, *settings)
