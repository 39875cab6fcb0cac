"""Networks whose training steps are timed: tiny, dense, convolutional with norms, an autoencoder, a transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from natgrad_lab.networks.char_transformer import Transformer


@dataclass(frozen=True)
class TrainingCase:
    """A network to build anew, its loss, and one batch."""

    name: str
    build: Callable[[], nn.Module]
    criterion: nn.Module
    inputs: Tensor
    targets: Tensor


def classifier(batch: int = 512) -> TrainingCase:
    """784-1000-500-250-10 with rectifiers."""
    inputs, targets = torch.rand(batch, 784), torch.randint(0, 10, (batch,))
    return TrainingCase(
        "classifier", lambda: dense([784, 1000, 500, 250, 10], nn.ReLU), nn.CrossEntropyLoss(), inputs, targets
    )


def convolutional(batch: int = 256) -> TrainingCase:
    """Three 3x3 convolutions of 32, 64 and 64 channels on 28x28, each with BatchNorm, a rectifier and pooling."""
    inputs, targets = torch.rand(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    return TrainingCase(
        "CNN", lambda: nn.Sequential(*stack_pooled([1, 32, 64, 64])), nn.CrossEntropyLoss(), inputs, targets
    )


def autoencoder(batch: int = 500) -> TrainingCase:
    """784-1000-500-250-30-250-500-1000-784 with tanh, on grey pixels."""
    sizes = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    images = torch.rand(batch, 784)
    return TrainingCase("autoencoder", lambda: dense(sizes, nn.Tanh), nn.BCEWithLogitsLoss(), images, images)


def transformer(batch: int = 32, length: int = 64, vocabulary: int = 96) -> TrainingCase:
    """Two causal layers of width 128 with 4 heads, embeddings and norms included."""
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    return TrainingCase(
        "transformer",
        lambda: Transformer(vocabulary, length, 128, 4, 2),
        nn.CrossEntropyLoss(),
        tokens[:, :-1],
        tokens[:, 1:],
    )


def tiny(batch: int = 128) -> TrainingCase:
    """64-64-10 with tanh: the example of the README."""
    inputs, targets = torch.rand(batch, 64), torch.randint(0, 10, (batch,))
    return TrainingCase("tiny", lambda: dense([64, 64, 10], nn.Tanh), nn.CrossEntropyLoss(), inputs, targets)


def trainings() -> Iterator[TrainingCase]:
    """All five."""
    yield from (tiny(), classifier(), convolutional(), autoencoder(), transformer())


def dense(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers as torch starts them, with an activation between them."""
    return nn.Sequential(*[part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), activation())][:-1])


def stack_pooled(channels: list[int]) -> Iterator[nn.Module]:
    """Convolution, norm, rectifier and pooling; then classes, from 3x3 pixels."""
    for a, b in pairwise(channels):
        yield from (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
    yield from (nn.Flatten(), nn.Linear(9 * channels[-1], 10))
