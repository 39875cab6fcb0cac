"""Ang 2020, figures 2 and 3: a DenseNet and a WideResNet on CIFAR-10, precision against epochs and seconds.

The report's own runs used Kaldi's online metric, beside SGD, Adam and a diagonal Fisher; K-FAC is added. The
structured methods run with their defaults, SGD and Adam are tuned over two rates each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from natgrad_lab.data import cifar10
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Contestant, LabError, Task, TaskData
from natgrad_lab.experiments.models import categorical_divergence, mistakes, precision
from natgrad_lab.experiments.race import race
from natgrad_lab.experiments.settings import fill, require_size
from natgrad_lab.papers.ang_2020.networks import dense_net, wide_resnet

METHODS = ("kfac", "online_ng", "diagonal", "sgd", "adam")
LARGE = {"images": 10_000, "side": 32, "epochs": 50, "dense_depth": 19, "growth": 12, "wide_depth": 16, "width": 4}
SMALL = {"images": 2000, "side": 16, "epochs": 8, "dense_depth": 10, "growth": 8, "wide_depth": 10, "width": 1}


@dataclass(frozen=True)
class AngCifarSettings:
    """What `--set` can change. full=true is nearer to the report's size; what stays none is taken from there or here.

    The report says DenseNet-19, WideResNet and 50 epochs, and nothing of growth, width, batch or augmentation (none
    here).
    """

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
    threads: int | None = 1
    device: str = "cpu"
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
    """One for each network."""
    built = {"densenet": dense, "wide_resnet": wide}
    words = settings.networks.split(",")
    for word in words:
        if word not in built:
            raise LabError(f"networks has the word {word!r}, expected words among {', '.join(built)}")
    return tuple(build(settings) for name, build in built.items() if name in words)


def dense(settings: AngCifarSettings) -> Task:
    """Figure 2."""
    depth, growth = require_size(settings.dense_depth), require_size(settings.growth)
    title = f"Figure 2: DenseNet-{depth}, growth {growth}"
    return task("densenet", title, lambda: dense_net(depth, growth), settings)


def wide(settings: AngCifarSettings) -> Task:
    """Figure 3."""
    depth, width = require_size(settings.wide_depth), require_size(settings.width)
    title = f"Figure 3: WideResNet-{depth}-{width}"
    return task("wide_resnet", title, lambda: wide_resnet(depth, width), settings)


def task(name: str, title: str, model: Callable[[], nn.Module], settings: AngCifarSettings) -> Task:
    """Cross-entropy of ten classes, and the precision that the report plots."""
    return Task(
        name=name,
        title=f"{title}, {settings.images} images of {settings.side} x {settings.side}",
        model=model,
        data=lambda: images(require_size(settings.images), require_size(settings.side)),
        criterion=nn.CrossEntropyLoss(),
        unit="nats per image",
        divergence=categorical_divergence,
        error=mistakes,
        contestants=contestants.select(settings.methods, among(settings.batch), {"report": METHODS}),
        also={"precision": precision},
        recalibrated_on=settings.looked_at if settings.recalibrate else 0,
        note="Precision is the mean over classes of the share of images that rightly got the class.",
    )


def images(many: int, side: int) -> TaskData:
    """The first images of CIFAR-10, shrunk, every colour with mean 0 and variance 1 over the training images."""
    split = cifar10()
    parts = [shrink_pictures(part, side) for part in (split.train_x[:many], split.test_x)]
    mean, deviation = parts[0].mean((0, 2, 3), keepdim=True), parts[0].std((0, 2, 3), keepdim=True)
    train, test = ((part - mean) / deviation for part in parts)
    return TaskData(train, split.train_y[:many], test, split.test_y)


def shrink_pictures(pictures: Tensor, side: int) -> Tensor:
    """(n, 3, 32, 32) -> (n, 3, side, side)."""
    return functional.avg_pool2d(pictures, pictures.shape[-1] // side)


def among(batch: int) -> Mapping[str, Contestant]:
    """Grids narrowed by probes with the tuning seed."""
    grid = contestants.grid
    return contestants.by_default(batch) | {
        "sgd": contestants.sgd(grid(batch=(batch,), lr=(0.02, 0.1))),
        "adam": contestants.adam(grid(batch=(batch,), lr=(1e-3, 5e-3))),
    }


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
