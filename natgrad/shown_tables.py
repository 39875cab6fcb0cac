"""How objects show themselves: tables in notebooks, and the choices that something was built with."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from types import FunctionType
from typing import Any

from torch import nn


def write_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table, as notebooks show it.

    Args:
        head: Titles of the columns.
        rows: A cell of text for each column.
    """
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def write_choices(thing: Any, **choices: Any) -> str:
    """`Name(a=1, b=2)`.

    Args:
        thing: Whose class is named.
        **choices: What it was built with, or stands at.
    """
    words = ", ".join(f"{name}={show_choice(value)}" for name, value in choices.items() if value is not None)
    return f"{type(thing).__name__}({words})"


def show_choice(value: Any) -> str:
    """A module by its class, a function by its name, a number in four digits.

    Args:
        value: Of a choice.
    """
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, FunctionType):
        return value.__name__
    return show_cell(value)


def show_cell(value: Any) -> str:
    """A number in four digits, a dash for what there is not.

    Args:
        value: Of a table.
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
