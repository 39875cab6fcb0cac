"""One layer of binary units given its parents: a logistic regression per unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


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
        return Activations(inputs, functional.linear(inputs, self.seeing()))

    def logits(self, parents: Tensor | None, own: Tensor) -> Tensor:
        """W a, (..., size)."""
        return self.activate(parents, own).logits.expand(own.shape)

    def log_prob(self, parents: Tensor | None, own: Tensor) -> Tensor:
        """log p(own | parents), (...)."""
        return log_chances(self.activate(parents, own).logits, own)

    def sample(self, parents: Tensor | None, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Units drawn given parents (*shape, m), (*shape, size)."""
        return self.sample_with_activations(parents, shape, generator)[0]

    def sample_with_activations(
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

    def seeing(self) -> Tensor:
        """The weights that count: an entry for a unit that is not seen has no slope."""
        return self.weight * self.get_buffer("mask") if self.autoregressive else self.weight

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
