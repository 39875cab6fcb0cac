"""A small vision transformer and ResNet-20 on CIFAR-10.

The natural gradient in blocks per layer, with its defaults, beside Adam, Muon, SOAP and SGD, each tuned over a grid of
the same size, on equal seconds of one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad_lab.data import cifar10
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Contestant, LabError, Task, TaskData, pair_with_labels
from natgrad_lab.experiments.models import categorical_divergence, mistakes
from natgrad_lab.experiments.race import RaceSettings, race


@dataclass(frozen=True)
class VitCifarSettings(RaceSettings):
    """What `--set` can change."""

    seconds: float = 60.0  # of training per run
    looked_at: int = 1000  # the first of the training and of the test images
    methods: str = "structures"  # or names of contestants such as kfac,adam
    networks: str = "vit"  # or resnet, or vit,resnet
    layers: int = 4  # of the transformer
    width: int = 96  # of the transformer
    heads: int = 3  # of attention
    patch: int = 4  # pixels of a patch's side
    filters: int = 16  # of ResNet's first stage
    blocks: int = 3  # of each of ResNet's three stages: 6 blocks + 2 layers, so that 3 makes ResNet-20


def tasks(settings: VitCifarSettings) -> tuple[Task, ...]:
    """Cross-entropy of ten classes, by the networks that the settings name."""
    known = {"vit": of_vit, "resnet": of_resnet}
    words = settings.networks.split(",")
    for word in words:
        if word not in known:
            raise LabError(f"networks has the word {word!r}, expected words among {', '.join(known)}")
    return tuple(build(settings) for name, build in known.items() if name in words)


def of_vit(settings: VitCifarSettings) -> Task:
    """Patches as tokens."""
    title = f"CIFAR-10, vision transformer of {settings.layers} layers, width {settings.width}"
    return task("vit", title, lambda: ViT(settings), settings, but=("place", "head.weight"))


def of_resnet(settings: VitCifarSettings) -> Task:
    """Convolutions with batch norm and short cuts."""
    title = f"CIFAR-10, ResNet-{6 * settings.blocks + 2}"
    return task("resnet", title, lambda: resnet(settings.filters, settings.blocks), settings, but=("head.weight",))


def task(
    name: str, title: str, model: Callable[[], nn.Module], settings: VitCifarSettings, but: tuple[str, ...]
) -> Task:
    """The task of one network. but: the matrices that are Adam's where Muon has the rest."""
    return Task(
        name=name,
        title=title,
        model=model,
        data=images,
        criterion=nn.CrossEntropyLoss(),
        unit="nats per image",
        divergence=categorical_divergence,
        error=mistakes,
        contestants=contestants.select(settings.methods, among(but), contestants.GROUPS),
    )


def images() -> TaskData:
    """The pictures with every channel at mean 0 and variance 1."""
    examples = pair_with_labels(cifar10())
    mean, spread = (getattr(examples.train_x, name)((0, 2, 3), keepdim=True) for name in ("mean", "std"))
    x, test_x = ((part - mean) / spread for part in (examples.train_x, examples.test_x))
    return TaskData(x, examples.train_y, test_x, examples.test_y)


def among(but: tuple[str, ...]) -> Mapping[str, Contestant]:
    """Grids narrowed by probes with the tuning seed."""
    grid = contestants.grid
    return contestants.by_default(batch=64) | {
        "adam": contestants.adam(grid(batch=(64,), lr=(1e-3, 3e-3))),
        "muon": contestants.muon(grid(batch=(64,), lr=(0.02, 0.05), adam_lr=(3e-3,)), but=but),
        "soap": contestants.soap(grid(batch=(64,), lr=(3e-3, 0.01))),
        "sgd": contestants.sgd(grid(batch=(64,), lr=(0.03, 0.1))),
    }


class ViT(nn.Module):
    """Images (b, 3, 32, 32) -> logits of the classes, from the mean over patches. Dosovitskiy et al. 2021."""

    def __init__(self, settings: VitCifarSettings) -> None:
        super().__init__()
        width, side = settings.width, 32 // settings.patch
        self.patches = nn.Conv2d(3, width, settings.patch, stride=settings.patch)
        self.place = nn.Parameter(0.02 * torch.randn(side * side, width))
        self.blocks = nn.Sequential(*(ImageBlock(width, settings.heads) for _ in range(settings.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class ImageBlock(nn.Module):
    """x + attention(norm x), then x + perceptron(norm x), on (b, t, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.asked, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        asked = self.asked(self.before(hidden)).unflatten(2, (3, self.heads, -1))
        query, key, value = asked.permute(2, 0, 3, 1, 4)  # each (b, heads, t, e)
        found = functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.mixed(found.transpose(1, 2).flatten(2))
        return hidden + self.perceptron(hidden)


def resnet(filters: int, blocks: int) -> nn.Sequential:
    """Three stages of blocks with filters, twice and four times as many. He et al. 2016, section 4.2."""
    layers: list[nn.Module] = [convolution(3, filters), nn.BatchNorm2d(filters), nn.ReLU()]
    channels = filters
    for stage in range(3):
        for place in range(blocks):
            outputs = filters * 2**stage
            layers.append(ResNetBlock(channels, outputs, stride=2 if stage and not place else 1))
            channels = outputs
    parts = {"body": nn.Sequential(*layers), "mean": nn.AdaptiveAvgPool2d(1), "rows": nn.Flatten()}
    return nn.Sequential(OrderedDict(parts, head=nn.Linear(channels, 10)))


class ResNetBlock(nn.Module):
    """relu(short cut + two convolutions with batch norm); the short cut drops pixels and adds channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.added = stride, outputs - inputs
        self.first, self.norm1 = convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.second, self.norm2 = convolution(outputs, outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.second(functional.relu(self.norm1(self.first(x)))))
        kept = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return functional.relu(kept + inside)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """3 x 3, without bias, which batch norm has."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


RACE = race(
    "vit_cifar",
    "A small vision transformer on CIFAR-10, or ResNet-20 (needs the data)",
    VitCifarSettings,
    tasks,
    title="A vision transformer and ResNet-20: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=45,
    quick={"seeds": 1, "seconds": 8.0, "methods": "kfac,adam", "looked_at": 200},
)
