"""What a table of the command is: its title, rows and heads, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Iterable[tuple[str, ...]]
Shown = tuple[str, Rows, tuple[str, ...]]  # title, rows, heads of a table


@dataclass(frozen=True)
class ChosenTables:
    """What the command line says."""

    tables: list[str]
    repeats: int
    seeds: range | None  # None: as many as the table usually takes
    workloads: tuple[str, ...]
    methods: tuple[str, ...]
    redo: tuple[str, ...]
    steps: int | None
    seconds: float | None
    constant: bool
    threads: int

    @property
    def cycles(self) -> int:
        """Repeats of what takes long."""
        return max(3, self.repeats // 4)

    def show(self, title: str, usual: range, figures: Callable[[range], Rows], heads: tuple[str, ...]) -> Shown:
        """A table over seeds, those asked for or the usual ones; {} in its title says which."""
        seeds = self.seeds or usual
        return title.format(f"seeds {seeds[0]} to {seeds[-1]}"), figures(seeds), heads

    def race(self, usual: range, module: Any) -> Shown:
        """The table of a module with TITLE, HEADS and `figures`, of seeds and of what the command line says."""
        return self.show(module.TITLE, usual, lambda seeds: module.figures(seeds, self), module.HEADS)


Table = Callable[[ChosenTables], Iterable[Shown]]


def print_table(title: str, rows: Rows, heads: tuple[str, ...]) -> None:
    """A table whose columns are as wide as their widest cell."""
    print(f"\n{title}")
    lines = [("", *heads), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def stream(title: str, rows: Rows, heads: tuple[str, ...]) -> None:
    """A table whose rows take long: each is printed when it is there."""
    print(f"\n{title}\n  {'':<48}" + " | ".join(heads), flush=True)
    for name, *cells in rows:
        print(f"  {name:<48}" + " | ".join(cells), flush=True)


def write_spread(values: Sequence[float], form: str = ".4g") -> str:
    """Median (least-largest)."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"
