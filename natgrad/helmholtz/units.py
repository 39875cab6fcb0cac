"""Layers of binary units given their parents: a logistic regression per unit, and the rows that it learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.operators import SharedRows

States = list[Tensor]
"""One tensor (..., size) per layer, visible first."""


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

    def seen_columns(self) -> Tensor | None:
        """The columns that each unit sees, (size, columns); None: all."""
        return self.get_buffer("mask") if self.autoregressive else None

    def activate(self, parents: Tensor | None, own: Tensor) -> Activations:
        """What units (..., size) with parents (..., m) see, and make of it."""
        if parents is not None and is_shared(parents) and not self.autoregressive:
            return replace(self.activate(parents[0], own[0]), own=own)
        inputs, mask = self._join_inputs(parents, own), self.seen_columns()
        # an entry for a unit that is not seen has no slope
        weight = self.weight if mask is None else self.weight * mask
        return Activations(self, own, inputs, functional.linear(inputs, weight))

    def sample(self, parents: Tensor | None, shape: Sequence[int], generator: torch.Generator | None) -> Activations:
        """Units drawn given parents (*shape, m)."""
        own = self.weight.new_full((), self.low).expand(*shape, self.size)
        if not self.autoregressive:
            seen = self.activate(parents, own)
            return replace(seen, own=self._draw_bits(torch.sigmoid(seen.logits).expand(own.shape), generator))
        own, columns = own.clone(), slice(self.parents, self.parents + self.size)
        fixed = functional.linear(self._join_inputs(parents, torch.zeros_like(own)), self.weight)
        for j in range(self.size):  # each given those before it
            logit = fixed[..., j] + own[..., :j] @ self.weight[j, columns][:j]
            own[..., j] = self._draw_bits(torch.sigmoid(logit), generator)
        return self.activate(parents, own)

    def _join_inputs(self, parents: Tensor | None, own: Tensor) -> Tensor:
        """a of every row, (..., columns)."""
        parts = [] if parents is None else [parents]
        parts += [own] if self.autoregressive else []
        return torch.cat([*parts, torch.ones_like(own[..., :1])], dim=-1)

    def _draw_bits(self, chances: Tensor, generator: torch.Generator | None) -> Tensor:
        up = torch.bernoulli(chances, generator=generator)
        return up if self.low == 0 else 2 * up - 1


@dataclass(frozen=True)
class Activations:
    """A layer's units (..., size), a (..., columns) and W a; the last two of examples alone, where draws see the same.

    All that a step needs is computed once: log-probabilities, gradients and Fisher blocks are read off the logits.
    """

    layer: Conditional
    own: Tensor
    inputs: Tensor
    logits: Tensor

    def log_chances(self) -> Tensor:
        """log p(own | a), summed over units, (...)."""
        up = self.own[0] > 0 if is_shared(self.own) else self.own > 0
        return -functional.softplus(self.logits * (1 - 2 * up.to(self.logits.dtype))).sum(-1)

    def teach(self, weights: Tensor) -> LogisticRows:
        """What the layer learns, weights (...); one row for all draws of an example that see the same."""
        up, logits = (self.own > 0).to(self.logits.dtype), self.logits
        if logits.dim() < up.dim():
            total = weights.sum(0)  # (b,)
            mean = torch.einsum("kb,kbj->bj", weights, up) / total.unsqueeze(1)
            return LogisticRows(self.inputs, mean - torch.sigmoid(logits), logits, total, None)
        inputs, residuals, logits = (p.flatten(0, -2) for p in (self.inputs, up - torch.sigmoid(logits), logits))
        return LogisticRows(inputs, residuals, logits, weights.flatten(), self.layer.seen_columns())


def is_shared(states: Tensor) -> bool:
    """True if all draws of an example are one: states (samples, b, size) that were expanded."""
    return states.dim() == 3 and states.stride(0) == 0


def each_layer(layers: nn.ModuleList) -> Iterator[Conditional]:
    """The layers of a network, typed."""
    for layer in layers:
        assert isinstance(layer, Conditional)
        yield layer


@torch.no_grad()
def sample_recognition(
    layers: nn.ModuleList, x: Tensor, generator: torch.Generator | None
) -> tuple[States, list[Activations]]:
    """Draws of every layer of q from examples (samples, b, visible) on: all states, x first, and what layers saw."""
    states, seen = [x], list[Activations]()
    for layer in each_layer(layers):
        seen.append(layer.sample(states[-1], x.shape[:-1], generator))
        states.append(seen[-1].own)
    return states, seen


def activate_generation(layers: nn.ModuleList, states: States) -> list[Activations]:
    """What the layers of p make of states (..., size)."""
    given = zip(each_layer(layers), [*states[1:], None], states, strict=True)
    return [layer.activate(parents, own) for layer, parents, own in given]


def activate_recognition(layers: nn.ModuleList, states: States) -> list[Activations]:
    """What the layers of q make of states (..., size)."""
    return [layer.activate(*pair) for layer, pair in zip(each_layer(layers), pairwise(states), strict=True)]


def sum_log_chances(network: list[Activations]) -> Tensor:
    """log of the product over layers of p(own | parents), (...)."""
    return torch.stack([layer.log_chances() for layer in network]).sum(0)


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

    def fisher(self) -> SharedRows:
        """F_j = E[s' (W_j a) a a^T] of every unit j of the layer (Varady, Volpi, Malago & Ay 2022)."""
        return SharedRows(self.inputs, (self.slopes * self.weights.unsqueeze(1)).mT, self.mask)

    def scale_by(self, factor: float) -> LogisticRows:
        """The same rows with weights that sum to `factor`."""
        return replace(self, weights=factor * self.weights)

    def drop_all(self) -> LogisticRows:
        """No rows, in the same shapes."""
        return replace(self, **{part: getattr(self, part)[:0] for part in PARTS})

    def join(self, other: LogisticRows) -> LogisticRows:
        """These and others, one after the other."""
        return replace(self, **{part: torch.cat([getattr(self, part), getattr(other, part)]) for part in PARTS})
