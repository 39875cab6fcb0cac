"""The demonstration: a classifier and an autoencoder on the digits that come with scikit-learn.

K-FAC as a drop-in and the matrix-free natural gradient (exact Fisher, truncated Newton) beside SGD with momentum and
Adam, each tuned over a grid of the same size, on equal seconds of training.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from natgrad_lab.data import digits
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Task, pair_with_inputs, pair_with_labels
from natgrad_lab.experiments.models import (
    categorical_divergence,
    gaussian_divergence,
    mirror_sizes,
    mistakes,
    perceptron,
)
from natgrad_lab.experiments.race import RaceSettings, race


@dataclass(frozen=True)
class DigitsSettings(RaceSettings):
    """What `--set` can change."""

    seconds: float = 3.5  # of training per autoencoder run, 0.6 of it per classifier run: three minutes in all
    evaluations: int = 40  # at equal distances of time
    looked_at: int = 10_000  # examples per evaluation at most: here all of them


def tasks(settings: DigitsSettings) -> tuple[Task, ...]:
    """The classifier and the autoencoder."""
    return classifier(), autoencoder()


def classifier() -> Task:
    """Cross-entropy of ten classes: the Fisher of a categorical distribution."""
    return Task(
        name="classifier",
        title="Classifier 64-128-128-10, tanh",
        model=lambda: perceptron([64, 128, 128, 10], nn.Tanh),
        data=lambda: pair_with_labels(digits().flat()),
        criterion=nn.CrossEntropyLoss(),
        unit="nats per image",
        divergence=categorical_divergence,
        error=mistakes,
        share=0.6,
        contestants=(
            contestants.kfac(contestants.grid(batch=(128, 256), damping=(0.03, 0.01))),
            contestants.natural_gradient(
                contestants.grid(batch=(0,), metric=(512,), damping=(0.1, 0.01), products=(15, 30))
            ),
            contestants.adam(contestants.grid(batch=(64, 256), lr=(0.01, 0.03))),
            contestants.sgd(contestants.grid(batch=(64, 256), lr=(0.1, 0.3))),
        ),
    )


def autoencoder() -> Task:
    """Squared error of the reconstruction: the Fisher of a Gaussian."""
    return Task(
        name="autoencoder",
        title="Autoencoder 64-100-50-10-50-100-64, tanh",
        model=lambda: perceptron(mirror_sizes([64, 100, 50, 10]), nn.Tanh),
        data=lambda: pair_with_inputs(digits().flat()),
        criterion=nn.MSELoss(),
        scale=64 / 2,  # from the mean over pixels to half the squared error of an image
        unit="half squared error per image",
        divergence=gaussian_divergence,
        contestants=(
            contestants.kfac(contestants.grid(batch=(256, 512), damping=(0.03, 0.01))),
            contestants.natural_gradient(
                contestants.grid(batch=(0,), metric=(256,), damping=(0.03, 0.01), products=(30, 50))
            ),
            contestants.adam(contestants.grid(batch=(256, 512), lr=(0.003, 0.01))),
            contestants.sgd(contestants.grid(batch=(128, 256), lr=(0.03, 0.05))),
        ),
    )


RACE = race(
    "digits",
    "A classifier and an autoencoder on scikit-learn's digits",
    DigitsSettings,
    tasks,
    title="The natural gradient on digits: K-FAC and truncated Newton beside Adam and SGD",
    minutes=3,
    quick={"seeds": 1, "seconds": 1.0},
)
