r"""Typesets the formulas of docstrings: `(G + damping I)^-1 g` becomes `$(G + ...)^{-1} g$` when the site is built.

Docstrings stay as they are, plain text that a terminal shows.
"""

from __future__ import annotations

import re

from formula_latex import write_latex
from formula_pieces import find_formulas

SIGNS = re.compile(r"[\^_=<>+*/|~]| - |\b(?:log|grad|tr|diag|sqrt|det|exp)\b")
"""What every formula has one of."""
KEPT = re.compile(
    r"(`[^`]*`|^ *>>> .*\n(?:(?! *\n).+\n?)*|(?<=\n\n)(?: {4,}.*\n?)+|^ *[\w*]+(?: \([^)]*\))?: |\n\s*\n)", re.M
)
"""Code, examples, blocks, the names of arguments, the ends of paragraphs."""
TAG = re.compile(r"<(?=[A-Za-z])(?!https?:)")
"""What Markdown would take for HTML, as in `D = 2 <l>`."""
QUOTE = re.compile(r"^( *)>", re.M)
"""What Markdown would take for a quotation, as in `tau: >= 1`."""


def typeset_docstring(text: str) -> str:
    """The docstring with its formulas between dollars; code, examples and headings stay.

    Args:
        text: A docstring, cleaned of its indentation.
    """
    if "$" in text:
        return text
    parts = KEPT.split(text)
    return "".join(part if i % 2 else typeset_text(part) for i, part in enumerate(parts))


def typeset_text(text: str) -> str:
    """Running text with its formulas between dollars.

    Args:
        text: Without code.
    """
    if not SIGNS.search(text):
        return text
    text = QUOTE.sub(r"\1&gt;", text)
    done, last = "", 0
    for run in find_formulas(text):
        done += TAG.sub("&lt;", text[last : run[0].start]) + f"${write_latex(run)}$"
        last = run[-1].end
    return done + TAG.sub("&lt;", text[last:])
