"""The demonstration: a classifier and an autoencoder on the digits that come with scikit-learn, or on Fashion-MNIST.

K-FAC as a drop-in and the matrix-free natural gradient (exact Fisher, truncated Newton) beside SGD with momentum and
Adam, each tuned over a grid of the same size, on equal seconds of training. On Fashion-MNIST K-FAC does not race.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

import natgrad as ng
from natgrad_lab.data import Split, digits, fashion_mnist
from natgrad_lab.experiments.base import Contestant, Task, pair_with_inputs
from natgrad_lab.experiments.contestants import adam, apply_recipe, grid, natural_gradient, sgd
from natgrad_lab.experiments.models import bernoulli_divergence, classify, gaussian_divergence, mirror_sizes, perceptron
from natgrad_lab.experiments.race import RaceSettings, race


@dataclass(frozen=True)
class DigitsSettings(RaceSettings):
    """What `--set` can change."""

    seconds: float = 3.5  # of training per autoencoder run, 0.6 of it per classifier run: three minutes in all
    evaluations: int = 40  # at equal distances of time
    looked_at: int = 10_000  # examples per evaluation at most: here all of them


@dataclass(frozen=True)
class FashionSettings(RaceSettings):
    """What `--set` can change."""

    seconds: float = 30.0  # of training per run; chosen so that the whole takes about half an hour on two cores
    evaluations: int = 15  # at equal distances of time
    looked_at: int = 10_000  # the first 10,000 training images, and all test images
    threads: int | None = None  # torch's own choice


def on_digits(settings: DigitsSettings) -> tuple[Task, ...]:
    """The classifier; the autoencoder by squared error, the Fisher of a Gaussian."""
    classifier = classify_images(
        digits,
        [64, 128, 128, 10],
        apply_recipe("K-FAC", ng.kfac, grid(batch=(128, 256), damping=(0.03, 0.01))),
        natural_gradient(grid(batch=(0,), metric=(512,), damping=(0.1, 0.01), products=(15, 30))),
        adam(grid(batch=(64, 256), lr=(0.01, 0.03))),
        sgd(grid(batch=(64, 256), lr=(0.1, 0.3))),
        share=0.6,
    )
    autoencoder = Task(
        name="autoencoder",
        title="Autoencoder 64-100-50-10-50-100-64, tanh",
        model=lambda: perceptron(mirror_sizes([64, 100, 50, 10]), nn.Tanh),
        data=lambda: pair_with_inputs(digits().flat()),
        criterion=nn.MSELoss(),
        scale=64 / 2,  # from the mean over pixels to half the squared error of an image
        unit="half squared error per image",
        divergence=gaussian_divergence,
        contestants=(
            apply_recipe("K-FAC", ng.kfac, grid(batch=(256, 512), damping=(0.03, 0.01))),
            natural_gradient(grid(batch=(0,), metric=(256,), damping=(0.03, 0.01), products=(30, 50))),
            adam(grid(batch=(256, 512), lr=(0.003, 0.01))),
            sgd(grid(batch=(128, 256), lr=(0.03, 0.05))),
        ),
    )
    return classifier, autoencoder


def on_fashion(settings: FashionSettings) -> tuple[Task, ...]:
    """The classifier; the autoencoder by cross-entropy of every pixel, the Fisher of Bernoulli variables."""
    classifier = classify_images(
        fashion_mnist,
        [784, 500, 250, 10],
        natural_gradient(grid(batch=(4000,), metric=(250,), damping=(0.3, 0.1), products=(10, 20))),
        adam(grid(batch=(128, 512), lr=(1e-3, 3e-3))),
        sgd(grid(batch=(128, 512), lr=(0.1, 0.3))),
    )
    autoencoder = Task(
        name="autoencoder",
        title="Autoencoder 784-500-250-30-250-500-784, tanh",
        model=lambda: perceptron(mirror_sizes([784, 500, 250, 30]), nn.Tanh),
        data=lambda: pair_with_inputs(fashion_mnist().flat()),
        criterion=nn.BCEWithLogitsLoss(),
        scale=784.0,  # from the mean over pixels to the cross-entropy of an image
        unit="nats per image",
        divergence=bernoulli_divergence,
        contestants=(
            natural_gradient(grid(batch=(1000,), metric=(125,), damping=(3e-3, 1e-3), products=(15, 30))),
            adam(grid(batch=(128, 512), lr=(1e-3, 3e-3))),
            sgd(grid(batch=(128, 512), lr=(1e-3, 3e-3))),
        ),
    )
    return classifier, autoencoder


def classify_images(data: Callable[[], Split], sizes: list[int], *among: Contestant, share: float = 1.0) -> Task:
    """Cross-entropy of ten classes: the Fisher of a categorical distribution."""
    title, model = f"Classifier {'-'.join(map(str, sizes))}, tanh", lambda: perceptron(sizes, nn.Tanh)
    return classify("classifier", title, model, lambda: data().flat(), among, share=share)


RACE = race(
    "digits",
    "A classifier and an autoencoder on scikit-learn's digits",
    DigitsSettings,
    on_digits,
    title="The natural gradient on digits: K-FAC and truncated Newton beside Adam and SGD",
    minutes=3,
    quick={"seeds": 1, "seconds": 1.0},
)
FASHION = race(
    "fashion",
    "The race of `digits` on Fashion-MNIST (needs the data)",
    FashionSettings,
    on_fashion,
    title="Fashion: natural gradient beside Adam and SGD-momentum",
    minutes=30,
    quick={"seeds": 1, "seconds": 1.5, "looked_at": 1000},
)
