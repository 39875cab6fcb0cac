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
    States,
    activate_layers,
    join_rows,
    pair_generation,
    pair_recognition,
    sum_log_chances,
    teach_layers,
)


@dataclass(frozen=True)
class Lesson:
    """Rows per layer of each network, None where a phase does not teach it, and the bound in nats (b,)."""

    generation: list[LogisticRows]
    recognition: list[LogisticRows]
    bound: Tensor


@dataclass(frozen=True)
class WeighedDraws:
    """Draws of h given examples, every layer's inputs and logits in them, and log p(x, h) - log q(h | x) (samples, b).

    All that a step needs is computed once: log-probabilities, gradients and Fisher blocks are read off the logits.
    """

    machine: HelmholtzMachine
    states: States
    generation: list[Activations]
    recognition: list[Activations]
    logs: Tensor

    def teach_generation(self, weights: Tensor) -> list[LogisticRows]:
        """Rows of p, weights (samples, b)."""
        return teach_layers(self.machine.generation, pair_generation(self.states), self.generation, weights)

    def teach_recognition(self, weights: Tensor) -> list[LogisticRows]:
        """Rows of q, weights (samples, b)."""
        return teach_layers(self.machine.recognition, pair_recognition(self.states), self.recognition, weights)


def draw_weighed(machine: HelmholtzMachine, x: Tensor, samples: int, generator: torch.Generator | None) -> WeighedDraws:
    """`samples` draws from q(h | x) of every example (b, visible)."""
    states, recognition = machine.recognise_with_activations(x, samples, generator)
    pairs = pair_generation(states)
    generation = activate_layers(machine.generation, pairs)
    logs = sum_log_chances(generation, pairs) - sum_log_chances(recognition, pair_recognition(states))
    return WeighedDraws(machine, states, generation, recognition, logs)


def teach_by_dreams(machine: HelmholtzMachine, count: int, generator: torch.Generator | None) -> list[LogisticRows]:
    """Rows of q from draws of p, all of equal weight."""
    dreams = machine.dream(count, generator)
    pairs, weights = pair_recognition(dreams), dreams[0].new_full((count,), 1 / count)
    return teach_layers(machine.recognition, pairs, activate_layers(machine.recognition, pairs), weights)


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
        draws = draw_weighed(machine, x, samples, generator)
        weights = torch.full_like(draws.logs, 1 / draws.logs.numel())
        dreamt = teach_by_dreams(machine, len(x), generator)
        return Lesson(draws.teach_generation(weights), dreamt, estimate_bound(draws.logs))


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
        draws = draw_weighed(machine, x, samples, generator)
        weights = draws.logs.softmax(0) / len(x)  # normalised over the draws of an example, in the logs
        if self.wake_phi == 1:
            recognition = draws.teach_recognition(weights)
        else:
            recognition = teach_by_dreams(machine, len(x), generator)
        if 0 < self.wake_phi < 1:
            recognition = [
                join_rows(wake.scale_by(self.wake_phi), sleep.scale_by(1 - self.wake_phi))
                for wake, sleep in zip(draws.teach_recognition(weights), recognition, strict=True)
            ]
        return Lesson(draws.teach_generation(weights), recognition, estimate_bound(draws.logs))


@dataclass(frozen=True)
class Bidirectional(Algorithm):
    """The bidirectional Helmholtz machine (Bornschein et al. 2016): its model is p* ~ sqrt(p(x, h) q(h | x)) squared.

    Both networks learn from q's draws with weights sqrt(p / q). The bound is that of p*, without its constant 2 log Z,
    which is at most 0.
    """

    def lesson(self, machine: HelmholtzMachine, x: Tensor, samples: int, generator: torch.Generator | None) -> Lesson:
        draws = draw_weighed(machine, x, samples, generator)
        logs = 0.5 * draws.logs
        weights = logs.softmax(0) / len(x)
        return Lesson(draws.teach_generation(weights), draws.teach_recognition(weights), 2 * estimate_bound(logs))


def estimate_bound(logs: Tensor) -> Tensor:
    """log of the mean weight of every example: (samples, b) -> (b,)."""
    return logs.logsumexp(0) - math.log(len(logs))
