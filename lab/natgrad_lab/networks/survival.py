"""How long patients live, some of whom are still alive at the end: a network that gives everyone a hazard of their own.

A likelihood that torch has no loss for, written as a user would write it: `nll` and `sample`, and the natural gradient
has its metric. The patients are simulated, so that the best possible loss is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.families import Likelihood
from natgrad_lab.data import Split
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Task
from natgrad_lab.experiments.models import perceptron
from natgrad_lab.experiments.race import RaceSettings, race
from natgrad_lab.experiments.settings import check_counts, check_word

END = 3.0  # of the study: who lives longer is counted as alive then
COVARIATES = 12


@dataclass(frozen=True)
class SurvivalSettings(RaceSettings):
    """What `--set` can change."""

    seconds: float = 5.0  # of training per run
    evaluations: int = 20  # at equal distances of time
    looked_at: int = 2000  # patients of the training and of the test part
    methods: str = "structures"  # or names of contestants such as kfac,adam
    hazard: str = "weibull"  # or exponential, which does not change with time
    patients: int = 8000  # to train on; a quarter as many to test

    def __post_init__(self) -> None:
        check_word(self, "hazard", HAZARDS)
        check_counts(self, "patients", least=4)


def tasks(settings: SurvivalSettings) -> tuple[Task, ...]:
    """One task: the negative log likelihood of times and events."""
    likelihood = HAZARDS[settings.hazard]
    best, among = compute_true_loss(settings.patients), contestants.line_up(128, ("4.weight",), **GRIDS)
    return (
        Task(
            name="survival",
            title=f"Survival of {settings.patients} simulated patients, {settings.hazard} hazard",
            model=lambda: network(likelihood.numbers),
            data=lambda: patients(settings.patients),
            criterion=likelihood,  # type: ignore[arg-type]
            unit="nats per patient",
            divergence=lambda before, after: sampled_divergence(likelihood, before, after),
            contestants=contestants.select(settings.methods, among),
            note=f"The distribution that the patients were drawn from scores {best:.3f} nats on the test part.",
        ),
    )


def network(numbers: int) -> nn.Module:
    """Two hidden layers, and a last one near zero: everybody starts at a constant hazard, and none at an absurd one."""
    net = perceptron([COVARIATES, 32, 32, numbers], nn.Tanh)
    with torch.no_grad():
        list(net.parameters())[-2].mul_(0.1)
    return net


class WeibullHazard(Likelihood):
    """Outputs (log rate a, log shape b): S(t) = exp(-(e^a t)^k) with k = e^b. Targets (b, 2): time, and 1 for a death.

    A time without a death is the end of the study. It is a criterion, too: a call gives the mean.
    """

    numbers = 2

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over patients."""
        return self.nll(outputs, targets).mean()

    def laws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """(log rate, log shape), each (b,)."""
        return outputs[:, 0], outputs[:, 1]

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_rate, log_shape = self.laws(outputs)
        time, died = targets.unbind(1)
        scaled = log_shape.exp() * (log_rate + time.log())  # log of the cumulative hazard
        return scaled.exp() - died * (log_shape + scaled - time.log())

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Times and deaths under the model, up to the end of the study."""
        log_rate, log_shape = self.laws(outputs.detach())
        chance = torch.rand(log_rate.shape, generator=generator, device=log_rate.device, dtype=log_rate.dtype)
        hazard = -torch.log1p(-chance).clamp(max=-1e-12)  # exponential, and never 0, whose logarithm is taken
        time = (hazard.log() * (-log_shape).exp() - log_rate).exp()
        return torch.stack([time.clamp(1e-6, END), (time < END).to(time.dtype)], dim=1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        if not isinstance(targets, Tensor) or targets.shape != (len(outputs), 2):
            raise ValueError(
                f"targets has shape {tuple(targets.shape)}, expected ({len(outputs)}, 2): times and deaths"
            )


class ConstantHazard(WeibullHazard):
    """Outputs (b, 1): the log rate, the same at all times."""

    numbers = 1

    def laws(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs[:, 0], torch.zeros_like(outputs[:, 0])


HAZARDS = {"weibull": WeibullHazard(), "exponential": ConstantHazard()}


def patients(many: int) -> Split:
    """Simulated ones, the same for the same number: standard normal covariates, Weibull times."""
    generator = torch.Generator().manual_seed(0)
    total = many + many // 4
    x = torch.randn(total, COVARIATES, generator=generator)
    y = HAZARDS["weibull"].sample(truth(x), generator)
    return Split(x[:many], y[:many], x[many:], y[many:])


def truth(x: Tensor) -> Tensor:
    """The outputs that the patients are drawn from: risks that add up, that multiply, and one with a best value."""
    risk = 0.6 * x[:, 0] - 0.4 * x[:, 1] + 0.5 * x[:, 2] * x[:, 3] + 0.3 * (x[:, 4].square() - 1)
    return torch.stack([risk - 0.7, 0.3 + 0.3 * torch.tanh(x[:, 5])], dim=1)


def compute_true_loss(many: int) -> float:
    """The loss of the truth on the test part."""
    examples = patients(many)
    return HAZARDS["weibull"](truth(examples.test_x), examples.test_y).item()


def sampled_divergence(likelihood: WeibullHazard, before: Tensor, after: Tensor, draws: int = 16) -> Tensor:
    """KL in nats, a mean over patients, from draws of a fixed seed: there is no closed form."""
    generator = torch.Generator(before.device).manual_seed(0)
    drawn = [likelihood.sample(before, generator) for _ in range(draws)]
    ratios = [likelihood.nll(after, targets) - likelihood.nll(before, targets) for targets in drawn]
    divergence = torch.stack(ratios).mean()
    return divergence if math.isnan(divergence) else divergence.clamp(min=1e-12)


GRIDS = {
    "adam": {"lr": (1e-3, 3e-3)},
    "muon": {"lr": (0.01, 0.03), "adam_lr": (3e-3,)},
    "soap": {"lr": (1e-3, 3e-3)},
    "sgd": {"lr": (0.01, 0.03)},
}

RACE = race(
    "survival",
    "Times to an event under a hazard of the user's own",
    SurvivalSettings,
    tasks,
    title="Survival: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=5,
    quick={"seeds": 1, "seconds": 2.0},
)
