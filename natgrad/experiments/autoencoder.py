"""Deep autoencoders on MNIST and on drawn curves: training error against steps and seconds.

The networks are those of Hinton & Salakhutdinov 2006, on which Martens 2010 showed Hessian-free training: matrix-free
methods beside SGD with momentum, Adam and Muon, each tuned over a grid of the same size, on equal seconds of one
thread. 206 nats on MNIST and 125 on the curves are what the mean image scores: a network that ignores its input stays
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from natgrad.data import Split, curves, mnist
from natgrad.experiments import contestants
from natgrad.experiments.frame import Contestant, LabError, Race, Task, reconstructed
from natgrad.experiments.models import bernoulli_divergence, mirrored, squared_error

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    seconds: float = 60.0  # of training per run on MNIST, a third of it on the curves: an hour in all
    steps: int | None = None  # an earlier end of every run
    evaluations: int = 8  # at equal distances of time
    looked_at: int = 2000  # the first of the training and of the test images
    tuning_seed: int = 100  # of the runs over the grids; the race has seeds 0, 1, 2 ...
    threads: int | None = 1
    device: str = "cpu"
    activation: str = (
        "tanh"  # or sigmoid, as in both papers, or relu; tanh chosen because it trains faster for everybody
    )
    start: str = "glorot"  # or sparse, which is Martens'; glorot chosen because it is usual with tanh


def tasks(settings: Settings) -> tuple[Task, ...]:
    """MNIST and the curves."""
    check(settings)
    return (
        task(
            "mnist",
            "MNIST",
            [784, 1000, 500, 250, 30],
            mnist,
            settings,
            mnist_contestants(),
            mean_image=206,
            entropy=46,
        ),
        task(
            "curves",
            "Curves",
            [784, 400, 200, 100, 50, 25, 6],
            curves,
            settings,
            curves_contestants(),
            mean_image=125,
            entropy=40,
            share=1 / 3,
        ),
    )


def task(
    name: str,
    title: str,
    encoder: Sequence[int],
    data: Callable[[], Split],
    settings: Settings,
    among: tuple[Contestant, ...],
    *,
    mean_image: int,
    entropy: int,
    share: float = 1.0,
) -> Task:
    """Cross-entropy of every pixel, summed over an image: the Fisher of Bernoulli variables."""
    return Task(
        name=name,
        title=f"{title}, autoencoder {'-'.join(map(str, encoder))}-..., {settings.activation}",
        model=lambda: network(encoder, ACTIVATIONS[settings.activation], settings.start),
        data=lambda: reconstructed(data().flat()),
        criterion=nn.BCEWithLogitsLoss(),
        scale=784.0,  # from the mean over pixels to the cross-entropy of an image
        unit="nats per image",
        divergence=bernoulli_divergence,
        contestants=among,
        share=share,
        also={"squared_error": squared_error},  # Martens' measure
        note=f"The mean image scores {mean_image} nats. The pixels are grey, so that none can be below {entropy}.",
    )


def mnist_contestants() -> tuple[Contestant, ...]:
    """Grids narrowed by probes with the tuning seed."""
    grid = contestants.grid
    return (
        contestants.natural_gradient(grid(batch=(500, 1000), metric=(250,), damping=(1e-2,), products=(10, 20))),
        contestants.krylov_subspace(grid(batch=(1000,), metric=(250,), search=(250, 500), dimension=(5, 10))),
        contestants.adam(grid(batch=(64, 128), lr=(5e-4, 1e-3))),
        contestants.muon(grid(batch=(512, 1000), lr=(0.05, 0.1), adam_lr=(1e-3,))),
        contestants.sgd(grid(batch=(64, 128), lr=(1e-3, 2e-3))),
    )


def curves_contestants() -> tuple[Contestant, ...]:
    """Grids narrowed by probes with the tuning seed. SGD did not leave the mean image at lower rates, in 15 s."""
    grid = contestants.grid
    return (
        contestants.natural_gradient(grid(batch=(1000,), metric=(250, 500), damping=(1e-3,), products=(20, 40))),
        contestants.krylov_subspace(grid(batch=(1000,), metric=(250,), search=(250, 500), dimension=(5, 10))),
        contestants.adam(grid(batch=(64, 128), lr=(1e-3, 3e-3))),
        contestants.muon(grid(batch=(128, 256), lr=(0.05, 0.1), adam_lr=(1e-3,))),
        contestants.sgd(grid(batch=(128,), lr=(3e-3, 0.01, 0.03, 0.1))),
    )


def network(encoder: Sequence[int], activation: type[nn.Module], start: str) -> nn.Sequential:
    """The encoder and its mirror image; linear in the code and in the logits of the pixels, as both papers have it."""
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(pairwise(mirrored(encoder)), start=1):
        linear = nn.Linear(inputs, outputs)
        STARTS[start](linear)
        layers += [linear] if place == len(encoder) - 1 else [linear, activation()]
    return nn.Sequential(*layers[:-1])


def glorot(linear: nn.Linear) -> None:
    """Uniform weights of variance 2 / (inputs + outputs), no biases. Glorot & Bengio 2010."""
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)


@torch.no_grad()
def sparse(linear: nn.Linear, inputs: int = 15) -> None:
    """Every unit hears 15 random inputs with standard normal weights; no biases. Martens 2010, section 5."""
    heard = torch.rand_like(linear.weight).argsort(1).argsort(1) < inputs
    linear.weight.copy_(torch.randn_like(linear.weight) * heard)
    nn.init.zeros_(linear.bias)


STARTS = {"glorot": glorot, "sparse": sparse}


def check(settings: Settings) -> None:
    """LabError for a word that no setting knows."""
    for name, known in (("activation", ACTIVATIONS), ("start", STARTS)):
        word = getattr(settings, name)
        if word not in known:
            raise LabError(
                f"{name} is {word!r}, expected one of {', '.join(known)}: use --set {name}={next(iter(known))}"
            )


RACE = Race(
    "autoencoder",
    "Deep autoencoders on MNIST and drawn curves (needs the data; an hour on one core)",
    Settings,
    tasks,
    title="Deep autoencoders: matrix-free methods beside Adam, Muon and SGD",
)
