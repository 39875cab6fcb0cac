"""The networks of `python -m benchmarks step`: what is trained, on what, for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from sklearn import datasets
from torch import nn

from benchmarks import other_workloads as other
from benchmarks.other_workloads import dense
from natgrad_lab.data import Split, fashion_mnist, mnist
from natgrad_lab.experiments import Task, TaskData
from natgrad_lab.experiments.base import pair_with_labels
from natgrad_lab.experiments.models import categorical_divergence, gaussian_divergence, mistakes
from natgrad_lab.networks import (
    autoencoder,
    char_transformer,
    fashion_cnn,
    llama_text,
    survival,
    vae_mnist,
    vit_cifar,
)
from natgrad_lab.networks.scaled_blocks import scaled_data, scaled_net

Rates = Mapping[str, tuple[float, ...]]
# Of losses that are sums over the pixels of an image.
SUMMED: Rates = {
    "muon": (0.01, 0.02, 0.05, 0.1, 0.2),
    "adam": (2e-4, 5e-4, 1e-3, 3e-3, 6e-3),
    "adamw": (2e-4, 5e-4, 1e-3, 3e-3, 6e-3),
    "sgd": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
}


# Of networks whose inputs are multiplied by 30 in each layer.
SINES: Rates = {
    "muon": (1e-3, 3e-3, 0.01, 0.03, 0.1),
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
    "adamw": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
    "soap": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
    "sgd": (1e-4, 3e-4, 1e-3, 3e-3, 0.01),
}


@dataclass(frozen=True)
class StepWorkload:
    """A task and its budgets.

    make(): the task; its own contestants are not looked at. but: matrices that are Adam's where Muon has the rest.
    steps, seconds: the lengths of the races; those of seconds are on one thread. rates: a peer's own five.
    """

    make: Callable[[], Task]
    batch: int
    steps: tuple[int, ...]
    seconds: tuple[float, ...] = ()
    but: tuple[str, ...] = ()
    rates: Rates = field(default_factory=dict)
    looked_at: int = 500


def characters(layers: int, width: int) -> Task:
    return char_transformer.tasks(char_transformer.CharTransformerSettings(methods="adam", layers=layers, width=width))[
        0
    ]


def llama(tied: bool) -> Task:
    return llama_text.tasks(llama_text.LlamaTextSettings(methods="adam", tied=tied))[0]


def cifar(network: str) -> Task:
    return vit_cifar.tasks(vit_cifar.VitCifarSettings(methods="adam", networks=network))[0]


def deep(data: str, start: str) -> Task:
    return autoencoder.tasks(autoencoder.AutoencoderSettings(methods="adam", data=data, start=start))[0]


def table(name: str, regression: bool, widths: tuple[int, ...], activation: type[nn.Module] = nn.Tanh) -> Task:
    """A network on one of scikit-learn's tables, standardised; a fifth of the rows to test."""
    return Task(
        name=name,
        title=f"{name}, {'-'.join(map(str, widths))}",
        model=lambda: dense(widths, activation),
        data=lambda: rows_of(name, regression),
        criterion=nn.MSELoss() if regression else nn.CrossEntropyLoss(),
        unit="squared error" if regression else "nats per row",
        divergence=gaussian_divergence if regression else categorical_divergence,
        error=None if regression else mistakes,
        contestants=(),
    )


def rows_of(name: str, regression: bool) -> TaskData:
    """A table by scikit-learn's name for it."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y, cut = x[order], y[order], len(x) * 4 // 5
    x = (x - x[:cut].mean(0)) / x[:cut].std(0).clamp(min=1e-6)
    y = ((y - y[:cut].mean()) / y[:cut].std()).float().unsqueeze(1) if regression else y.long()
    return TaskData(x[:cut], y[:cut], x[cut:], y[cut:])


def plain(name: str, images: Callable[[], Split], widths: tuple[int, ...]) -> Task:
    """Linear layers and rectifiers on images as they are, pixels in [0, 1]."""
    return Task(
        name=name,
        title=f"{name}, {'-'.join(map(str, widths))}",
        model=lambda: dense(widths, nn.ReLU),
        data=lambda: pair_with_labels(images().flat()),
        criterion=nn.CrossEntropyLoss(),
        unit="nats per image",
        divergence=categorical_divergence,
        error=mistakes,
        contestants=(),
    )


def sigmoid() -> Task:
    """Six layers of sigmoids on the digits: a plateau that plain gradients hardly leave."""
    made = table("digits", False, (64, *[64] * 6, 10), nn.Sigmoid)
    return replace(made, name="sigmoid", title="digits, six layers of sigmoids")


def scaled_blocks(kind: str, gamma: float) -> Task:
    """Blocks x + gamma f(norm(x))."""
    dim = -1 if kind == "convolution" else 1

    def data() -> TaskData:
        x, y = scaled_data(kind, 1280)
        return TaskData(x[:1024], y[:1024], x[1024:], y[1024:])

    return Task(
        name=f"{kind}-{gamma:g}",
        title=f"blocks with a scale of {gamma:g}, {kind}",
        model=lambda: scaled_net(kind, gamma),
        data=data,
        criterion=nn.CrossEntropyLoss(),
        unit="nats per label",
        divergence=partial(categorical_divergence, dim=dim),
        error=partial(mistakes, dim=dim),
        contestants=(),
    )


TEXT, LLAMA = ("symbol.weight", "place.weight", "head.weight"), ("symbol.weight", "head.weight")
WORKLOADS: dict[str, StepWorkload] = {
    "char": StepWorkload(lambda: characters(2, 128), 32, (200, 400), (30.0,), TEXT, looked_at=64),
    "char-wide": StepWorkload(lambda: characters(4, 192), 32, (200,), (), TEXT, looked_at=64),
    "llama": StepWorkload(lambda: llama(False), 32, (200,), (30.0,), LLAMA, looked_at=64),
    "llama-tied": StepWorkload(lambda: llama(True), 32, (200,), (), LLAMA, looked_at=64),
    "fashion-cnn": StepWorkload(
        lambda: fashion_cnn.tasks(fashion_cnn.FashionCnnSettings(methods="adam"))[0],
        128,
        (150, 600),
        (15.0,),
        ("9.weight",),
    ),
    "resnet": StepWorkload(lambda: cifar("resnet"), 64, (150,), (60.0,), ("head.weight",), looked_at=250),
    "vit": StepWorkload(lambda: cifar("vit"), 64, (200,), (60.0,), ("place", "head.weight"), looked_at=250),
    "autoencoder": StepWorkload(lambda: deep("mnist", "torch"), 500, (80,), (60.0,), rates=SUMMED),
    "autoencoder-glorot": StepWorkload(lambda: deep("mnist", "glorot"), 500, (80,), (60.0,), rates=SUMMED),
    "curves": StepWorkload(lambda: deep("curves", "torch"), 500, (80,), (10.0,), rates=SUMMED),
    "digits-autoencoder": StepWorkload(lambda: deep("digits", "torch"), 256, (200,), (), rates=SUMMED),
    "plain-fashion": StepWorkload(
        lambda: plain("plain-fashion", fashion_mnist, (784, 256, 256, 10)),
        32,
        (300,),
        (),
        ("4.weight",),
        looked_at=5000,
    ),
    "plain-mnist": StepWorkload(
        lambda: plain("plain-mnist", mnist, (784, 512, 512, 10)), 64, (300,), (), ("4.weight",), looked_at=5000
    ),
    "mnist-16": StepWorkload(
        lambda: plain("mnist-16", mnist, (784, 128, 128, 10)), 16, (150,), (), ("4.weight",), looked_at=4000
    ),
    "mnist-2000": StepWorkload(
        lambda: plain("mnist-2000", mnist, (784, 128, 128, 10)), 2000, (25,), (), ("4.weight",), looked_at=4000
    ),
    "vae": StepWorkload(
        lambda: vae_mnist.tasks(vae_mnist.VaeSettings(methods="adam"))[0], 128, (300,), (20.0,), rates=SUMMED
    ),
    "digits": StepWorkload(lambda: table("digits", False, (64, 128, 128, 10)), 256, (100,), ()),
    "wine": StepWorkload(lambda: table("wine", False, (13, 32, 32, 3)), 64, (60,), ()),
    "cancer": StepWorkload(lambda: table("breast_cancer", False, (30, 32, 32, 2)), 64, (60,), ()),
    "diabetes": StepWorkload(lambda: table("diabetes", True, (10, 32, 32, 1)), 64, (60,), ()),
    "sigmoid": StepWorkload(sigmoid, 256, (300,), ()),
    "survival": StepWorkload(
        lambda: survival.tasks(survival.SurvivalSettings(methods="adam"))[0], 128, (200,), (), ("4.weight",)
    ),
    "mixer": StepWorkload(other.mixer, 24, (100,), (), ("head.weight",)),
    "gru": StepWorkload(other.gru, 12, (100,), (), ("symbol.weight", "head.weight"), looked_at=64),
    "gcn": StepWorkload(other.gcn, 32, (100,), (), ("head.weight",), looked_at=250),
    "denoiser": StepWorkload(other.denoiser, 256, (150,), (), ("body.6.weight",), looked_at=3000),
    "siren": StepWorkload(other.siren, 1024, (150,), (), ("layers.0.weight", "head.weight"), SINES, looked_at=4608),
    "kin8nm": StepWorkload(other.kin8nm, 128, (150,), (), ("6.weight",), looked_at=2000),
    "protein": StepWorkload(other.protein, 64, (100,), (), ("head.weight", "scale", "shift", "answer"), looked_at=1000),
} | {
    f"{name}-{gamma:g}": StepWorkload(
        partial(scaled_blocks, kind, gamma), 64, (150,), (), but=("symbol.weight", "head.weight")
    )
    for name, kind in (("convnext", "convolution"), ("eva", "attention"), ("mamba", "scan"))
    for gamma in (1e-6, 1e-3, 1.0)
}

SUITES: dict[str, dict[str, tuple[int, float]]] = {
    "chosen": {
        "digits-autoencoder": (100, 0.5),
        "sigmoid": (200, 0.8),
        "digits": (100, 0.35),
        "mnist-16": (150, 0.8),
        "mnist-2000": (25, 0.8),
        "siren": (150, 0.6),
        "mixer": (100, 1.6),
        "gru": (100, 1.0),
        "char": (100, 9.0),
    },
    "judged": {
        "survival": (120, 0.25),
        "diabetes": (60, 0.14),
        "wine": (60, 0.14),
        "kin8nm": (150, 0.6),
        "protein": (100, 1.2),
        "gcn": (100, 0.7),
        "denoiser": (150, 0.5),
        "fashion-cnn": (60, 2.6),
    },
}
"""Workloads that the default rule was chosen on, and others: steps, and the CPU seconds that they took it, about."""
