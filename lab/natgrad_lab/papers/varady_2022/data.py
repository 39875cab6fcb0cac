"""Binary images for Helmholtz machines: lines, digits, clothes, faces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from natgrad_lab.data import Split, binarized_mnist, digits, fashion_mnist, fer2013

HELD_OUT = 0.1
"""Share of the training examples that settings are judged on."""


@dataclass(frozen=True)
class BitImages:
    """Rows of 0 and 1 (or -1 and 1): (n, width) each, and the shape of one image."""

    train: Tensor
    valid: Tensor
    test: Tensor
    shape: tuple[int, int]


def bits(name: str, train: int | None, test: int | None, signs: bool) -> BitImages:
    """A set by name, cut to so many examples."""
    images = SETS[name]()
    scale = (lambda part: 2 * part - 1) if signs else (lambda part: part)
    return BitImages(scale(images.train[:train]), scale(images.valid[:test]), scale(images.test[:test]), images.shape)


def lines() -> BitImages:
    """3 x 3 lines: rows or columns, each on or off, but neither all nor none: 12 patterns, each as often (50 times).

    They are their own validation and test sets: the likelihood on them is exact, and at most -log 12 = -2.48.
    """
    rows = [torch.tensor(on).repeat_interleave(3) for on in product((0.0, 1.0), repeat=3) if 0 < sum(on) < 3]
    patterns = torch.stack([*rows, *(row.view(3, 3).mT.flatten() for row in rows)])
    return BitImages(patterns.repeat(50, 1), patterns, patterns, (3, 3))


def _split(split: Split, shape: tuple[int, int]) -> BitImages:
    flat = split.flat()
    train, test = ((x > 0.5).float() for x in (flat.train_x, flat.test_x))
    if flat.valid_x is not None:
        mixed = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))  # published sorted by class
        return BitImages(train, (flat.valid_x > 0.5).float(), test[mixed], shape)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    cut = round(HELD_OUT * len(train))
    return BitImages(train[order[cut:]], train[order[:cut]], test, shape)


def faces() -> BitImages:
    """Faces of FER2013 at half their size, every pixel compared with the median of its image."""
    split = fer2013()

    def small(images: Tensor) -> Tensor:
        halved = torch.nn.functional.avg_pool2d(images.unsqueeze(1), 2).flatten(1)
        return (halved > halved.median(1, keepdim=True).values).float()

    order = torch.randperm(len(split.train_x), generator=torch.Generator().manual_seed(0))
    train = small(split.train_x)[order]
    cut = round(HELD_OUT * len(train))
    return BitImages(train[cut:], train[:cut], small(split.test_x), (24, 24))


SETS: dict[str, Callable[[], BitImages]] = {
    "lines": lines,
    "digits": lambda: _split(digits(), (8, 8)),
    "mnist": lambda: _split(binarized_mnist(), (28, 28)),
    "fashion": lambda: _split(fashion_mnist(), (28, 28)),
    "faces": faces,
}
