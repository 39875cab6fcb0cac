"""A target whose data lie on several processes: log p is the sum of what each of them has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from natgrad.ground.exchanges import sum_numbers, sum_tensors
from natgrad.ground.spaces import trainable
from natgrad.optim import Processes, meet_processes
from natgrad.variational.network import Network, count_examples
from natgrad.variational.targets import Moments, Target

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
        """log p (s,) and its gradient (s, d) at every place, of a function or a network.

        places: (s, d), the same on all processes.
        """
        values, slopes = self._sum(lambda part: part.slopes(places, batch), places, batch)
        return values, slopes

    def values_at(self, places: Tensor, batch: tuple[Any, ...]) -> Tensor:
        """log p at every place, shape (s,), of a function or a network. places: (s, d), the same on all processes."""
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


def find_processes(target: Target) -> Processes:
    """The processes that have a part of the target; one alone exchanges nothing."""
    return target.processes if isinstance(target, JoinedTarget) else meet_processes({}, None)
