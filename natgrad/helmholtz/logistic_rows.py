"""Samples as rows of logistic regressions: what each layer's gradient and Fisher are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from natgrad.helmholtz.units import Activations, Conditional, each_layer, is_shared, log_chances
from natgrad.operators import SharedRows

States = list[Tensor]
"""One tensor (..., size) per layer, visible first."""
PARTS = ("inputs", "residuals", "logits", "weights")


@dataclass(frozen=True)
class LogisticRows:
    """What one layer learns from: a (s, columns), y - sigmoid and W a (s, size), weights (s,) that sum to 1.

    mask: (size, columns), the columns that a unit sees; None: all.
    """

    inputs: Tensor
    residuals: Tensor
    logits: Tensor
    weights: Tensor
    mask: Tensor | None

    @property
    def slopes(self) -> Tensor:
        """sigmoid' of the logits, (s, size)."""
        return torch.sigmoid(self.logits) * torch.sigmoid(-self.logits)

    def ascent(self) -> Tensor:
        """d/dW of the weighted mean of log p, (size, columns)."""
        found = (self.residuals * self.weights.unsqueeze(1)).mT @ self.inputs
        return found if self.mask is None else found * self.mask

    def scale_by(self, factor: float) -> LogisticRows:
        """The same rows with weights that sum to `factor`."""
        return replace(self, weights=factor * self.weights)

    def drop_all(self) -> LogisticRows:
        """No rows, in the same shapes."""
        return replace(self, **{part: getattr(self, part)[:0] for part in PARTS})


def activate_generation(layers: nn.ModuleList, states: States) -> list[Activations]:
    """What every layer of p sees in states (..., size)."""
    parents: list[Tensor | None] = [*states[1:], None]
    return [layer.activate(p, own) for layer, p, own in zip(each_layer(layers), parents, states, strict=True)]


def activate_recognition(layers: nn.ModuleList, states: States) -> list[Activations]:
    """What every layer of q sees in states (..., size)."""
    each = zip(each_layer(layers), states[:-1], states[1:], strict=True)
    return [layer.activate(below, own) for layer, below, own in each]


def sum_log_chances(seen: list[Activations], states: States) -> Tensor:
    """log of the product over layers of p(own | parents), (...)."""
    return torch.stack([log_chances(s.logits, own) for s, own in zip(seen, states, strict=True)]).sum(0)


def generation_rows(
    layers: nn.ModuleList, states: States, weights: Tensor, seen: list[Activations] | None = None
) -> list[LogisticRows]:
    """Rows of every layer of p on states (..., size), weights (...); seen: what `activate_generation` says."""
    seen = activate_generation(layers, states) if seen is None else seen
    each = zip(each_layer(layers), seen, states, strict=True)
    return [make_rows(layer, one, own, weights) for layer, one, own in each]


def recognition_rows(
    layers: nn.ModuleList, states: States, weights: Tensor, seen: list[Activations] | None = None
) -> list[LogisticRows]:
    """Rows of every layer of q on states (..., size), weights (...); seen: what `activate_recognition` says."""
    seen = activate_recognition(layers, states) if seen is None else seen
    found = []
    for layer, one, below, own in zip(each_layer(layers), seen, states[:-1], states[1:], strict=True):
        same = is_shared(below) and not layer.autoregressive
        found.append(merge_draws(one, own, weights) if same else make_rows(layer, one, own, weights))
    return found


def make_rows(layer: Conditional, seen: Activations, own: Tensor, weights: Tensor) -> LogisticRows:
    """Rows of one layer, flattened."""
    residuals = (own > 0).to(seen.logits.dtype) - torch.sigmoid(seen.logits)
    inputs, residuals, logits = (part.flatten(0, -2) for part in (seen.inputs, residuals, seen.logits))
    return LogisticRows(inputs, residuals, logits, weights.flatten(), layer.seen_columns())


def merge_draws(seen: Activations, own: Tensor, weights: Tensor) -> LogisticRows:
    """One row per example in place of one per draw: inputs and logits are the same, residuals are averaged."""
    total = weights.sum(0)  # (b,)
    mean = torch.einsum("kb,kbj->bj", weights, (own > 0).to(weights.dtype)) / total.unsqueeze(1)
    return LogisticRows(seen.inputs, mean - torch.sigmoid(seen.logits), seen.logits, total, None)


def join_rows(first: LogisticRows, second: LogisticRows) -> LogisticRows:
    """Both, one after the other."""
    inputs, residuals, logits, weights = (
        torch.cat([getattr(rows, part) for rows in (first, second)]) for part in PARTS
    )
    return LogisticRows(inputs, residuals, logits, weights, first.mask)


def fisher_rows(rows: LogisticRows) -> SharedRows:
    """F_j = E[s' (W_j a) a a^T] of every unit j of a layer (Varady, Volpi, Malago & Ay 2022)."""
    return SharedRows(rows.inputs, (rows.slopes * rows.weights.unsqueeze(1)).mT, rows.mask)
