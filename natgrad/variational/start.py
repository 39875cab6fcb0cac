"""Where q starts, and what it is fitted to, on one process or several: read from what the user gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_positive
from natgrad.ground.exchanges import sum_numbers, sum_tensors
from natgrad.ground.linalg import all_finite, require_factor
from natgrad.ground.spaces import trainable
from natgrad.ground.typed_torch import as_tensor_like
from natgrad.optim import Processes, meet_processes, refuse_processes
from natgrad.variational.network import Network, NetworkData, build_network, count_examples
from natgrad.variational.quadrature import Points
from natgrad.variational.targets import DensityTarget, LogJoint, Moments, Target, is_batched


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
    if not all_finite(start):
        raise ValueError("start is not finite")
    return start.detach()


def match_dtype(log_joint: LogJoint, mean: Tensor) -> Tensor:
    """The mean (d,) in float64, or in the default dtype where the function has tensors of that inside."""
    try:
        is_batched(log_joint, mean)
    except ValueError as error:
        if error.__cause__ is None:
            raise
        # torch does not mix dtypes in products
        return mean.to(torch.get_default_dtype())
    return mean


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
        net = build_network(target, data, points)
        spread = 1e-2 / data.prior_precision if covariance is None else covariance
        return net, net.start if start is None else as_mean(start), spread
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
    mean = mean if isinstance(start, Tensor) else match_dtype(target, mean)
    return DensityTarget(target, points, is_batched(target, mean)), mean


# A target whose data lie on several processes

AnyTarget = TypeVar("AnyTarget", bound=Target)


@dataclass(frozen=True)
class JoinedTarget(Target):
    """log p(z, data) as the sum over processes of each one's part; all of them make the same calls."""

    own: Target  # this process's target. Of a network and of `Projected` the prior counts once, not once per process
    processes: Processes  # what exchanges the sums

    @property
    def steady(self) -> bool:
        return self.own.steady

    def elsewhere(self, d: int) -> Sequence[JoinedTarget]:
        return [replace(self, own=target) for target in self.own.elsewhere(d)]

    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        return Moments(*self._sum(lambda part: part.moments(mean, root, step, batch), mean, batch))

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        return self._sum(lambda part: [part.value(mean, root, step, batch)], mean, batch)[0]

    def slopes(self, places: Tensor, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """log p (s,) and its gradient (s, d) at places (s, d), the same on all processes."""
        values, slopes = self._sum(lambda part: part.slopes(places, batch), places, batch)
        return values, slopes

    def values_at(self, places: Tensor, batch: tuple[Any, ...]) -> Tensor:
        """log p (s,) at places (s, d), the same on all processes."""
        return self._sum(lambda part: [part.values_at(places, batch)], places, batch)[0]

    def _sum(self, work: Callable[[Any], Sequence[Tensor]], like: Tensor, batch: tuple[Any, ...]) -> list[Tensor]:
        """The sums over processes of what each one's target gives, in one exchange."""
        part = self._take_part(like, batch)
        with self.processes.failing_together(like.device):
            terms = work(part)
        return sum_tensors(self.processes, terms)

    def _take_part(self, mean: Tensor, batch: tuple[Any, ...]) -> Target:
        """This process's target with its share of the prior, and of a network with the examples of all processes."""
        if not isinstance(self.own, Network):
            return self.own.take_part(self.processes.size)
        with self.processes.failing_together(mean.device):
            rows = count_examples(batch)
        total = int(sum_numbers(self.processes, [rows], mean.device)[0])
        if not total:
            raise ValueError("inputs is an empty batch on every process; give at least one of them an example")
        return self.own.take_part(self.processes.size, total)


def join_target(
    target: AnyTarget, group: Any, mean: Tensor, covariance: Tensor | float, *settings: object
) -> AnyTarget | JoinedTarget:
    """The target over the processes of a group, which all call this; the same where there is no group."""
    if group is None:
        return target
    start = trainable(target.model) if isinstance(target, Network) else {}
    numbers = covariance if isinstance(covariance, Tensor) else torch.tensor(float(covariance), dtype=torch.float64)
    start = {**start, "mean": mean, "covariance": numbers}
    return JoinedTarget(target, meet_processes(start, group, type(target).__name__, *settings))
