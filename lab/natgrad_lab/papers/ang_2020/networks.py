"""The two networks of Ang's report, in sizes that a CPU stands: DenseNet and WideResNet for small colour images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from natgrad_lab.experiments.base import LabError


def dense_net(depth: int, growth: int, classes: int = 10) -> nn.Sequential:
    """Three blocks in which every convolution sees all the channels before it. Huang et al. 2018, without bottlenecks.

    depth: 3 n + 4, with n convolutions in each block.   growth: channels that each of them adds (k).
    """
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
    """Three groups of residual blocks with 16, 32, 64 times `width` channels. Zagoruyko & Komodakis 2017, no dropout.

    depth: 6 n + 4, with n blocks of two convolutions in each group.
    """
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
