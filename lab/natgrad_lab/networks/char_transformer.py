"""A small transformer that guesses the next character of Python's own documentation.

The natural gradient in blocks per layer, with its defaults, beside Adam, Muon, SOAP and SGD, each tuned over a grid of
the same size, on equal seconds of one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import Contestant, Task, TaskData
from natgrad_lab.experiments.models import categorical_divergence, mistakes
from natgrad_lab.experiments.race import RaceSettings, race
from natgrad_lab.networks.text import SYMBOLS, documentation, windows


@dataclass(frozen=True)
class CharTransformerSettings(RaceSettings):
    """What `--set` can change."""

    looked_at: int = 500  # windows of the training and of the test text
    methods: str = "structures"  # or names of contestants such as kfac,adam
    layers: int = 2  # of the transformer
    width: int = 128  # of the transformer
    heads: int = 4  # of attention
    length: int = 64  # characters of a window


def tasks(settings: CharTransformerSettings) -> tuple[Task, ...]:
    """One task: cross-entropy of the next character."""
    return (
        Task(
            name="text",
            title=f"Next character, transformer of {settings.layers} layers, width {settings.width}",
            model=lambda: Transformer(len(SYMBOLS), settings.length, settings.width, settings.heads, settings.layers),
            data=lambda: examples(settings.length),
            criterion=nn.CrossEntropyLoss(),
            unit="nats per character",
            divergence=partial(categorical_divergence, dim=1),
            error=partial(mistakes, dim=1),
            contestants=contestants.select(settings.methods, among(), contestants.GROUPS),
        ),
    )


def examples(length: int) -> TaskData:
    """Windows of the documentation."""
    return windows(documentation(), length)


def among() -> Mapping[str, Contestant]:
    """Grids narrowed by probes with the tuning seed. Embeddings and logits are Adam's where Muon has the rest."""
    grid = contestants.grid
    return contestants.by_default(batch=32) | {
        "adam": contestants.adam(grid(batch=(32,), lr=(3e-3, 0.01))),
        "muon": contestants.muon(
            grid(batch=(32,), lr=(0.02, 0.05), adam_lr=(3e-3,)), but=("symbol.weight", "place.weight", "head.weight")
        ),
        "soap": contestants.soap(grid(batch=(32,), lr=(0.01, 0.03))),
        "sgd": contestants.sgd(grid(batch=(32,), lr=(0.1, 0.3))),
    }


class Transformer(nn.Module):
    """Characters (b, t) -> logits (b, symbols, t) of the ones that follow; norms come first in every block."""

    def __init__(self, symbols: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TextBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device).expand_as(characters)
        hidden = self.blocks(self.symbol(characters) + self.place(places))
        return self.head(self.norm(hidden)).mT


class TextBlock(nn.Module):
    """x + attention(norm x), then x + perceptron(norm x), on (b, t, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.asked, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mixed(self.attention(self.asked(self.before(hidden))))
        return hidden + self.perceptron(hidden)

    def attention(self, asked: Tensor) -> Tensor:
        """(b, t, 3 width) -> (b, t, width): every place looks at itself and at those before it."""
        query, key, value = asked.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (b, heads, t, e)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


RACE = race(
    "char_transformer",
    "A small transformer on Python's own documentation",
    CharTransformerSettings,
    tasks,
    title="A small transformer: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=15,
    quick={"seeds": 1, "seconds": 8.0, "methods": "kfac,adam", "looked_at": 100},
)
