"""An endless stream of labelled images: random pictures of a set, each deformed anew.

A batch is a function of the stream's seed, its number and which draw of it is wanted, so that any part of the stream
can be drawn again, or replaced by a fresh draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from natgrad_lab.data import mnist, omniglot


@dataclass(frozen=True)
class Deformation:
    """How far an image is bent: every number is the end of a uniform range around no change, but for `elastic`."""

    degrees: float = 20.0  # turned
    scale: float = 0.2  # stretched along each axis, a fraction
    shear: float = 0.2
    shift: float = 0.1  # of the width
    elastic: float = 0.05  # standard deviation of a displacement field on 5 x 5 knots, of half the width

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """images (b, h, w) -> the same shape, each bent its own way; what comes from outside is 0."""
        b, h, w = images.shape
        grid = functional.affine_grid(self._affine(b, generator), [b, 1, h, w], align_corners=False)
        knots = self.elastic * torch.randn(b, 2, 5, 5, generator=generator)
        field = functional.interpolate(knots, (h, w), mode="bilinear", align_corners=True)
        bent = functional.grid_sample(images[:, None], grid + field.permute(0, 2, 3, 1), align_corners=False)
        return bent[:, 0]

    def _affine(self, b: int, generator: torch.Generator) -> Tensor:
        """(b, 2, 3): from the bent image's coordinates in [-1, 1] to the given one's."""
        turn, wide, high, shear, right, down = (2 * torch.rand(6, b, generator=generator) - 1).unbind()
        turn, shear = turn * math.radians(self.degrees), self.shear * shear
        wide, high = 1 + self.scale * wide, 1 + self.scale * high
        top = torch.stack([wide * turn.cos(), -high * turn.sin() + shear, 2 * self.shift * right], 1)
        bottom = torch.stack([wide * turn.sin(), high * turn.cos(), 2 * self.shift * down], 1)
        return torch.stack([top, bottom], 1)


@dataclass(frozen=True)
class ImageSource:
    """Images (n, h, w) in [0, 1] and labels (n,) to draw from, and those held out."""

    images: Tensor
    labels: Tensor
    held_images: Tensor
    held_labels: Tensor
    classes: int


def mnist_digits() -> ImageSource:
    """MNIST, held out from its test part."""
    split = mnist()
    return ImageSource(split.train_x, split.train_y, split.test_x, split.test_y, 10)


def omniglot_characters(classes: int = 62) -> ImageSource:
    """The first characters of Omniglot, four of their twenty writers held out.

    62 is the number of classes of NIST's handwritten characters.
    """
    split = omniglot()
    few = split.train_y < classes
    x, y = split.train_x[few], split.train_y[few]
    earlier = (y[:, None] == y).tril(-1).sum(1)  # images of the same character before this one
    held = earlier >= 16
    return ImageSource(x[~held], y[~held], x[held], y[held], classes)


SOURCES = {"mnist": mnist_digits, "omniglot": omniglot_characters}


@dataclass(frozen=True)
class Stream:
    """Batches (b, side^2), (b,) out of a source, deformed and reduced to side x side by averaging."""

    source: ImageSource
    size: int
    side: int
    seed: int
    deformation: Deformation = Deformation()

    def batch(self, step: int, draw: int = 0) -> tuple[Tensor, Tensor]:
        """Batch number `step`; another draw has other pictures, bent in other ways."""
        return self._draw(self.source.images, self.source.labels, self.size, (0, step, draw))

    def held_out(self, size: int) -> tuple[Tensor, Tensor]:
        """So many deformed pictures of the part that is held out."""
        return self._draw(self.source.held_images, self.source.held_labels, size, (1, 0, 0))

    def _draw(self, images: Tensor, labels: Tensor, size: int, which: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number(self.seed, *which))
        chosen = torch.randint(len(images), (size,), generator=generator)
        bent = self.deformation(images[chosen], generator)
        return functional.adaptive_avg_pool2d(bent[:, None], self.side).flatten(1), labels[chosen]


def number(seed: int, part: int, step: int, draw: int) -> int:
    """A seed for torch's generator, different for different arguments: it looks at 32 bits alone.

    seed < 2048, part < 2, step < 65,536, draw < 16.
    """
    return ((seed * 2 + part) * 65_536 + step) * 16 + draw
