"""Small random networks for fuzzers: what they are built of, and the inputs that they take. Float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
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


class TiedTable(nn.Module):
    """Logits by the table that embeds the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(torch.tanh(self.inner(self.table(x))), self.table.weight)


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


def recurrent(draw: st.DrawFn, i: int, w: int, first: bool) -> nn.Module:
    kind = draw(st.sampled_from([nn.RNN, nn.GRU, nn.LSTM]))
    return nn.Sequential(kind(i, 3, batch_first=first), Take(), nn.Linear(3, w))


KINDS = (
    "linear", "deep", "residual", "conv1", "conv2", "groups", "conv3", "transposed", "embedding", "bag", "sequence",
    "attention", "encoder", "pooled", "recurrent", "cells", "bare", "behind", "shared", "low rank", "tied", "named",
    "batch norm", "group norm", "graph",
)  # fmt: skip


@st.composite
def nets(draw: st.DrawFn) -> Net:
    """A network with outputs (b, w), (b, t, w) or, examples second, (t, b, w), and inputs for it."""
    kind, b = draw(st.sampled_from(KINDS)), draw(st.sampled_from([1, 2, 3, 5]))
    i, w, t = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 3))
    bias, first, act = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(ACTIVATIONS))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    size = (b, t) if first else (t, b)
    inputs: Any = torch.randn(b, i)
    mixes = False

    def line(a: int, c: int) -> nn.Module:
        return nn.Linear(a, c, bias=bias)

    if kind == "linear":
        model = line(i, w)
    elif kind == "deep":
        model = nn.Sequential(line(i, 4), act(), nn.LayerNorm(4), line(4, 3), act(), line(3, w))
    elif kind == "residual":
        model = nn.Sequential(Residual(line(i, 3), act(), line(3, i)), line(i, w))
    elif kind == "conv1":
        inputs = torch.randn(b, i, 7)
        conv = nn.Conv1d(i, 3, 3, stride=draw(st.integers(1, 2)), padding=draw(st.integers(0, 1)), bias=bias)
        model = nn.Sequential(conv, act(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), line(6, w))
    elif kind == "conv2":
        inputs, mode = torch.randn(b, i, 4, 5), draw(st.sampled_from(["zeros", "circular", "reflect"]))
        conv = nn.Conv2d(i, 2, 3, padding=draw(st.sampled_from([1, "same"])), padding_mode=mode, bias=bias)
        model = nn.Sequential(conv, act(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), line(8, w))
    elif kind == "groups":
        inputs, groups = torch.randn(b, 4, 4, 4), draw(st.sampled_from([2, 4]))
        model = nn.Sequential(
            nn.Conv2d(4, 4, 2, groups=groups),
            act(),
            nn.GroupNorm(2, 4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            line(4, w),
        )
    elif kind == "conv3":
        inputs = torch.randn(b, 1, 3, 3, 3)
        model = nn.Sequential(nn.Conv3d(1, 2, 2), act(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), line(2, w))
    elif kind == "transposed":
        inputs, stride = torch.randn(b, i, 2, 2), draw(st.integers(1, 2))
        conv = nn.ConvTranspose2d(i, 2, 2, stride=stride, bias=bias)
        model = nn.Sequential(conv, act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), line(2, w))
    elif kind == "embedding":
        inputs, padding = torch.randint(0, 5, (b, 3)), draw(st.sampled_from([None, 0]))
        model = nn.Sequential(nn.Embedding(5, 2, padding_idx=padding), act(), nn.Flatten(), line(6, w))
    elif kind == "bag":
        inputs, mode = torch.randint(0, 5, (b, 3)), draw(st.sampled_from(["sum", "mean", "max"]))
        model = nn.Sequential(nn.EmbeddingBag(5, 3, mode=mode), act(), line(3, w))
    elif kind == "sequence":
        inputs = torch.randn(*size, i)
        model = nn.Sequential(line(i, 4), act(), nn.RMSNorm(4), line(4, w))
    elif kind == "attention":
        inputs, model = torch.randn(*size, 4), nn.Sequential(Residual(Attend(first)), line(4, w))
    elif kind in ("encoder", "pooled"):
        inputs, norm = torch.randn(*size, 4), draw(st.booleans())
        body = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=first, norm_first=norm)
        after = [] if kind == "encoder" else [Mean(1 if first else 0)]
        model = nn.Sequential(body, *after, line(4, w))
    elif kind == "recurrent":
        inputs, model = torch.randn(*size, i), recurrent(draw, i, w, first)
    elif kind == "cells":
        inputs, model = torch.randn(b, t, i), nn.Sequential(Cells(i), line(4, w))
    elif kind == "bare":
        model = nn.Sequential(Contract(i), act(), line(4, w))
    elif kind == "behind":
        model = nn.Sequential(Behind(i), act(), line(4, w))
    elif kind == "shared":
        one = line(3, 3)
        model = nn.Sequential(line(i, 3), act(), one, nn.Tanh(), one, line(3, w))
    elif kind == "low rank":
        model = nn.Sequential(LowRankUpdate(i), act(), line(4, w))
    elif kind == "tied":
        inputs, model = torch.randint(0, 4, (b, t)), TiedTable()
    elif kind == "graph":
        model = nn.Sequential(line(i, 4), act(), Neighbours(), line(4, w))
    elif kind == "named":
        inputs, model = ({"u": torch.randn(b, i), "v": torch.randn(b, i)},), Named(i, w)
    elif kind == "batch norm":
        inputs, mixes = torch.randn(max(b, 3), i), draw(st.booleans())
        model = nn.Sequential(line(i, 4), nn.BatchNorm1d(4).train(mixes), act(), line(4, w))
    else:
        inputs = torch.randn(b, 4, 3)
        model = nn.Sequential(nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 2), act(), nn.Flatten(), line(4, w))
    return Net(kind, model.double(), double(inputs), mixes)


def double(inputs: Any) -> Any:
    """Floating inputs in float64."""
    if isinstance(inputs, tuple):
        return tuple({name: part.double() for name, part in one.items()} for one in inputs)
    return inputs.double() if inputs.is_floating_point() else inputs
