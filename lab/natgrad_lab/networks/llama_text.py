"""A small language model of Llama's blocks on Python's documentation: RMSNorm, rotations, grouped queries, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad_lab.experiments.base import LabError, Task
from natgrad_lab.experiments.race import race
from natgrad_lab.experiments.settings import check_counts
from natgrad_lab.networks.char_transformer import SYMBOLS, CharTransformerSettings, predict_text


@dataclass(frozen=True)
class LlamaTextSettings(CharTransformerSettings):
    """What `--set` can change."""

    groups: int = 2  # of keys and values: heads / groups queries share one
    tied: bool = False  # whether the logits' matrix is the embedding's

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "groups")


def tasks(settings: LlamaTextSettings) -> tuple[Task, ...]:
    """One task: cross-entropy of the next character."""
    s, tied = settings, ", tied" if settings.tied else ""
    model = lambda: Llama(len(SYMBOLS), s.width, s.heads, s.groups, s.layers, s.tied)  # noqa: E731
    title = f"Llama of {s.layers} layers, width {s.width}{tied}"
    return (predict_text("llama", title, model, s, ("symbol.weight", "head.weight")),)


class Llama(nn.Module):
    """Characters (b, t) -> logits (b, symbols, t) of the ones that follow. Touvron et al. 2023."""

    def __init__(self, symbols: int, width: int, heads: int, groups: int, layers: int, tied: bool) -> None:
        super().__init__()
        if width % (2 * heads) or heads % groups:
            raise LabError(
                f"width is {width}, heads {heads}, groups {groups}: expected heads that divide half the width, and "
                "groups that divide the heads"
            )
        self.symbol = nn.Embedding(symbols, width)
        self.blocks = nn.Sequential(*(LlamaBlock(width, heads, groups) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, symbols, bias=False)
        if tied:
            nn.init.normal_(self.symbol.weight, std=width**-0.5)  # torch's own would make logits of size width^1/2
            self.head.weight = self.symbol.weight

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.symbol(characters)))).mT


class LlamaBlock(nn.Module):
    """x + attention(norm x), then x + SwiGLU(norm x), on (b, t, width), without biases."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.mixed = nn.Linear(width, width, bias=False)
        inner = 8 * width // 3
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mixed(self.attention(self.before(hidden)))
        inside = self.between(hidden)
        return hidden + self.down(functional.silu(self.gate(inside)) * self.up(inside))

    def attention(self, inside: Tensor) -> Tensor:
        """(b, t, width) -> (b, t, width): every place looks at itself and at those before it."""
        query, key, value = (
            layer(inside).unflatten(2, (many, self.size)).transpose(1, 2)  # (b, many, t, size)
            for layer, many in ((self.query, self.heads), (self.key, self.groups), (self.value, self.groups))
        )
        shared = self.heads // self.groups
        key, value = (part.repeat_interleave(shared, dim=1) for part in (rotate(key), value))
        values = functional.scaled_dot_product_attention(rotate(query), key, value, is_causal=True)
        return values.transpose(1, 2).flatten(2)


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Pairs of entries of x (b, heads, t, size) turned by angles that grow with the place. Su et al. 2021."""
    half = x.shape[-1] // 2
    speeds = base ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * speeds
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


RACE = race(
    "llama_text",
    "A small Llama on Python's own documentation",
    LlamaTextSettings,
    tasks,
    title="A small Llama: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=15,
    quick={"seeds": 1, "seconds": 8.0, "methods": "kfac,adam", "looked_at": 100},
)
