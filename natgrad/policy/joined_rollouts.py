"""Environments on several processes: moments, means and the critic's batches are those of all transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.optim import RankExchange
from natgrad.policy.environments import Episode
from natgrad.policy.normalise import RunningMoments

Array = np.ndarray


@dataclass(frozen=True)
class BatchPart:
    """This process's transitions of a batch of all processes."""

    processes: RankExchange  # what exchanges
    first: int  # the place of its first one in the batch
    count: int  # its transitions
    total: int  # those of all

    @staticmethod
    def of(processes: RankExchange, count: int) -> BatchPart:
        """The part of a process that has so many transitions."""
        counts = [int(one) for (one,) in processes.share_numbers([count], torch.device("cpu"))]
        return BatchPart(processes, sum(counts[: processes.rank]), count, sum(counts))

    @property
    def share(self) -> float:
        """What a mean over these weighs in the mean over all."""
        return self.count / self.total

    def mean(self, own: Tensor) -> Tensor:
        """The mean over all transitions."""
        return self.sum(own * self.share)

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.processes.sum(own)

    def choose(self, places: Tensor) -> Tensor:
        """Of some places in the whole batch, those that are here, counted from this process's first."""
        here = places - self.first
        return here[(here >= 0) & (here < self.count)]


def join_moments(processes: RankExchange, before: RunningMoments, after: RunningMoments) -> RunningMoments:
    """The moments of all that the processes saw, each since the same start."""
    # Chan, Golub & LeVeque 1979, about the mean at the start.
    if processes.size == 1:
        return after
    away = after.mean - before.mean
    squares = after.count * (after.var + away**2) - before.count * before.var
    own = torch.from_numpy(np.stack([after.count * away, squares]))
    counts = processes.share_numbers([after.count - before.count], torch.device("cpu"))
    found = RunningMoments(before.mean.shape)
    found.count = before.count + int(sum(count for (count,) in counts))
    if found.count:
        shift, scatter = processes.sum(own).numpy() / found.count
        found.mean = before.mean + shift
        found.var = scatter + before.count / found.count * before.var - shift**2
    return found


def join_episodes(processes: RankExchange, episodes: Sequence[Episode]) -> list[Episode]:
    """Those of all processes."""
    told: list[list[Any]] = processes.share_objects([astuple(one) for one in episodes])
    return [Episode(*one) for part in told for one in part]
