"""A small transformer that guesses the next character of text that every Python has at hand: its documentation."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from natgrad_lab.data import Split
from natgrad_lab.experiments import contestants
from natgrad_lab.experiments.base import LabError, Task
from natgrad_lab.experiments.models import TransformerBlock, classify
from natgrad_lab.experiments.race import RaceSettings, race
from natgrad_lab.experiments.settings import check_counts


@dataclass(frozen=True)
class CharTransformerSettings(RaceSettings):
    """What `--set` can change."""

    looked_at: int = 500  # windows of the training and of the test text
    methods: str = "structures"  # or names of contestants such as kfac,adam
    layers: int = 2  # of the transformer
    width: int = 128  # of the transformer
    heads: int = 4  # of attention: of its queries
    length: int = 64  # characters of a window

    def __post_init__(self) -> None:
        check_counts(self, "layers", "width", "heads", "length")


def tasks(settings: CharTransformerSettings) -> tuple[Task, ...]:
    """One task: cross-entropy of the next character."""
    s, title = settings, f"transformer of {settings.layers} layers, width {settings.width}"
    model = lambda: Transformer(len(SYMBOLS), s.length, s.width, s.heads, s.layers)  # noqa: E731
    return (predict_text("text", title, model, s, ("symbol.weight", "place.weight", "head.weight")),)


def predict_text(name: str, title: str, model: Callable[[], nn.Module], settings: Any, but: Collection[str]) -> Task:
    """The next character of the documentation. but: embeddings and logits, which are Adam's where Muon has the rest."""
    among = contestants.line_up(32, but, **GRIDS)
    return classify(
        name,
        f"Next character, {title}",
        model,
        lambda: windows(documentation(), settings.length),
        contestants.select(settings.methods, among),
        dim=1,
        unit="nats per character",
    )


GRIDS = {
    "adam": {"lr": (3e-3, 0.01)},
    "muon": {"lr": (0.02, 0.05), "adam_lr": (3e-3,)},
    "soap": {"lr": (0.01, 0.03)},
    "sgd": {"lr": (0.1, 0.3)},
}


class Transformer(nn.Module):
    """Characters (b, t) -> logits (b, symbols, t) of the ones that follow; norms come first in every block."""

    def __init__(self, symbols: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device).expand_as(characters)
        hidden = self.blocks(self.symbol(characters) + self.place(places))
        return self.head(self.norm(hidden)).mT


SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))  # what is left of the text: 96 characters


def documentation(library: Path | None = None) -> str:
    """The licence, where the installation has it, and the docstrings of all single-file modules, by their names.

    They are read, not imported: by default those of the running Python. LabError where there are no sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if library is None else library
    licence = root / "LICENSE.txt"
    parts = [licence.read_text("utf-8")] if licence.is_file() else []
    parts += [text for path in sorted(root.glob("*.py")) for text in docstrings(path.read_text("utf-8"))]
    if not parts:
        raise LabError(f"{root} has no docstrings to read: Python's standard library is installed without its sources")
    return "\n\n".join(parts)


def docstrings(source: str) -> list[str]:
    """Of a module, its classes and its functions, in the order in which they are met; none where it cannot be read."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    try:
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    except SyntaxError:  # some files are there to be wrong
        return []
    return [text for node in nodes if (text := ast.get_docstring(node))]


def encode_text(text: str) -> Tensor:
    """Numbers in SYMBOLS, (n,) int64; other characters are dropped."""
    place = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    return torch.tensor([place[symbol] for symbol in text if symbol in place])


def windows(text: str, length: int, test: float = 0.1) -> Split:
    """Windows (n, length) that follow one another, with the next characters as targets. test: the share at the end."""
    symbols = encode_text(text)
    n = (len(symbols) - 1) // length
    cut = n - int(test * n)
    if not 0 < cut < n:
        raise LabError(
            f"length is {length}: the text has {len(symbols)} characters, too few for windows of that length"
        )
    x, y = symbols[: n * length].view(n, length), symbols[1 : n * length + 1].view(n, length)
    return Split(x[:cut], y[:cut], x[cut:], y[cut:])


RACE = race(
    "char_transformer",
    "A small transformer on Python's own documentation",
    CharTransformerSettings,
    tasks,
    title="A small transformer: the natural gradient beside Adam, Muon, SOAP and SGD",
    minutes=15,
    quick={"seeds": 1, "seconds": 8.0, "methods": "kfac,adam", "looked_at": 100},
)
