"""A target whose data lie on several processes: log p is the sum of what each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from natgrad.applications.variational.network import Network, count_examples
from natgrad.applications.variational.targets import DensityTarget, Moments, Target
from natgrad.ground.spaces import trainable
from natgrad.ground.typed_torch import split_tensor
from natgrad.optim import RankExchange, meet_processes

AnyTarget = TypeVar("AnyTarget", bound=Target)


@dataclass(frozen=True)
class JoinedTarget(Target):
    """log p(z, data) as the sum over processes of each one's part; all of them make the same calls.

    Args:
        own: This process's target. Of a network and of `Projected` the prior counts once, not once per process.
        processes: What exchanges the sums.
    """

    own: Target
    processes: RankExchange

    @property
    def steady(self) -> bool:
        return self.own.steady

    def elsewhere(self, d: int) -> Sequence[JoinedTarget]:
        return [replace(self, own=target) for target in self.own.elsewhere(d)]

    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        part = self._take_part(mean, batch)
        with self.processes.failing_together(mean.device):
            found = part.moments(mean, root, step, batch)
        numbers = torch.cat([found.value.reshape(1), found.gradient, found.hessian.reshape(-1)])
        sizes = [1, len(found.gradient), found.hessian.numel()]
        value, gradient, hessian = split_tensor(self.processes.sum(numbers), sizes)
        return Moments(value.reshape(()), gradient, hessian.view_as(found.hessian))

    def value(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Tensor:
        part = self._take_part(mean, batch)
        with self.processes.failing_together(mean.device):
            found = part.value(mean, root, step, batch)
        return self.processes.sum(found)

    def slopes(self, places: Tensor, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """log p (s,) and its gradient (s, d) at every place, of a function or a network.

        places: (s, d), the same on all processes.
        """
        part = self._take_known(places, batch)
        with self.processes.failing_together(places.device):
            values, slopes = part.slopes(places, batch)
        values, slopes = split_tensor(
            self.processes.sum(torch.cat([values, slopes.reshape(-1)])), [len(values), slopes.numel()]
        )
        return values, slopes.view(places.shape)

    def values_at(self, places: Tensor, batch: tuple[Any, ...]) -> Tensor:
        """log p at every place, shape (s,), of a function or a network.

        places: (s, d), the same on all processes.
        """
        part = self._take_known(places, batch)
        with self.processes.failing_together(places.device):
            found = part.values_at(places, batch)
        return self.processes.sum(found)

    def _take_known(self, places: Tensor, batch: tuple[Any, ...]) -> DensityTarget | Network:
        part = self._take_part(places, batch)
        assert isinstance(part, (DensityTarget, Network))
        return part

    def _take_part(self, mean: Tensor, batch: tuple[Any, ...]) -> Target:
        """This process's target with its share of the prior, and of a network with the examples of all processes."""
        if not isinstance(self.own, Network):
            return self.own.take_part(self.processes.size)
        with self.processes.failing_together(mean.device):
            rows = count_examples(batch)
        total = sum(int(count) for (count,) in self.processes.share_numbers([rows], mean.device))
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


def find_processes(target: Target) -> RankExchange:
    """The processes that have a part of the target; one alone exchanges nothing."""
    return target.processes if isinstance(target, JoinedTarget) else meet_processes({}, None)
