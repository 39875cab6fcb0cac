"""For mkdocs: the site asks nobody else for anything, neither when it is built nor when it is read."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon|manifest))[^>]*?\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|@import\s+(?:url\()?[\"']?((?:https?:)?//[^\"')\s]+)"
    r"|url\([\"']?((?:https?:)?//[^\"')\s]+)",
    re.I,
)
"""What a browser fetches when it opens a page or a style sheet; links that a reader may follow are not among it."""


def find_requests(text: str) -> list[str]:
    """The addresses elsewhere that a browser would ask.

    Args:
        text: HTML or CSS.
    """
    return [next(filter(None, found.groups())) for found in FETCHED.finditer(text)]


def on_post_build(config: MkDocsConfig) -> None:
    """Fails the build where a file of the site would ask another address.

    Args:
        config: Of mkdocs.

    Raises:
        PluginError: With the file and the address.
    """
    site = Path(config.site_dir)
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        for address in find_requests(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.relative_to(site)} asks {address}; ship the file with the site instead")
