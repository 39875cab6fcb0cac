"""Small random networks for fuzzers: what they are built of, and the inputs that they take. Float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from models import Assembled
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.Tanh, nn.ReLU, nn.GELU, nn.Softplus, nn.SiLU, nn.ELU, nn.PReLU, lambda: nn.PReLU(1),
)  # fmt: skip


@dataclass(frozen=True)
class Net:
    """What a network was drawn as. mixes: a batch norm's statistics are of the batch."""

    kind: str
    model: nn.Module
    inputs: Any
    mixes: bool = False

    def __repr__(self) -> str:
        return f"{self.kind}: {self.model} on {self.inputs!r}"


class Take(nn.Module):
    """The first of a module's outputs."""

    def forward(self, x: Any) -> Tensor:
        return x[0] if isinstance(x, tuple) else x


class Mean(nn.Module):
    """The mean over a dimension."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axis)


class Residual(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x)


class Attend(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Contract(nn.Module):
    """A weight of three dimensions, a gain and a shift, all bare."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(0.4 * torch.randn(4, 2, i)), nn.Parameter(0.1 * torch.randn(4))
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oki->...o", x, self.w) * self.gain.exp() + self.b


class Behind(nn.Module):
    """A layer whose weight is used once more, beside it."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.layer = nn.Linear(i, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, 1.5 * self.layer.weight, self.layer.bias) + self.layer(x)


class LowRankUpdate(nn.Module):
    """W + B A."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(0.4 * torch.randn(4, i)), nn.Parameter(0.4 * torch.randn(2, i))
        self.b = nn.Parameter(0.4 * torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.w + self.b @ self.a).T


class Cells(nn.Module):
    """A recurrent cell called once per position, (b, t, i) -> (b, 4)."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(i, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for part in x.unbind(1):
            state = self.cell(part, state)
        return state


def build_tied_table() -> nn.Module:
    """Logits by the table that embeds the tokens."""
    return Assembled(
        lambda m, x: functional.linear(torch.tanh(m.inner(m.table(x))), m.table.weight),
        table=nn.Embedding(4, 3),
        inner=nn.Linear(3, 3),
    )


class Neighbours(nn.Module):
    """Every row with some of all others', as in a network on a graph."""

    def forward(self, x: Tensor) -> Tensor:
        edges = torch.linspace(0.1, 0.9, len(x) ** 2, dtype=x.dtype).view(len(x), len(x))
        return edges.softmax(1) @ x


class Named(nn.Module):
    """Two inputs, by name in a dict."""

    def __init__(self, i: int, w: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(i, w), nn.Linear(i, w)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.a(inputs["u"])) * self.b(inputs["v"])


@dataclass(frozen=True)
class Sizes:
    """What all kinds of networks have in common.

    draw: takes from a strategy. b, t, i, w: examples, positions, inputs and outputs. first: examples come before
    positions. act: makes an activation.
    """

    draw: st.DrawFn
    b: int
    t: int
    i: int
    w: int
    bias: bool
    first: bool
    act: Callable[[], nn.Module]

    def choose(self, *among: Any) -> Any:
        return self.draw(st.sampled_from(among))

    def line(self, a: int, c: int) -> nn.Module:
        return nn.Linear(a, c, bias=self.bias)

    def rows(self) -> Tensor:
        return torch.randn(self.b, self.i)

    def positions(self, width: int) -> Tensor:
        return torch.randn(*((self.b, self.t) if self.first else (self.t, self.b)), width)


def build_deep(s: Sizes) -> tuple[nn.Module, Any]:
    parts = (s.line(s.i, 4), s.act(), nn.LayerNorm(4), s.line(4, 3), s.act(), s.line(3, s.w))
    return nn.Sequential(*parts), s.rows()


def build_residual(s: Sizes) -> tuple[nn.Module, Any]:
    return nn.Sequential(Residual(s.line(s.i, 3), s.act(), s.line(3, s.i)), s.line(s.i, s.w)), s.rows()


def build_shared(s: Sizes) -> tuple[nn.Module, Any]:
    one = s.line(3, 3)
    return nn.Sequential(s.line(s.i, 3), s.act(), one, nn.Tanh(), one, s.line(3, s.w)), s.rows()


def build_conv1(s: Sizes) -> tuple[nn.Module, Any]:
    inputs, stride, padding = torch.randn(s.b, s.i, 7), s.choose(1, 2), s.choose(0, 1)
    conv = nn.Conv1d(s.i, 3, 3, stride=stride, padding=padding, bias=s.bias)
    return nn.Sequential(conv, s.act(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), s.line(6, s.w)), inputs


def build_conv2(s: Sizes) -> tuple[nn.Module, Any]:
    inputs, mode = torch.randn(s.b, s.i, 4, 5), s.choose("zeros", "circular", "reflect")
    conv = nn.Conv2d(s.i, 2, 3, padding=s.choose(1, "same"), padding_mode=mode, bias=s.bias)
    return nn.Sequential(conv, s.act(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), s.line(8, s.w)), inputs


def build_groups(s: Sizes) -> tuple[nn.Module, Any]:
    conv = nn.Conv2d(4, 4, 2, groups=s.choose(2, 4))
    after = (s.act(), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), s.line(4, s.w))
    return nn.Sequential(conv, *after), torch.randn(s.b, 4, 4, 4)


def build_conv3(s: Sizes) -> tuple[nn.Module, Any]:
    after = (s.act(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), s.line(2, s.w))
    return nn.Sequential(nn.Conv3d(1, 2, 2), *after), torch.randn(s.b, 1, 3, 3, 3)


def build_transposed(s: Sizes) -> tuple[nn.Module, Any]:
    conv = nn.ConvTranspose2d(s.i, 2, 2, stride=s.choose(1, 2), bias=s.bias)
    return nn.Sequential(conv, s.act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), s.line(2, s.w)), torch.randn(
        s.b, s.i, 2, 2
    )


def build_embedding(s: Sizes) -> tuple[nn.Module, Any]:
    table = nn.Embedding(5, 2, padding_idx=s.choose(None, 0))
    return nn.Sequential(table, s.act(), nn.Flatten(), s.line(6, s.w)), torch.randint(0, 5, (s.b, 3))


def build_bag(s: Sizes) -> tuple[nn.Module, Any]:
    bag = nn.EmbeddingBag(5, 3, mode=s.choose("sum", "mean", "max"))
    return nn.Sequential(bag, s.act(), s.line(3, s.w)), torch.randint(0, 5, (s.b, 3))


def build_sequence(s: Sizes) -> tuple[nn.Module, Any]:
    return nn.Sequential(s.line(s.i, 4), s.act(), nn.RMSNorm(4), s.line(4, s.w)), s.positions(s.i)


def build_attention(s: Sizes) -> tuple[nn.Module, Any]:
    return nn.Sequential(Residual(Attend(s.first)), s.line(4, s.w)), s.positions(4)


def build_encoder(s: Sizes, *after: nn.Module) -> tuple[nn.Module, Any]:
    norm = s.draw(st.booleans())
    body = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=s.first, norm_first=norm)
    return nn.Sequential(body, *after, s.line(4, s.w)), s.positions(4)


def build_recurrent(s: Sizes) -> tuple[nn.Module, Any]:
    kind = s.choose(nn.RNN, nn.GRU, nn.LSTM)
    return nn.Sequential(kind(s.i, 3, batch_first=s.first), Take(), nn.Linear(3, s.w)), s.positions(s.i)


def build_batch_norm(s: Sizes) -> tuple[nn.Module, Any]:
    norm = nn.BatchNorm1d(4).train(s.draw(st.booleans()))
    return nn.Sequential(s.line(s.i, 4), norm, s.act(), s.line(4, s.w)), torch.randn(max(s.b, 3), s.i)


def build_group_norm(s: Sizes) -> tuple[nn.Module, Any]:
    parts = (nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 2), s.act(), nn.Flatten(), s.line(4, s.w))
    return nn.Sequential(*parts), torch.randn(s.b, 4, 3)


def put_before_line(make: Callable[[int], nn.Module], s: Sizes) -> tuple[nn.Module, Any]:
    """A module of four outputs, then an activation and a layer."""
    return nn.Sequential(make(s.i), s.act(), s.line(4, s.w)), s.rows()


KINDS: dict[str, Callable[[Sizes], tuple[nn.Module, Any]]] = {
    "linear": lambda s: (s.line(s.i, s.w), s.rows()),
    "deep": build_deep,
    "residual": build_residual,
    "conv1": build_conv1,
    "conv2": build_conv2,
    "groups": build_groups,
    "conv3": build_conv3,
    "transposed": build_transposed,
    "embedding": build_embedding,
    "bag": build_bag,
    "sequence": build_sequence,
    "attention": build_attention,
    "encoder": build_encoder,
    "pooled": lambda s: build_encoder(s, Mean(1 if s.first else 0)),
    "recurrent": build_recurrent,
    "cells": lambda s: (nn.Sequential(Cells(s.i), s.line(4, s.w)), torch.randn(s.b, s.t, s.i)),
    "bare": partial(put_before_line, Contract),
    "behind": partial(put_before_line, Behind),
    "shared": build_shared,
    "low rank": partial(put_before_line, LowRankUpdate),
    "tied": lambda s: (build_tied_table(), torch.randint(0, 4, (s.b, s.t))),
    "named": lambda s: (Named(s.i, s.w), ({"u": torch.randn(s.b, s.i), "v": torch.randn(s.b, s.i)},)),
    "batch norm": build_batch_norm,
    "group norm": build_group_norm,
    "graph": lambda s: (nn.Sequential(s.line(s.i, 4), s.act(), Neighbours(), s.line(4, s.w)), s.rows()),
}


@st.composite
def nets(draw: st.DrawFn) -> Net:
    """A network with outputs (b, w), (b, t, w) or, examples second, (t, b, w), and inputs for it."""
    kind, b = draw(st.sampled_from(tuple(KINDS))), draw(st.sampled_from([1, 2, 3, 5]))
    i, w, t = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 3))
    bias, first, act = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(ACTIVATIONS))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    model, inputs = KINDS[kind](Sizes(draw, b, t, i, w, bias, first, act))
    mixes = any(isinstance(part, nn.BatchNorm1d) and part.training for part in model.modules())
    return Net(kind, model.double(), double(inputs), mixes)


def double(inputs: Any) -> Any:
    """Floating inputs in float64."""
    if isinstance(inputs, tuple):
        return tuple({name: part.double() for name, part in one.items()} for one in inputs)
    return inputs.double() if inputs.is_floating_point() else inputs
