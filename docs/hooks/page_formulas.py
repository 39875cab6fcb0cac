"""For mkdocs: formulas that a page writes as plain text, `(G + damping I)^-1 g`, are typeset as in docstrings."""

from __future__ import annotations

import re
from typing import Any

from formula_latex import write_latex
from formula_pieces import find_formulas
from mkdocs.structure.pages import Page

FOLDERS = ("theory/", "papers/", "extend/", "guides/")
"""Pages with mathematics; in the tables of benchmarks and the notes of decisions most signs are of numbers."""
SPAN = r"\$[^$\n]*\$|`[^`]*`|!?\[[^\]\n]*\]\([^)]*\)|<[^>\n]*>|(?<![\w)])\*{1,2}(?=\S)[^*\n]+\*{1,2}"
KEPT = re.compile(
    r"(^```.*?^```$|\$\$.*?\$\$|\\\(.*?\\\)|^#[^\n]*$|^[ \t]*\|[^\n]*$|^[ \t]*[-*] |\n[ \t]*\n|" + SPAN + ")",
    re.M | re.S,
)
"""Code, formulas, headings, rows of tables, marks of lists, ends of paragraphs, links, emphasis."""
CELL = re.compile(rf"({SPAN}|\|)")
"""What divides a row of a table."""
NO_FORMULA = re.compile(r"\d-d\b|\b(?:EA|rank)\b")
"""What reads like a formula and is none: `10-d`, `(1+1)-EA`, `rank 3`."""


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with its plain formulas between dollars.

    Args:
        markdown: The page's text.
        page: Which one.
        **_: What else mkdocs passes.
    """
    return typeset_page(markdown) if page.file.src_uri.startswith(FOLDERS) else markdown


def typeset_page(markdown: str) -> str:
    """The text with its plain formulas between dollars; code and what is typeset already stay.

    Args:
        markdown: The page's text.
    """
    parts = KEPT.split(markdown)
    return "".join(typeset_row(part) if i % 2 else typeset_part(part) for i, part in enumerate(parts))


def typeset_row(part: str) -> str:
    """A row of a table with its plain formulas between dollars; what else stays as it is.

    Args:
        part: What `KEPT` found.
    """
    if not part.lstrip().startswith("|"):
        return part
    return "".join(cell if i % 2 else typeset_part(cell) for i, cell in enumerate(CELL.split(part)))


def typeset_part(text: str) -> str:
    """Running text with its formulas between dollars.

    Args:
        text: Without code.
    """
    done, last = "", 0
    for run in find_formulas(text):
        if not NO_FORMULA.search(text[run[0].start : run[-1].end]):
            done += text[last : run[0].start] + f"${write_latex(run)}$"
            last = run[-1].end
    return done + text[last:]
