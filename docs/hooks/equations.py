"""Mathematics of the pages as MathML, which browsers draw by themselves: no script, nothing from elsewhere."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

PLACES = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
"""What `pymdownx.arithmatex` makes of $...$ and $$...$$."""


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with every formula as MathML."""
    return PLACES.sub(render_formula, content)


def render_formula(place: re.Match[str]) -> str:
    """One formula; on a line of its own where it was written so."""
    display = "block" if place[1] == "div" else "inline"
    return f'<{place[1]} class="formula">{convert(html.unescape(place[2]).strip(), display=display)}</{place[1]}>'
