"""A small vision transformer and ResNet-20 on CIFAR-10."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad_lab.data import cifar10
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Task, standardise_pictures
from natgrad_lab.experiments.models import TransformerBlock, classify
from natgrad_lab.experiments.race import RaceSettings, race
from natgrad_lab.experiments.settings import check_counts, split_words


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

    def __post_init__(self) -> None:
        check_counts(self, "layers", "width", "heads", "patch", "filters", "blocks")


def tasks(settings: VitCifarSettings) -> tuple[Task, ...]:
    """Cross-entropy of ten classes, by the networks that the settings name."""
    s, transformer = settings, f"vision transformer of {settings.layers} layers, width {settings.width}"
    known: dict[str, tuple[str, Callable[[], nn.Module], tuple[str, ...]]] = {  # the last are Adam's, not Muon's
        "vit": (transformer, lambda: ViT(s), ("place", "head.weight")),
        "resnet": (f"ResNet-{6 * s.blocks + 2}", lambda: resnet(s.filters, s.blocks), ("head.weight",)),
    }
    built = []
    words = split_words("networks", s.networks, known)
    for name in (name for name in known if name in words):
        title, model, but = known[name]
        raced = contestants.select(s.methods, contestants.line_up(64, but, **GRIDS))
        built.append(classify(name, f"CIFAR-10, {title}", model, lambda: standardise_pictures(cifar10()), raced))
    return tuple(built)


GRIDS = {
    "adam": {"lr": (1e-3, 3e-3)},
    "muon": {"lr": (0.02, 0.05), "adam_lr": (3e-3,)},
    "soap": {"lr": (3e-3, 0.01)},
    "sgd": {"lr": (0.03, 0.1)},
}


class ViT(nn.Module):
    """Images (b, 3, 32, 32) -> logits of the classes, from the mean over patches. Dosovitskiy et al. 2021."""

    def __init__(self, settings: VitCifarSettings) -> None:
        super().__init__()
        width, side = settings.width, 32 // settings.patch
        self.patches = nn.Conv2d(3, width, settings.patch, stride=settings.patch)
        self.place = nn.Parameter(0.02 * torch.randn(side * side, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, settings.heads, causal=False) for _ in range(settings.layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(tokens)).mean(1))


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
        short_cut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return functional.relu(short_cut + inside)


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
