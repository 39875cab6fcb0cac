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
    activate_generation,
    generation_rows,
    join_rows,
    recognition_rows,
    sum_log_chances,
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

    states: States
    generation: list[Activations]
    recognition: list[Activations]
    logs: Tensor

    def teach_generation(self, machine: HelmholtzMachine, weights: Tensor) -> list[LogisticRows]:
        """Rows of p, weights (samples, b)."""
        return generation_rows(machine.generation, self.states, weights, self.generation)

    def teach_recognition(self, machine: HelmholtzMachine, weights: Tensor) -> list[LogisticRows]:
        """Rows of q, weights (samples, b)."""
        return recognition_rows(machine.recognition, self.states, weights, self.recognition)


def draw_weighed(machine: HelmholtzMachine, x: Tensor, samples: int, generator: torch.Generator | None) -> WeighedDraws:
    """`samples` draws from q(h | x) of every example (b, visible)."""
    states, recognition = machine.recognise_with_activations(x, samples, generator)
    generation = activate_generation(machine.generation, states)
    logs = sum_log_chances(generation, states) - sum_log_chances(recognition, states[1:])
    return WeighedDraws(states, generation, recognition, logs)


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
        dreams = machine.dream(len(x), generator)
        return Lesson(
            draws.teach_generation(machine, weights),
            recognition_rows(machine.recognition, dreams, weigh_equally(dreams)),
            estimate_bound(draws.logs),
        )


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
        return Lesson(
            draws.teach_generation(machine, weights),
            self._recognition(machine, draws, weights, generator),
            estimate_bound(draws.logs),
        )

    def _recognition(
        self, machine: HelmholtzMachine, draws: WeighedDraws, weights: Tensor, generator: torch.Generator | None
    ) -> list[LogisticRows]:
        if self.wake_phi == 1:
            return draws.teach_recognition(machine, weights)
        dreams = machine.dream(weights.shape[1], generator)
        sleep = recognition_rows(machine.recognition, dreams, weigh_equally(dreams))
        if self.wake_phi == 0:
            return sleep
        wake = draws.teach_recognition(machine, weights)
        return [
            join_rows(w.scale_by(self.wake_phi), s.scale_by(1 - self.wake_phi))
            for w, s in zip(wake, sleep, strict=True)
        ]


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
        return Lesson(
            draws.teach_generation(machine, weights),
            draws.teach_recognition(machine, weights),
            2 * estimate_bound(logs),
        )


def estimate_bound(logs: Tensor) -> Tensor:
    """log of the mean weight of every example: (samples, b) -> (b,)."""
    return logs.logsumexp(0) - math.log(len(logs))


def weigh_equally(states: States) -> Tensor:
    """Weights of the rows of dreams, (n,), that sum to 1."""
    return states[0].new_full(states[0].shape[:-1], 1 / len(states[0]))
