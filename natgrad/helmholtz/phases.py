"""Wake and sleep: from samples to rows of logistic regressions, one per unit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.checks import check_range
from natgrad.helmholtz.machine import HelmholtzMachine
from natgrad.helmholtz.units import (
    Activations,
    LogisticRows,
    activate_generation,
    activate_recognition,
    sample_recognition,
    sum_log_chances,
)


@dataclass(frozen=True)
class Lesson:
    """Rows per layer of each network, and the bound in nats (b,)."""

    generation: list[LogisticRows]
    recognition: list[LogisticRows]
    bound: Tensor


def draw_weighed(
    machine: HelmholtzMachine, x: Tensor, samples: int, generator: torch.Generator | None
) -> tuple[list[Activations], list[Activations], Tensor]:
    """Draws of h from q(h | x): what p and q make of them, and log p(x, h) - log q(h | x) (samples, b)."""
    states, recognition = sample_recognition(machine.recognition, x.expand(samples, *x.shape), generator)
    generation = activate_generation(machine.generation, states)
    return generation, recognition, sum_log_chances(generation) - sum_log_chances(recognition)


def teach(network: list[Activations], weights: Tensor) -> list[LogisticRows]:
    """Rows of every layer, weights (...)."""
    return [layer.teach(weights) for layer in network]


def teach_by_dreams(machine: HelmholtzMachine, count: int, generator: torch.Generator | None) -> list[LogisticRows]:
    """Rows of q from draws of p, all of equal weight."""
    dreams = machine.dream(count, generator)
    return teach(activate_recognition(machine.recognition, dreams), dreams[0].new_full((count,), 1 / count))


class Algorithm(ABC):
    """How samples teach the two networks."""

    @abstractmethod
    def lesson(self, machine: HelmholtzMachine, x: Tensor, samples: int, generator: torch.Generator | None) -> Lesson:
        """What a batch teaches both networks.

        Args:
            machine: The two networks.
            x: Examples, shape (b, visible).
            samples: Draws of h per example.
            generator: Of the draws.
        """


@dataclass(frozen=True)
class Classic(Algorithm):
    """Wake-sleep (Hinton et al. 1995): p learns from q's draws with equal weights, q from p's dreams."""

    def lesson(self, machine: HelmholtzMachine, x: Tensor, samples: int, generator: torch.Generator | None) -> Lesson:
        generation, _, logs = draw_weighed(machine, x, samples, generator)
        dreamt = teach_by_dreams(machine, len(x), generator)
        return Lesson(teach(generation, torch.full_like(logs, 1 / logs.numel())), dreamt, estimate_bound(logs))


@dataclass(frozen=True)
class Reweighted(Algorithm):
    """Reweighted wake-sleep (Bornschein & Bengio 2015): p and q learn from q's draws with importance weights.

    Args:
        wake_phi: The share of that in what q learns, in [0, 1]; the rest is p's dreams (sleep-phi).

    Raises:
        ValueError: For a share outside of [0, 1].
    """

    wake_phi: float = 0.5

    def __post_init__(self) -> None:
        check_range("wake_phi", self.wake_phi, "[0, 1]", hint=": a share between 0 and 1")

    def lesson(self, machine: HelmholtzMachine, x: Tensor, samples: int, generator: torch.Generator | None) -> Lesson:
        generation, recognition, logs = draw_weighed(machine, x, samples, generator)
        weights = logs.softmax(0) / len(x)  # normalised over the draws of an example, in the logs
        if self.wake_phi == 1:
            taught = teach(recognition, weights)
        else:
            taught = teach_by_dreams(machine, len(x), generator)
        if 0 < self.wake_phi < 1:
            taught = [
                wake.scale_by(self.wake_phi).join(sleep.scale_by(1 - self.wake_phi))
                for wake, sleep in zip(teach(recognition, weights), taught, strict=True)
            ]
        return Lesson(teach(generation, weights), taught, estimate_bound(logs))


@dataclass(frozen=True)
class Bidirectional(Algorithm):
    """The bidirectional Helmholtz machine (Bornschein et al. 2016): its model is p* ~ sqrt(p(x, h) q(h | x)) squared.

    Both networks learn from q's draws with weights sqrt(p / q). The bound is that of p*, without its constant 2 log Z,
    which is at most 0.
    """

    def lesson(self, machine: HelmholtzMachine, x: Tensor, samples: int, generator: torch.Generator | None) -> Lesson:
        generation, recognition, logs = draw_weighed(machine, x, samples, generator)
        weights = (0.5 * logs).softmax(0) / len(x)
        return Lesson(teach(generation, weights), teach(recognition, weights), 2 * estimate_bound(0.5 * logs))


def estimate_bound(logs: Tensor) -> Tensor:
    """log of the mean weight of every example: (samples, b) -> (b,)."""
    return logs.logsumexp(0) - math.log(len(logs))
