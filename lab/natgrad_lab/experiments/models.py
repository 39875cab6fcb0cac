"""The models of the laboratory, how outputs of theirs are compared, and tasks of classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad_lab.data import Split
from natgrad_lab.experiments.base import Contestant, LabError, Task


def classify(
    name: str,
    title: str,
    model: Callable[[], nn.Module],
    data: Callable[[], Split],
    contestants: tuple[Contestant, ...] = (),
    dim: int = -1,
    unit: str = "nats per image",
    **others: Any,
) -> Task:
    """Cross-entropy of classes along a dimension of the outputs. others: of `Task`."""
    divergence, error = partial(categorical_divergence, dim=dim), partial(mistakes, dim=dim)
    return Task(name, title, model, data, nn.CrossEntropyLoss(), unit, divergence, contestants, error=error, **others)


def perceptron(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers of the given sizes with an activation between them; Glorot-uniform weights, zero biases."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [glorot(nn.Linear(inputs, outputs)), activation()]
    return nn.Sequential(*layers[:-1])


def convolutional(
    image: int, convolutions: Sequence[Convolution], dense: Sequence[int], activation: type[nn.Module]
) -> nn.Sequential:
    """Convolutions of grey images (b, 1, image, image), each max-pooled, then a perceptron of the dense sizes."""
    layers: list[nn.Module] = []
    side, channels = image, 1
    for convolution in convolutions:
        # the largest of the values before a rising activation is the largest after it, and costs less
        layers += [convolution.layer(channels), nn.MaxPool2d(convolution.pooling), activation()]
        side, channels = convolution.side(side), convolution.filters
    return nn.Sequential(*layers, nn.Flatten(), *perceptron([channels * side * side, *dense], activation))


@dataclass(frozen=True)
class Convolution:
    """filters of kernel x kernel pixels, applied every `stride` pixels, then max-pooled over pooling x pooling."""

    filters: int
    kernel: int
    pooling: int
    stride: int = 1

    def layer(self, channels: int) -> nn.Module:
        """The convolution of that many channels."""
        if channels == 1:
            return PatchConvolution(self.filters, self.kernel, self.stride)
        return glorot(nn.Conv2d(channels, self.filters, self.kernel, self.stride))

    def side(self, image: int) -> int:
        """Side of what comes out, from the side of what goes in."""
        return ((image - self.kernel) // self.stride + 1) // self.pooling


class PatchConvolution(nn.Module):
    """What `nn.Conv2d(1, filters, kernel, stride)` computes of data, as a matrix product with the image's patches.

    A product with the Fisher of the faces' network took 0.024 s with it and 0.095 s with Conv2d, whose second
    derivatives are slow on a CPU.
    """

    def __init__(self, filters: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.filters = glorot(nn.Linear(kernel * kernel, filters))

    def forward(self, images: Tensor) -> Tensor:
        """(b, 1, h, w) -> (b, filters, rows, columns)."""
        patches = images[:, 0].unfold(1, self.kernel, self.stride).unfold(2, self.kernel, self.stride)
        b, rows, columns = patches.shape[:3]
        values = self.filters(patches.reshape(-1, self.kernel**2))  # (b rows columns, filters)
        return values.view(b, rows * columns, -1).mT.reshape(b, -1, rows, columns)


def glorot(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """The layer with Glorot-uniform weights and zero biases."""
    nn.init.xavier_uniform_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class TransformerBlock(nn.Module):
    """x + attention(norm x), then x + perceptron(norm x), on (b, t, width). causal: no place looks at later ones."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise LabError(f"width is {width}, heads {heads}: expected heads that divide the width")
        self.heads, self.causal = heads, causal
        self.before, self.asked, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        asked = self.asked(self.before(hidden)).unflatten(2, (3, self.heads, -1))
        query, key, value = asked.permute(2, 0, 3, 1, 4)  # each (b, heads, t, e)
        values = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = hidden + self.mixed(values.transpose(1, 2).flatten(2))
        return hidden + self.perceptron(hidden)


def mirror_sizes(sizes: Sequence[int]) -> list[int]:
    """An autoencoder's sizes from those of its encoder: 64, 50, 10 -> 64, 50, 10, 50, 64."""
    return [*sizes, *reversed(sizes[:-1])]


def categorical_divergence(before: Tensor, after: Tensor, dim: int = -1) -> Tensor:
    """KL(p, q) in nats, a mean over examples, and places. before, after: logits, the classes along dim."""
    p, q = before.log_softmax(dim), after.log_softmax(dim)
    return (p.exp() * (p - q)).sum(dim).mean()


def bernoulli_divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL in nats between products of coins, a mean over examples. before, after: logits (b, coins)."""
    heads, tails = functional.logsigmoid, lambda r: functional.logsigmoid(-r)
    p = before.sigmoid()
    return (p * (heads(before) - heads(after)) + (1 - p) * (tails(before) - tails(after))).sum(-1).mean()


def gaussian_divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL in nats between Gaussians of unit variance, a mean over examples. before, after: means (b, outputs)."""
    return (before - after).square().sum(-1).mean() / 2


def squared_error(logits: Tensor, images: Tensor) -> Tensor:
    """Squared distance of an image from its reconstruction, a mean over images. logits, images: (b, pixels)."""
    return (logits.sigmoid() - images).square().sum(1).mean()


def mistakes(outputs: Tensor, labels: Tensor, dim: int = -1) -> Tensor:
    """Share of examples, or places, whose largest logit is not that of their label. outputs: the classes along dim."""
    return (outputs.argmax(dim) != labels).to(torch.float32).mean()


def precision(outputs: Tensor, labels: Tensor) -> Tensor:
    """Macro precision: a mean over the classes that somebody has or gets, of right over all who get it, else 0."""
    classes = outputs.shape[-1]
    given = functional.one_hot(outputs.argmax(-1), classes)
    true = functional.one_hot(labels, classes)
    counts = given.sum(0)
    shares = (given * true).sum(0) / counts.clamp(min=1)
    return shares[(counts + true.sum(0)) > 0].mean()
