"""Discrete outputs in natural parameters: Bernoulli logits, class logits, Poisson log rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.families.base import Likelihood, Separable, check_range, check_same_shape, one_tensor


@dataclass(frozen=True)
class Bernoulli(Separable):
    """Independent bits with logits r: Fisher form diag(y (1 - y)), y = sigmoid(r) (Pascanu & Bengio eq. 10 in r)."""

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(outputs.detach().sigmoid(), generator=generator)

    def curvature(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()  # not y (1 - y): 1 - y rounds to 0 in float32 beyond r = 17

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        change = functional.softplus(other) - functional.softplus(outputs)
        return (change - outputs.sigmoid() * (other - outputs)).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        super().check_targets(outputs, targets)
        check_range(targets, 0, 1, "bits or probabilities in [0, 1]")


@dataclass(frozen=True)
class Poisson(Separable):
    """Independent counts with log rates r: Fisher form diag(exp r)."""

    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp() - targets * outputs + torch.lgamma(targets.to(outputs.dtype) + 1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(outputs.detach().exp(), generator=generator)

    def curvature(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return (other.exp() - outputs.exp() - outputs.exp() * (other - outputs)).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        super().check_targets(outputs, targets)
        check_range(targets, 0, torch.inf, "counts >= 0")


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes with logits r: Fisher form diag(y) - y y^T, y = softmax(r) (Pascanu & Bengio eq. 11 in r).

    dim: the class axis of the outputs; -1 for (b, ..., C), 1 for torch's (b, C, ...). A row is one position.
    targets: class numbers, shaped like the outputs without the class axis, or class probabilities shaped like the
    outputs. The root is F = diag(sqrt y) - y sqrt(y)^T, (C x C), of rank C - 1.
    """

    dim: int = -1

    def rows(self, outputs: Tensor) -> Tensor:
        outputs = one_tensor(outputs)
        if outputs.dim() < 2:
            raise ValueError(f"outputs has shape {tuple(outputs.shape)}, expected logits (b, C) or with positions")
        return outputs.movedim(self.dim, -1).flatten(0, -2)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.rows(outputs)
        if targets.is_floating_point():
            check_same_shape(outputs, targets)
            return functional.cross_entropy(logits, self.rows(targets), reduction="none")
        return functional.cross_entropy(logits, targets.reshape(-1), reduction="none")

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        moved = outputs.detach().movedim(self.dim, -1)
        drawn = torch.multinomial(moved.flatten(0, -2).softmax(-1), 1, generator=generator)
        return drawn.view(moved.shape[:-1])

    def fisher(self, rows: Tensor) -> Tensor:
        y = rows.softmax(-1)
        return torch.diag_embed(y) - y.unsqueeze(-1) * y.unsqueeze(-2)

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        y = outputs.softmax(-1)
        weighted = y * tangents
        return weighted - y * weighted.sum(-1, keepdim=True)

    def root(self, outputs: Tensor) -> Tensor:
        y = outputs.softmax(-1)
        s = y.sqrt()  # (diag s - y s^T)(diag s - y s^T)^T = diag y - y y^T, since s . s = 1
        return torch.diag_embed(s) - y.unsqueeze(-1) * s.unsqueeze(-2)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        log_p, log_q = outputs.log_softmax(-1), other.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        if targets.is_floating_point():
            if targets.dim() < outputs.dim():
                raise ValueError(
                    f"targets are {targets.dtype} of shape {tuple(targets.shape)}, expected class numbers as integers; "
                    "convert them with targets.long()"
                )
            check_same_shape(outputs, targets)
            check_range(targets, 0, 1, "class numbers (integers), or class probabilities in [0, 1]")
            return
        classes = outputs.shape[self.dim]
        positions = outputs.movedim(self.dim, -1).shape[:-1]
        if targets.shape != positions:
            raise ValueError(
                f"targets has shape {tuple(targets.shape)}, expected {tuple(positions)}, one class each; "
                "reshape them, or say with Categorical(dim=...) where the classes are"
            )
        check_range(targets, 0, classes - 1, f"class numbers from 0 to {classes - 1}")
