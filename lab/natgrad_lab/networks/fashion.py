"""The race of `digits` on Fashion-MNIST: a classifier, and a deep autoencoder on Bernoulli cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from natgrad_lab.data import fashion_mnist
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Task, pair_with_inputs, pair_with_labels
from natgrad_lab.experiments.models import (
    bernoulli_divergence,
    categorical_divergence,
    mirror_sizes,
    mistakes,
    perceptron,
)
from natgrad_lab.experiments.race import RaceSettings, race


@dataclass(frozen=True)
class FashionSettings(RaceSettings):
    """What `--set` can change."""

    seconds: float = 30.0  # of training per run; chosen so that the whole takes about half an hour on two cores
    evaluations: int = 15  # at equal distances of time
    looked_at: int = 10_000  # the first 10,000 training images, and all test images
    threads: int | None = None  # torch's own choice


def tasks(settings: FashionSettings) -> tuple[Task, ...]:
    """The classifier and the autoencoder."""
    return classifier(), autoencoder()


def classifier() -> Task:
    """Cross-entropy of ten classes: the Fisher of a categorical distribution."""
    return Task(
        name="classifier",
        title="Classifier 784-500-250-10, tanh",
        model=lambda: perceptron([784, 500, 250, 10], nn.Tanh),
        data=lambda: pair_with_labels(fashion_mnist().flat()),
        criterion=nn.CrossEntropyLoss(),
        unit="nats per image",
        divergence=categorical_divergence,
        error=mistakes,
        contestants=(
            contestants.natural_gradient(
                contestants.grid(batch=(4000,), metric=(250,), damping=(0.3, 0.1), products=(10, 20))
            ),
            contestants.adam(contestants.grid(batch=(128, 512), lr=(1e-3, 3e-3))),
            contestants.sgd(contestants.grid(batch=(128, 512), lr=(0.1, 0.3))),
        ),
    )


def autoencoder() -> Task:
    """Cross-entropy of every pixel: the Fisher of Bernoulli variables."""
    return Task(
        name="autoencoder",
        title="Autoencoder 784-500-250-30-250-500-784, tanh",
        model=lambda: perceptron(mirror_sizes([784, 500, 250, 30]), nn.Tanh),
        data=lambda: pair_with_inputs(fashion_mnist().flat()),
        criterion=nn.BCEWithLogitsLoss(),
        scale=784.0,  # from the mean over pixels to the cross-entropy of an image
        unit="nats per image",
        divergence=bernoulli_divergence,
        contestants=(
            contestants.natural_gradient(
                contestants.grid(batch=(1000,), metric=(125,), damping=(3e-3, 1e-3), products=(15, 30))
            ),
            contestants.adam(contestants.grid(batch=(128, 512), lr=(1e-3, 3e-3))),
            contestants.sgd(contestants.grid(batch=(128, 512), lr=(1e-3, 3e-3))),
        ),
    )


RACE = race(
    "fashion",
    "The race of `digits` on Fashion-MNIST (needs the data)",
    FashionSettings,
    tasks,
    minutes=30,
    quick={"seeds": 1, "seconds": 1.5, "looked_at": 1000},
)
