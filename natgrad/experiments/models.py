"""The models of the laboratory, and how outputs of theirs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def perceptron(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers of the given sizes with an activation between them; Glorot-uniform weights, zero biases."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


def mirrored(sizes: Sequence[int]) -> list[int]:
    """An autoencoder's sizes from those of its encoder: 64, 50, 10 -> 64, 50, 10, 50, 64."""
    return [*sizes, *reversed(sizes[:-1])]


def categorical_divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL(p, q) in nats, a mean over examples. before, after: logits (b, classes)."""
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def bernoulli_divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL in nats between products of coins, a mean over examples. before, after: logits (b, coins)."""
    heads, tails = nn.functional.logsigmoid, lambda r: nn.functional.logsigmoid(-r)
    p = before.sigmoid()
    return (p * (heads(before) - heads(after)) + (1 - p) * (tails(before) - tails(after))).sum(-1).mean()


def gaussian_divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL in nats between Gaussians of unit variance, a mean over examples. before, after: means (b, outputs)."""
    return (before - after).square().sum(-1).mean() / 2


def mistakes(outputs: Tensor, labels: Tensor) -> Tensor:
    """Share of examples whose largest logit is not that of their label."""
    return (outputs.argmax(-1) != labels).to(torch.float32).mean()
