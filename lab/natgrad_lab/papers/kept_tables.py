"""Tables of a page that are written from kept records, between two comments that name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def insert(page: str, name: str, tables: str) -> str:
    """A page with tables between its one pair of comments of that name, such as `<!-- name: begin -->`."""
    begin, end = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has not one pair of {begin} and {end}: write them where the tables go")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{tables}\n{end}{rest.split(end)[1]}"


def write_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])
