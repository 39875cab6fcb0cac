"""Samples as rows of logistic regressions: what each layer's gradient and Fisher are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from natgrad.applications.helmholtz.units import Conditional, each_layer
from natgrad.operators import SharedRows

States = list[Tensor]
"""One tensor (..., size) per layer, visible first."""
PARTS = ("inputs", "residuals", "slopes", "weights")


@dataclass(frozen=True)
class LogisticRows:
    """What one layer learns from: a (s, columns), y - sigmoid and sigmoid' (s, size), weights (s,) that sum to 1.

    mask: (size, columns), the columns that a unit sees; None: all.
    """

    inputs: Tensor
    residuals: Tensor
    slopes: Tensor
    weights: Tensor
    mask: Tensor | None

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


def generation_rows(layers: nn.ModuleList, states: States, weights: Tensor) -> list[LogisticRows]:
    """Rows of every layer of p on states (..., size), weights (...)."""
    parents: list[Tensor | None] = [*states[1:], None]
    each = zip(each_layer(layers), parents, states, strict=True)
    return [make_rows(layer, p, own, weights) for layer, p, own in each]


def recognition_rows(layers: nn.ModuleList, states: States, weights: Tensor) -> list[LogisticRows]:
    """Rows of every layer of q on states (..., size), weights (...)."""
    found = []
    for layer, below, own in zip(each_layer(layers), states[:-1], states[1:], strict=True):
        shared = below.dim() == 3 and below.stride(0) == 0  # all draws of an example see the same data
        same = shared and not layer.autoregressive
        found.append(merge_draws(layer, below[0], own, weights) if same else make_rows(layer, below, own, weights))
    return found


def make_rows(layer: Conditional, parents: Tensor | None, own: Tensor, weights: Tensor) -> LogisticRows:
    """Rows of one layer, flattened."""
    parts = layer.residual(parents, own)
    inputs, residuals, slopes = (part.flatten(0, -2) for part in parts)
    return LogisticRows(inputs, residuals, slopes, weights.flatten(), layer.seen_columns())


def merge_draws(layer: Conditional, below: Tensor, own: Tensor, weights: Tensor) -> LogisticRows:
    """One row per example in place of one per draw: inputs and slopes are the same, residuals are averaged."""
    total = weights.sum(0)  # (b,)
    mean = torch.einsum("kb,kbj->bj", weights, (own > 0).to(weights.dtype)) / total.unsqueeze(1)
    inputs, residuals, slopes = layer.residual(below, own[0])
    up = (own[0] > 0).to(weights.dtype) - residuals
    return LogisticRows(inputs, mean - up, slopes, total, None)


def join_rows(first: LogisticRows, second: LogisticRows) -> LogisticRows:
    """Both, one after the other."""
    inputs, residuals, slopes, weights = (
        torch.cat([getattr(rows, part) for rows in (first, second)]) for part in PARTS
    )
    return LogisticRows(inputs, residuals, slopes, weights, first.mask)


def fisher_rows(rows: LogisticRows) -> SharedRows:
    """F_j = E[s' (W_j a) a a^T] of every unit j of a layer (Varady, Volpi, Malago & Ay 2022)."""
    return SharedRows(rows.inputs, (rows.slopes * rows.weights.unsqueeze(1)).mT, rows.mask)
