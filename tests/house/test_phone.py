"""Tables of the pages fit the width of a phone, counted in letters; the site's style sheet has the sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "api")  # there the hooks write the tables
ROOM = 395
"""Pixels of a table on a screen of 400, by this count: in a browser tables of up to 389 fit, and one of 405 did not."""
LETTER = 0.56  # width of a letter, in letter heights


def find_tables(text: str) -> Iterator[list[list[str]]]:
    """The tables of a page, row by row and cell by cell; code is left out."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for found in re.finditer(r"(?:^ *\|.*\|[^\n]*\n)+", text, re.M):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip()[1:-1])] for row in found[0].splitlines()]
        if len(rows) > 2 and all(re.fullmatch(r":?-+:?", cell) for cell in rows[1]):
            yield [rows[0], *rows[2:]]


def longest_word(cell: str, head: bool) -> int:
    """Letters of what cannot be broken; code breaks anywhere, but for a table's head."""
    cell = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)
    cell = cell if head else re.sub(r"`[^`]*`", " ", cell)
    cell = re.sub(r"\$[^$]*\$", "formul", cell)
    return max((len(word) for word in re.split(r"[\s\-–]+|&shy;", re.sub(r"[*`]", "", cell))), default=0)


def measure_table(rows: list[list[str]]) -> float:
    """The least width of a table in pixels, as the style sheet has it for screens below 45em."""
    columns = len(rows[0])
    size = 8.8 if columns >= 8 else 10 if columns >= 6 else 11.6
    space = 0.6 if columns >= 4 else 1.0
    widest = [max(longest_word(row[i], k == 0) for k, row in enumerate(rows) if i < len(row)) for i in range(columns)]
    return size * (LETTER * sum(widest) + space * columns)


def test_no_table_is_wider_than_a_phone():
    tables = [(page.name, rows) for page in PAGES for rows in find_tables(page.read_text(encoding="utf-8"))]
    assert [f"{page}: {' | '.join(rows[0])}" for page, rows in tables if measure_table(rows) > ROOM] == []


def test_a_wide_table_is_seen():
    head = ["a head", *["misunderstandings"] * 4]
    assert measure_table([head, ["1"] * 5]) > ROOM
    assert (
        measure_table([["a head", *["mis&shy;under&shy;standings"] * 4], ["`a_very_long_name_of_something`"] * 5])
        < ROOM
    )
