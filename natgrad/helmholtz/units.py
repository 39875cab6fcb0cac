"""Layers of binary units given their parents: a logistic regression per unit, and the rows that it learns from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.operators import SharedRows


@dataclass(frozen=True)
class Activations:
    """a (..., columns) and W a (..., size) of a layer's units; of the examples alone, where all draws see the same."""

    inputs: Tensor
    logits: Tensor


class Conditional(nn.Module):
    """p(h_j is up | .) = sigmoid(W_j a) of `size` units of `low` (0 or -1) and 1, a = [parents, earlier units, 1].

    weight: (size, columns), the bias as last column. In an autoregressive layer unit j sees the units before it.
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
Pairs = list[tuple[Tensor | None, Tensor]]
"""Parents (..., m) and own units (..., size) of every layer of a network."""
PARTS = ("inputs", "residuals", "logits", "weights")


@dataclass(frozen=True)
class LogisticRows:
    """What one layer learns from: a (s, columns), y - sigmoid and W a (s, size), weights (s,) that sum to 1."""

    inputs: Tensor
    residuals: Tensor
    logits: Tensor
    weights: Tensor
    mask: Tensor | None  # the columns that a unit sees, (size, columns); None: all

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


def pair_generation(states: States) -> Pairs:
    """What the layers of p see and are in states (..., size)."""
    return list(zip([*states[1:], None], states, strict=True))


def pair_recognition(states: States) -> Pairs:
    """What the layers of q see and are in states (..., size)."""
    return list(pairwise(states))


def activate_layers(layers: nn.ModuleList, pairs: Pairs) -> list[Activations]:
    """a and W a of every layer."""
    return [layer.activate(parents, own) for layer, (parents, own) in zip(each_layer(layers), pairs, strict=True)]


def sum_log_chances(seen: list[Activations], pairs: Pairs) -> Tensor:
    """log of the product over layers of p(own | parents), (...)."""
    return torch.stack([log_chances(s.logits, own) for s, (_, own) in zip(seen, pairs, strict=True)]).sum(0)


def teach_layers(layers: nn.ModuleList, pairs: Pairs, seen: list[Activations], weights: Tensor) -> list[LogisticRows]:
    """Rows of every layer, from what it sees and makes of it; weights (...)."""
    each = zip(each_layer(layers), pairs, seen, strict=True)
    return [
        merge_draws(activations, own, weights)
        if parents is not None and is_shared(parents) and not layer.autoregressive
        else make_rows(layer, activations, own, weights)
        for layer, (parents, own), activations in each
    ]


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
