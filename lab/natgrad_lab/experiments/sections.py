"""What an experiment has to show: sections of prose, tables and pictures, made from its numbers and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = tuple[str, str]  # what it says, and in small type below; a plain string stands for one without small type


@dataclass(frozen=True)
class Picture:
    """A figure. Colours out of `natgrad_lab.figures` (INK, GRID, PALETTE) follow the page into the dark.

    Args:
        name: Of its file.
        title: Above it.
        draw: Fills an empty matplotlib figure, in the report's own style.
        size: Width and height in inches.
    """

    name: str
    title: str
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (4.5, 3.3)

    @property
    def wide(self) -> bool:
        """Whether it takes the whole width of the page."""
        return self.size[0] > 6


@dataclass(frozen=True)
class Table:
    """Rows under heads; the first column holds names, the others numbers.

    Args:
        title: Above it.
        heads: A word for each column.
        rows: A cell for each column.
        note: Below it.
        words: Columns of words, besides the first.
        bold: Rows that stand out.
        brief: The columns that a terminal has room for, () for none of the table; None for all.

    Raises:
        ValueError: For a row that has not as many cells as there are heads.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    note: str = ""
    words: tuple[int, ...] = ()
    bold: tuple[int, ...] = ()
    brief: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.heads)]
        if wrong:
            raise ValueError(f"{self.title}: a row has {len(wrong[0])} cells, expected {len(self.heads)} as in heads")

    @property
    def cells(self) -> list[list[Cell]]:
        """Every cell as a pair."""
        return [[(cell, "") if isinstance(cell, str) else cell for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Args:
        title: Its heading.
        verdict: A sentence computed from the numbers.
        tables: Below the pictures.
        pictures: Below the verdict.
        notes: Sentences at the end.
        subtitle: In small type below the heading.
        folded: Tables that a click shows.
    """

    title: str
    verdict: str
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()
    subtitle: str = ""
    folded: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Story:
    """All that an experiment's page says.

    Args:
        title: Of the page.
        lead: What came out, first.
        method: How the numbers came about, and what was chosen by us.
        sections: The parts of the page, in order.
        files: Pictures that are drawn beside the page and not in it.
    """

    title: str
    lead: str
    method: str
    sections: tuple[Section, ...]
    files: tuple[Picture, ...] = ()
