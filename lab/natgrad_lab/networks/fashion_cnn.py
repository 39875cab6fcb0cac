"""A small convolutional network with batch norm on Fashion-MNIST."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from natgrad_lab.data import fashion_mnist
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Task, add_channel
from natgrad_lab.experiments.models import classify
from natgrad_lab.experiments.race import RaceSettings, race
from natgrad_lab.experiments.settings import check_counts


@dataclass(frozen=True)
class FashionCnnSettings(RaceSettings):
    """What `--set` can change."""

    looked_at: int = 5000  # the first of the training and of the test images
    methods: str = "structures"  # or names of contestants such as kfac,adam
    filters: int = 16  # of the first convolution; the second has twice as many

    def __post_init__(self) -> None:
        check_counts(self, "filters")


def tasks(settings: FashionCnnSettings) -> tuple[Task, ...]:
    """One task: cross-entropy of ten classes. The layer of the logits is Adam's where Muon has the rest."""
    among = contestants.line_up(256, ("9.weight",), **GRIDS)
    title = f"Fashion-MNIST, {settings.filters} and {2 * settings.filters} filters with batch norm"
    raced = contestants.select(settings.methods, among)
    data = lambda: add_channel(fashion_mnist())  # noqa: E731
    return (classify("fashion", title, lambda: network(settings.filters), data, raced),)


GRIDS = {
    "adam": {"batch": (128,), "lr": (3e-3, 0.01)},
    "muon": {"batch": (128,), "lr": (0.02, 0.05), "adam_lr": (3e-3,)},
    "soap": {"batch": (128,), "lr": (3e-3, 0.01)},
    "sgd": {"batch": (128,), "lr": (0.03, 0.1)},
}


def network(filters: int) -> nn.Sequential:
    """Two convolutions 3 x 3, each with batch norm, rectifier and pooling, and a linear layer; torch's own start."""
    return nn.Sequential(
        *stage(1, filters), *stage(filters, 2 * filters), nn.Flatten(), nn.Linear(2 * filters * 7 * 7, 10)
    )


def stage(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """A convolution without bias, which batch norm has, and what follows it."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)


RACE = race(
    "fashion_cnn",
    "A convolutional network with batch norm on Fashion-MNIST (needs the data)",
    FashionCnnSettings,
    tasks,
    title="A convolutional network with batch norm: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=15,
    quick={"seeds": 1, "seconds": 8.0, "methods": "kfac,adam", "looked_at": 1000},
)
