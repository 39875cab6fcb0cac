"""How objects show themselves: tables in notebooks, and the choices that something was built with."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from types import FunctionType
from typing import Any

import torch
from torch import nn


def write_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table, as notebooks show it."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


class Columns:
    """Lists of equal length by name, with one entry per update or generation: `history["kl"]`.

    Args:
        names: Of the lists; the first has an entry for each.
        entries: What an entry is of, for the representation.
    """

    def __init__(self, names: Iterable[str], entries: str) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in names}
        self._entries = entries

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __repr__(self) -> str:
        return f"History of {len(self)} {self._entries}: {', '.join(self._columns)}"

    def _repr_html_(self) -> str:
        last = range(max(0, len(self) - 10), len(self))
        return write_table(self.names, ([show_cell(self[name][i]) for name in self.names] for i in last))

    @property
    def names(self) -> list[str]:
        """The names of the lists."""
        return list(self._columns)

    def state_dict(self) -> dict[str, list[Any]]:
        """The lists, for a checkpoint."""
        return {name: list(column) for name, column in self._columns.items()}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Go on from a checkpoint.

        Args:
            state: What `state_dict` returned.
        """
        self._columns = {name: list(column) for name, column in state.items()}


def write_choices(thing: Any, **choices: Any) -> str:
    """`Name(a=1, b=2)`."""
    words = ", ".join(f"{name}={show_choice(value)}" for name, value in choices.items() if value is not None)
    return f"{type(thing).__name__}({words})"


def show_choice(value: Any) -> str:
    """A module by its class, a function by its name, a generator by its device, a number in four digits."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, FunctionType):
        return value.__name__
    if isinstance(value, torch.Generator):
        return f"Generator({value.device})"
    return show_cell(value)


def show_cell(value: Any) -> str:
    """A number in four digits, a dash for what there is not."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
