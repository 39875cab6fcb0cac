"""Deep autoencoders on MNIST, on drawn curves and on digits: training error against steps and seconds.

The networks of the first two are those of Hinton & Salakhutdinov 2006, on which Martens 2010 showed Hessian-free
training: structured or matrix-free methods beside SGD with momentum, Adam, Muon and SOAP, on equal seconds of one
thread. Structured methods run with their defaults, all others are tuned over grids of one size. 206 nats on MNIST,
125 on the curves and 27 on the digits are what the average image scores: a network that ignores its input stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import nn

from natgrad_lab.data import Split, curves, digits, mnist
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Task, pair_with_inputs
from natgrad_lab.experiments.models import bernoulli_divergence, glorot, mirror_sizes, squared_error
from natgrad_lab.experiments.race import RaceSettings, race
from natgrad_lab.experiments.settings import check_counts, check_word, split_words

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
GROUPS = {**contestants.GROUPS, "matrix_free": ("hessian_free", "krylov_subspace", "adam", "muon", "sgd")}
GROUPS["all"] = tuple(dict.fromkeys(GROUPS["structures"] + GROUPS["matrix_free"]))


@dataclass(frozen=True)
class AutoencoderSettings(RaceSettings):
    """What `--set` can change."""

    seconds: float = 60.0  # of training per run on MNIST, a third of it on the curves, a thirtieth on the digits
    looked_at: int = 2000  # the first of the training and of the test images
    activation: str = "tanh"  # or sigmoid, as in both papers, or relu; tanh trains faster for everybody
    start: str = "torch"  # torch's own; or glorot, usual with tanh; or sparse, which is Martens'
    data: str = "mnist,curves"  # words among mnist, curves and digits
    methods: str = "structures"  # or matrix_free, all, or names of contestants such as kfac,adam
    choices: int | None = None  # the first of every grid that are tried; none for all

    def __post_init__(self) -> None:
        check_word(self, "activation", ACTIVATIONS)
        check_word(self, "start", STARTS)
        split_words("data", self.data, IMAGE_SETS)
        if self.choices is not None:
            check_counts(self, "choices")


def tasks(settings: AutoencoderSettings) -> tuple[Task, ...]:
    """Those of the data that the settings name."""
    words = split_words("data", settings.data, IMAGE_SETS)
    return tuple(task(images, settings) for name, images in IMAGE_SETS.items() if name in words)


@dataclass(frozen=True)
class ImageSet:
    """What a network learns to compress, and how."""

    name: str  # of the task
    title: str  # of its table
    data: Callable[[], Split]  # reads the images
    encoder: tuple[int, ...]  # sizes of the layers
    mean_image: int  # nats that the average image scores
    entropy: int  # nats below which none can score
    share: float = 1.0  # of the settings' seconds
    batch: int = 500  # of the recipes
    grids: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)  # of the others


DEEP_MNIST = ImageSet(
    *("mnist", "MNIST", mnist, (784, 1000, 500, 250, 30), 206, 46),
    grids={
        "hessian_free": {"batch": (500, 1000), "metric": (250,), "damping": (1e-2,), "products": (10, 20)},
        "krylov_subspace": {"batch": (1000,), "metric": (250,), "search": (250, 500), "dimension": (5, 10)},
        "adam": {"batch": (128, 64), "lr": (1e-3, 5e-4)},
        "muon": {"batch": (512, 1000), "lr": (0.1, 0.05), "adam_lr": (1e-3,)},
        "soap": {"batch": (512, 256), "lr": (0.01, 0.03)},
        "sgd": {"batch": (64, 128), "lr": (2e-3, 1e-3)},
    },
)
DEEP_CURVES = ImageSet(
    *("curves", "Curves", curves, (784, 400, 200, 100, 50, 25, 6), 125, 40, 1 / 3),
    grids={
        "hessian_free": {"batch": (1000,), "metric": (250, 500), "damping": (1e-3,), "products": (20, 40)},
        "krylov_subspace": {"batch": (1000,), "metric": (250,), "search": (250, 500), "dimension": (5, 10)},
        "adam": {"batch": (64, 128), "lr": (1e-3, 3e-3)},
        "muon": {"batch": (128, 256), "lr": (0.05, 0.1), "adam_lr": (1e-3,)},
        "soap": {"batch": (128, 256), "lr": (1e-3, 3e-3)},
        "sgd": {"batch": (128,), "lr": (3e-3, 0.01, 0.03, 0.1)},  # at lower rates the average image alone, in 15 s
    },
)
DEEP_DIGITS = ImageSet(  # for a quick look, without any file of data
    *("digits", "Digits", digits, (64, 100, 50, 10), 27, 14, 1 / 30, 256),
    grids={
        "hessian_free": {"batch": (0,), "metric": (256,), "damping": (0.03, 0.01), "products": (30, 50)},
        "krylov_subspace": {"batch": (512,), "metric": (256,), "search": (128, 256), "dimension": (10, 20)},
        "adam": {"batch": (64, 256), "lr": (3e-3, 1e-2)},
        "muon": {"batch": (64, 256), "lr": (0.03, 0.1), "adam_lr": (3e-3,)},
        "soap": {"batch": (64, 256), "lr": (3e-3, 1e-2)},
        "sgd": {"batch": (64, 256), "lr": (0.01, 0.03)},
    },
)
IMAGE_SETS = {images.name: images for images in (DEEP_MNIST, DEEP_CURVES, DEEP_DIGITS)}


def task(images: ImageSet, settings: AutoencoderSettings) -> Task:
    """Cross-entropy of every pixel, summed over an image: the Fisher of Bernoulli variables."""
    among = contestants.line_up(images.batch, **images.grids)
    chosen = contestants.select(settings.methods, among, GROUPS)
    return Task(
        name=images.name,
        title=f"{images.title}, autoencoder {'-'.join(map(str, images.encoder))}-..., {settings.activation}",
        model=lambda: network(images.encoder, ACTIVATIONS[settings.activation], settings.start),
        data=lambda: pair_with_inputs(images.data().flat()),
        criterion=nn.BCEWithLogitsLoss(),
        scale=float(images.encoder[0]),  # from the mean over pixels to the cross-entropy of an image
        unit="nats per image",
        divergence=bernoulli_divergence,
        contestants=tuple(replace(contestant, grid=contestant.grid[: settings.choices]) for contestant in chosen),
        share=images.share,
        also={"squared_error": squared_error},  # Martens' measure
        note=f"The average image scores {images.mean_image} nats. The pixels are grey, so that none can be below "
        f"{images.entropy}.",
    )


def network(encoder: Sequence[int], activation: type[nn.Module], start: str) -> nn.Sequential:
    """The encoder and its mirror image; linear in the code and in the logits of the pixels, as both papers have it."""
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(pairwise(mirror_sizes(encoder)), start=1):
        linear = nn.Linear(inputs, outputs)
        STARTS[start](linear)
        layers += [linear] if place == len(encoder) - 1 else [linear, activation()]
    return nn.Sequential(*layers[:-1])


def own(linear: nn.Linear) -> None:
    """What torch drew: weights and biases uniform within 1 / inputs^1/2."""


@torch.no_grad()
def sparse(linear: nn.Linear, inputs: int = 15) -> None:
    """Every unit hears 15 random inputs with standard normal weights; no biases. Martens 2010, section 5."""
    drawn = torch.rand_like(linear.weight).argsort(1).argsort(1) < inputs
    linear.weight.copy_(torch.randn_like(linear.weight) * drawn)
    nn.init.zeros_(linear.bias)


STARTS = {"torch": own, "glorot": glorot, "sparse": sparse}


RACE = race(
    "autoencoder",
    "Deep autoencoders on MNIST and drawn curves (needs the data)",
    AutoencoderSettings,
    tasks,
    title="Deep autoencoders: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=60,
    quick={"seeds": 1, "seconds": 150.0, "methods": "kfac,adam", "data": "digits"},
)
