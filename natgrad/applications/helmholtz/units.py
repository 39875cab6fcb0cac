"""One layer of binary units given its parents: a logistic regression per unit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional


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

    def logits(self, parents: Tensor | None, own: Tensor) -> Tensor:
        """W a, (..., size)."""
        if parents is not None and parents.dim() == 3 and parents.stride(0) == 0 and not self.autoregressive:
            return self.logits(parents[0], own[0]).expand(len(own), -1, -1)  # all draws of an example see the same
        return functional.linear(self.inputs(parents, own), self.seeing())

    def log_prob(self, parents: Tensor | None, own: Tensor) -> Tensor:
        """log p(own | parents), (...)."""
        logits = self.logits(parents, own)
        return -functional.softplus(torch.where(own > 0, -logits, logits)).sum(-1)

    def sample(self, parents: Tensor | None, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Units drawn given parents (*shape, m), (*shape, size)."""
        own = self.weight.new_full((*shape, self.size), self.low)
        if not self.autoregressive:
            return self._draw_bits(self.logits(parents, own), generator)
        columns = slice(self.parents, self.parents + self.size)
        fixed = functional.linear(self.inputs(parents, torch.zeros_like(own)), self.weight)
        for j in range(self.size):
            logit = fixed[..., j] + own[..., :j] @ self.weight[j, columns][:j]
            own[..., j] = self._draw_bits(logit, generator)
        return own

    def residual(self, parents: Tensor | None, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a (..., columns), y - s (..., size) and s (1 - s): the slope of log p in W_j is (y - s)_j a."""
        inputs = self.inputs(parents, own)
        logits = functional.linear(inputs, self.seeing())
        up = torch.sigmoid(logits)
        return inputs, (own > 0).to(up.dtype) - up, up * torch.sigmoid(-logits)

    def seeing(self) -> Tensor:
        """The weights that count: an entry for a unit that is not seen has no slope."""
        return self.weight * self.get_buffer("mask") if self.autoregressive else self.weight

    def seen_columns(self) -> Tensor | None:
        """The columns that each unit sees, (size, columns); None: all."""
        return self.get_buffer("mask") if self.autoregressive else None

    def _draw_bits(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        up = torch.bernoulli(torch.sigmoid(logits), generator=generator)
        return up if self.low == 0 else 2 * up - 1


def each_layer(layers: nn.ModuleList) -> Iterator[Conditional]:
    """The layers of a network, typed."""
    for layer in layers:
        assert isinstance(layer, Conditional)
        yield layer
