"""Layers of binary units given their parents: a logistic regression per unit, and the rows that it learns from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.operators import SharedRows


@dataclass(frozen=True)
class Activations:
    """What the units of a layer see and what they make of it: a (..., columns) and W a (..., size).

    Where all draws of an example see the same, both are of the examples alone.
    """

    inputs: Tensor
    logits: Tensor


class Conditional(nn.Module):
    """p(h | parents) of `size` binary units: p(h_j is up | .) = sigmoid(W_j a), a = [parents, earlier units, 1].

    weight: (size, columns), the bias as last column.   autoregressive: unit j also sees the units before it in its own
    layer.   low: the value of a unit that is down, 0 or -1; up is 1.
    """

    def __init__(self, parents: int, size: int, low: int, autoregressive: bool) -> None:
        super().__init__()
        self.parents, self.size, self.low, self.autoregressive = parents, size, low, autoregressive
        columns = parents + (size if autoregressive else 0) + 1
        self.weight = nn.Parameter(torch.zeros(size, columns))
        with torch.no_grad():  # small, so that units start undecided; the bias starts at 0
            self.weight[:, :-1].uniform_(-1, 1).mul_((parents + 1) ** -0.5)
        mask = torch.ones(size, columns, dtype=torch.bool)
        if autoregressive:
            mask[:, parents:-1] = torch.ones(size, size, dtype=torch.bool).tril(-1)
            with torch.no_grad():
                self.weight.mul_(mask)
        self.register_buffer("mask", mask, persistent=False)

    def extra_repr(self) -> str:
        own = ", autoregressive=True" if self.autoregressive else ""
        return f"parents={self.parents}, size={self.size}{own}"

    def inputs(self, parents: Tensor | None, own: Tensor) -> Tensor:
        """a of every row: parents (..., m), own (..., size) -> (..., columns)."""
        parts = [] if parents is None else [parents]
        parts += [own] if self.autoregressive else []
        return torch.cat([*parts, torch.ones_like(own[..., :1])], dim=-1)

    def activate(self, parents: Tensor | None, own: Tensor) -> Activations:
        """a and W a of parents (..., m) and own units (..., size)."""
        if parents is not None and is_shared(parents) and not self.autoregressive:
            return self.activate(parents[0], own[0])
        inputs = self.inputs(parents, own)
        # an entry for a unit that is not seen has no slope
        weight = self.weight * self.get_buffer("mask") if self.autoregressive else self.weight
        return Activations(inputs, functional.linear(inputs, weight))

    def logits(self, parents: Tensor | None, own: Tensor) -> Tensor:
        """W a, (..., size)."""
        return self.activate(parents, own).logits.expand(own.shape)

    def sample(
        self, parents: Tensor | None, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> tuple[Tensor, Activations]:
        """Units drawn given parents (*shape, m), (*shape, size), and what they saw."""
        own = self.weight.new_full((), self.low).expand(*shape, self.size)
        if self.autoregressive:
            own = self._sample_in_turn(parents, own.clone(), generator)
            return own, self.activate(parents, own)
        seen = self.activate(parents, own)
        return self._draw_bits(torch.sigmoid(seen.logits).expand(own.shape), generator), seen

    def _sample_in_turn(self, parents: Tensor | None, own: Tensor, generator: torch.Generator | None) -> Tensor:
        columns = slice(self.parents, self.parents + self.size)
        fixed = functional.linear(self.inputs(parents, torch.zeros_like(own)), self.weight)
        for j in range(self.size):
            logit = fixed[..., j] + own[..., :j] @ self.weight[j, columns][:j]
            own[..., j] = self._draw_bits(torch.sigmoid(logit), generator)
        return own

    def seen_columns(self) -> Tensor | None:
        """The columns that each unit sees, (size, columns); None: all."""
        return self.get_buffer("mask") if self.autoregressive else None

    def _draw_bits(self, chances: Tensor, generator: torch.Generator | None) -> Tensor:
        up = torch.bernoulli(chances, generator=generator)
        return up if self.low == 0 else 2 * up - 1


def is_shared(states: Tensor) -> bool:
    """True if all draws of an example are one: states (samples, b, size) that were expanded."""
    return states.dim() == 3 and states.stride(0) == 0


def log_chances(logits: Tensor, own: Tensor) -> Tensor:
    """log p(own) of units with these logits, summed over units; logits (..., size) may lack the draws' axis."""
    up = own[0] > 0 if is_shared(own) else own > 0
    return -functional.softplus(logits * (1 - 2 * up.to(logits.dtype))).sum(-1)


def each_layer(layers: nn.ModuleList) -> Iterator[Conditional]:
    """The layers of a network, typed."""
    for layer in layers:
        assert isinstance(layer, Conditional)
        yield layer


# Samples as rows of logistic regressions: what each layer's gradient and Fisher are made of

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
        gradient = (self.residuals * self.weights.unsqueeze(1)).mT @ self.inputs
        return gradient if self.mask is None else gradient * self.mask

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
    return [make_rows(layer, activations, own, weights) for layer, activations, own in each]


def recognition_rows(
    layers: nn.ModuleList, states: States, weights: Tensor, seen: list[Activations] | None = None
) -> list[LogisticRows]:
    """Rows of every layer of q on states (..., size), weights (...); seen: what `activate_recognition` says."""
    seen = activate_recognition(layers, states) if seen is None else seen
    all_rows = []
    for layer, activations, below, own in zip(each_layer(layers), seen, states[:-1], states[1:], strict=True):
        same = is_shared(below) and not layer.autoregressive
        all_rows.append(merge_draws(activations, own, weights) if same else make_rows(layer, activations, own, weights))
    return all_rows


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
