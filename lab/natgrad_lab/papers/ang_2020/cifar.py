"""Ang 2020, figures 2 and 3: a DenseNet and a WideResNet on CIFAR-10, precision against epochs and seconds.

The report's own runs used Kaldi's online metric, beside SGD, Adam and a diagonal Fisher; K-FAC is added. The
structured methods run with their defaults, SGD and Adam are tuned over two rates each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad_lab.data import cifar10
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import LabError, Task, standardise_pictures
from natgrad_lab.experiments.models import classify, precision
from natgrad_lab.experiments.race import race
from natgrad_lab.experiments.settings import StudySettings, fill, require_size, split_words

METHODS = ("kfac", "online_ng", "diagonal", "sgd", "adam")
LARGE = {"images": 10_000, "side": 32, "epochs": 50, "dense_depth": 19, "growth": 12, "wide_depth": 16, "width": 4}
SMALL = {"images": 2000, "side": 16, "epochs": 8, "dense_depth": 10, "growth": 8, "wide_depth": 10, "width": 1}


@dataclass(frozen=True)
class AngCifarSettings(StudySettings):
    """What `--set` can change. full=true is nearer to the report's size; what stays none comes from there or here."""

    # the report says DenseNet-19, WideResNet and 50 epochs, and nothing of growth, width, batch or augmentation

    full: bool = False  # nearer to the report's size
    images: int | None = None  # of the training set, its first
    side: int | None = None  # pixels: 32, or 16, or 8 as means of neighbours
    epochs: int | None = None  # of each run
    batch: int = 64  # images per step
    dense_depth: int | None = None  # layers of the DenseNet
    growth: int | None = None  # channels that a layer of the DenseNet adds
    wide_depth: int | None = None  # layers of the WideResNet
    width: int | None = None  # times 16 channels in the WideResNet
    steps: int | None = None  # the end of every run; what stays none follows from the epochs
    evaluations: int | None = None  # at equal distances of steps; what stays none is once per epoch
    looked_at: int = 2000  # images of each part per evaluation, at most
    recalibrate: bool = True  # batch norm's statistics on the training images looked at, anew before each evaluation
    tuning_seed: int = 100
    networks: str = "densenet,wide_resnet"  # which of the two, comma-separated
    methods: str = "report"  # or names of contestants such as kfac,adam

    def __post_init__(self) -> None:
        fill(self, LARGE if self.full else SMALL)
        per_epoch = require_size(self.images) // self.batch if self.batch > 0 else 0
        if per_epoch < 1:
            raise LabError(f"batch is {self.batch}, expected 1 to {self.images}, the number of images")
        if self.side not in (8, 16, 32):
            raise LabError(f"side is {self.side}, expected 8, 16 or 32")
        fill(self, {"steps": require_size(self.epochs) * per_epoch, "evaluations": require_size(self.epochs)})


def tasks(settings: AngCifarSettings) -> tuple[Task, ...]:
    """One for each network: cross-entropy of ten classes, and the precision that the report plots."""
    dense_depth, growth = require_size(settings.dense_depth), require_size(settings.growth)
    wide_depth, width = require_size(settings.wide_depth), require_size(settings.width)
    networks: dict[str, tuple[str, Callable[[], nn.Module]]] = {
        "densenet": (f"Figure 2: DenseNet-{dense_depth}, growth {growth}", lambda: dense_net(dense_depth, growth)),
        "wide_resnet": (f"Figure 3: WideResNet-{wide_depth}-{width}", lambda: wide_resnet(wide_depth, width)),
    }
    words = split_words("networks", settings.networks, networks)
    # grids narrowed by probes with the tuning seed
    among = contestants.line_up(settings.batch, sgd={"lr": (0.02, 0.1)}, adam={"lr": (1e-3, 5e-3)})
    return tuple(
        classify(
            name,
            f"{title}, {settings.images} images of {settings.side} x {settings.side}",
            model,
            lambda: standardise_pictures(cifar10(), require_size(settings.images), require_size(settings.side)),
            contestants.select(settings.methods, among, {"report": METHODS}),
            also={"precision": precision},
            recalibrated_on=settings.looked_at if settings.recalibrate else 0,
            note="Precision is the mean over classes of the share of images that rightly got the class.",
        )
        for name, (title, model) in networks.items()
        if name in words
    )


def dense_net(depth: int, growth: int, classes: int = 10) -> nn.Sequential:
    """Three blocks in which every convolution sees all the channels before it. Huang et al. 2018, no bottlenecks."""
    if depth < 7 or (depth - 4) % 3:
        raise LabError(f"depth is {depth}, expected 3 n + 4 for a DenseNet: 7, 10, 13, 16, 19, 22 ...")
    channels, layers = 2 * growth, list[nn.Module]()
    for block in range(3):
        layers += [nn.Sequential(*activate_and_convolve(channels, channels, 1), nn.AvgPool2d(2))] if block else []
        for _ in range((depth - 4) // 3):
            layers.append(Joined(channels, growth))
            channels += growth
    return nn.Sequential(start(2 * growth), *layers, *read_out(channels, classes))


def wide_resnet(depth: int, width: int, classes: int = 10) -> nn.Sequential:
    """Three groups of residual blocks with 16, 32, 64 times `width` channels. Zagoruyko & Komodakis 2017."""
    if depth < 10 or (depth - 4) % 6:
        raise LabError(f"depth is {depth}, expected 6 n + 4 for a WideResNet: 10, 16, 22, 28 ...")
    channels, layers = 16, list[nn.Module]()
    for group in range(3):
        for block in range((depth - 4) // 6):
            layers.append(PreActivationBlock(channels, 16 * width * 2**group, stride=2 if group and not block else 1))
            channels = 16 * width * 2**group
    return nn.Sequential(start(16), *layers, *read_out(channels, classes))


class Joined(nn.Module):
    """(b, c, h, w) -> (b, c + growth, h, w): the input, and what a convolution makes of it."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.convolution = nn.Sequential(*activate_and_convolve(channels, growth, 3))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images, self.convolution(images)], 1)


class PreActivationBlock(nn.Module):
    """The input, or a 1 x 1 convolution of it where the shape changes, plus two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *activate_and_convolve(inputs, outputs, 3, stride), *activate_and_convolve(outputs, outputs, 3)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.shortcut(images) + self.convolutions(images)


def start(channels: int) -> nn.Conv2d:
    """The first convolution, of three colours."""
    return nn.Conv2d(3, channels, 3, padding=1, bias=False)


def activate_and_convolve(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Batch norm, rectifier, convolution."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.BatchNorm2d(inputs), nn.ReLU(), convolution


def read_out(channels: int, classes: int) -> tuple[nn.Module, ...]:
    """Batch norm, rectifier, the mean over pixels, a linear layer."""
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.BatchNorm2d(channels), nn.ReLU(), *pool, nn.Linear(channels, classes)


RACE = race(
    "ang_2020_cifar",
    "Ang 2020, figures 2 and 3: DenseNet and WideResNet on CIFAR-10 (needs the data)",
    AngCifarSettings,
    tasks,
    title="Ang 2020, figures 2 and 3: image classifiers on CIFAR-10",
    minutes=15,
    paper={"full": True},
    quick={"seeds": 1, "images": 500, "side": 8, "epochs": 3, "looked_at": 200},
)
