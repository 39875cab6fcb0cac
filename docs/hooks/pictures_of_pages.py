"""For mkdocs: a picture leads to its file, so that a phone shows it in its own size."""

from __future__ import annotations

import re
from typing import Any

PICTURE = re.compile(r'<a\b.*?</a>|<img\b[^>]*\bsrc="([^"]+\.(?:png|svg))"[^>]*>', re.S)
"""A picture; one in a link, as in the gallery, is passed over."""


def on_page_content(content: str, **_: Any) -> str:
    """The page with a link around every picture.

    Args:
        content: HTML.
        **_: What else mkdocs passes.
    """
    return PICTURE.sub(lambda found: f'<a href="{found[1]}">{found[0]}</a>' if found[1] else found[0], content)
