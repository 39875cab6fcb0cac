"""Deep autoencoders on MNIST, on drawn curves and on digits: training error against steps and seconds.

The networks of the first two are those of Hinton & Salakhutdinov 2006, on which Martens 2010 showed Hessian-free
training: structured or matrix-free methods beside SGD with momentum, Adam, Muon and SOAP, on equal seconds of one
thread. Structured methods run with their defaults, all others are tuned over grids of one size. 206 nats on MNIST,
125 on the curves and 27 on the digits are what the average image scores: a network that ignores its input stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from natgrad_lab.data import Split, curves, digits, mnist
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Contestant, LabError, Task, pair_with_inputs
from natgrad_lab.experiments.models import bernoulli_divergence, mirror_sizes, squared_error
from natgrad_lab.experiments.race import RaceSettings, race

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
GROUPS = {
    **contestants.GROUPS,
    "matrix_free": ("hessian_free", "krylov_subspace", "adam", "muon", "sgd"),
}
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


def tasks(settings: AutoencoderSettings) -> tuple[Task, ...]:
    """Those of the data that the settings name."""
    words = settings.data.split(",")
    check("activation", settings.activation, ACTIVATIONS)
    check("start", settings.start, STARTS)
    for word in words:
        check("data", word, TASKS)
    return tuple(build(settings) for name, build in TASKS.items() if name in words)


def of_mnist(settings: AutoencoderSettings) -> Task:
    """784-1000-500-250-30 and back."""
    images = ImageSet("mnist", "MNIST", mnist, mean_image=206, entropy=46)
    return task(images, [784, 1000, 500, 250, 30], settings, select_contestants(settings, mnist_contestants()))


def of_curves(settings: AutoencoderSettings) -> Task:
    """784-400-200-100-50-25-6 and back."""
    images = ImageSet("curves", "Curves", curves, mean_image=125, entropy=40, share=1 / 3)
    return task(images, [784, 400, 200, 100, 50, 25, 6], settings, select_contestants(settings, curves_contestants()))


def of_digits(settings: AutoencoderSettings) -> Task:
    """64-100-50-10 and back: for a quick look, without any file of data."""
    images = ImageSet("digits", "Digits", digits, mean_image=27, entropy=14, share=1 / 30)
    return task(images, [64, 100, 50, 10], settings, select_contestants(settings, digits_contestants()))


TASKS = {"mnist": of_mnist, "curves": of_curves, "digits": of_digits}


@dataclass(frozen=True)
class ImageSet:
    """What a network learns to compress."""

    name: str  # of the task
    title: str  # of its table
    data: Callable[[], Split]  # reads the images
    mean_image: int  # nats that the average image scores
    entropy: int  # nats below which none can score
    share: float = 1.0  # of the settings' seconds


def task(
    images: ImageSet, encoder: Sequence[int], settings: AutoencoderSettings, among: tuple[Contestant, ...]
) -> Task:
    """Cross-entropy of every pixel, summed over an image: the Fisher of Bernoulli variables."""
    return Task(
        name=images.name,
        title=f"{images.title}, autoencoder {'-'.join(map(str, encoder))}-..., {settings.activation}",
        model=lambda: network(encoder, ACTIVATIONS[settings.activation], settings.start),
        data=lambda: pair_with_inputs(images.data().flat()),
        criterion=nn.BCEWithLogitsLoss(),
        scale=float(encoder[0]),  # from the mean over pixels to the cross-entropy of an image
        unit="nats per image",
        divergence=bernoulli_divergence,
        contestants=among,
        share=images.share,
        also={"squared_error": squared_error},  # Martens' measure
        note=f"The average image scores {images.mean_image} nats. The pixels are grey, so that none can be below "
        f"{images.entropy}.",
    )


def select_contestants(settings: AutoencoderSettings, among: Mapping[str, Contestant]) -> tuple[Contestant, ...]:
    """Those that the settings name, with as much of their grids."""
    if settings.choices is not None and settings.choices < 1:
        raise LabError(f"choices is {settings.choices}, expected at least 1, or none for the whole grids")
    chosen = contestants.select(settings.methods, among, GROUPS)
    return tuple(replace(contestant, grid=contestant.grid[: settings.choices]) for contestant in chosen)


def mnist_contestants() -> Mapping[str, Contestant]:
    """Grids narrowed by probes with the tuning seed."""
    grid = contestants.grid
    return contestants.by_default(batch=500) | {
        "hessian_free": contestants.natural_gradient(
            grid(batch=(500, 1000), metric=(250,), damping=(1e-2,), products=(10, 20))
        ),
        "krylov_subspace": contestants.krylov_subspace(
            grid(batch=(1000,), metric=(250,), search=(250, 500), dimension=(5, 10))
        ),
        "adam": contestants.adam(grid(batch=(128, 64), lr=(1e-3, 5e-4))),
        "muon": contestants.muon(grid(batch=(512, 1000), lr=(0.1, 0.05), adam_lr=(1e-3,))),
        "soap": contestants.soap(grid(batch=(512, 256), lr=(0.01, 0.03))),
        "sgd": contestants.sgd(grid(batch=(64, 128), lr=(2e-3, 1e-3))),
    }


def curves_contestants() -> Mapping[str, Contestant]:
    """Grids narrowed by probes with the tuning seed. SGD learned only the average image at lower rates, in 15 s."""
    grid = contestants.grid
    return contestants.by_default(batch=500) | {
        "hessian_free": contestants.natural_gradient(
            grid(batch=(1000,), metric=(250, 500), damping=(1e-3,), products=(20, 40))
        ),
        "krylov_subspace": contestants.krylov_subspace(
            grid(batch=(1000,), metric=(250,), search=(250, 500), dimension=(5, 10))
        ),
        "adam": contestants.adam(grid(batch=(64, 128), lr=(1e-3, 3e-3))),
        "muon": contestants.muon(grid(batch=(128, 256), lr=(0.05, 0.1), adam_lr=(1e-3,))),
        "soap": contestants.soap(grid(batch=(128, 256), lr=(1e-3, 3e-3))),
        "sgd": contestants.sgd(grid(batch=(128,), lr=(3e-3, 0.01, 0.03, 0.1))),
    }


def digits_contestants() -> Mapping[str, Contestant]:
    """Grids narrowed by probes with the tuning seed."""
    grid = contestants.grid
    return contestants.by_default(batch=256) | {
        "hessian_free": contestants.natural_gradient(
            grid(batch=(0,), metric=(256,), damping=(0.03, 0.01), products=(30, 50))
        ),
        "krylov_subspace": contestants.krylov_subspace(
            grid(batch=(512,), metric=(256,), search=(128, 256), dimension=(10, 20))
        ),
        "adam": contestants.adam(grid(batch=(64, 256), lr=(3e-3, 1e-2))),
        "muon": contestants.muon(grid(batch=(64, 256), lr=(0.03, 0.1), adam_lr=(3e-3,))),
        "soap": contestants.soap(grid(batch=(64, 256), lr=(3e-3, 1e-2))),
        "sgd": contestants.sgd(grid(batch=(64, 256), lr=(0.01, 0.03))),
    }


def network(encoder: Sequence[int], activation: type[nn.Module], start: str) -> nn.Sequential:
    """The encoder and its mirror image; linear in the code and in the logits of the pixels, as both papers have it."""
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(pairwise(mirror_sizes(encoder)), start=1):
        linear = nn.Linear(inputs, outputs)
        STARTS[start](linear)
        layers += [linear] if place == len(encoder) - 1 else [linear, activation()]
    return nn.Sequential(*layers[:-1])


def glorot(linear: nn.Linear) -> None:
    """Uniform weights of variance 2 / (inputs + outputs), no biases. Glorot & Bengio 2010."""
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)


def own(linear: nn.Linear) -> None:
    """What torch drew: weights and biases uniform within 1 / inputs^1/2."""


@torch.no_grad()
def sparse(linear: nn.Linear, inputs: int = 15) -> None:
    """Every unit hears 15 random inputs with standard normal weights; no biases. Martens 2010, section 5."""
    heard = torch.rand_like(linear.weight).argsort(1).argsort(1) < inputs
    linear.weight.copy_(torch.randn_like(linear.weight) * heard)
    nn.init.zeros_(linear.bias)


STARTS = {"torch": own, "glorot": glorot, "sparse": sparse}


def check(name: str, word: str, known: Mapping[str, object]) -> None:
    """LabError for a word that no setting knows."""
    if word not in known:
        raise LabError(f"{name} is {word!r}, expected one of {', '.join(known)}: use --set {name}={next(iter(known))}")


RACE = race(
    "autoencoder",
    "Deep autoencoders on MNIST and drawn curves (needs the data)",
    AutoencoderSettings,
    tasks,
    title="Deep autoencoders: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=60,
    quick={"seeds": 1, "seconds": 150.0, "methods": "kfac,adam", "data": "digits"},
)
