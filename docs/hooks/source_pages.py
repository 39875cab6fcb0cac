"""Which source files the site links to, and where it keeps them."""

from __future__ import annotations

WANTED: set[str] = set()
"""Files that some page links to, from the repository's root; filled as pages are rendered."""


def source_url(file: str, line: int | None) -> str:
    """Where a source file is on the site; the file is noted in `WANTED`.

    Args:
        file: From the repository's root.
        line: Of the name that is meant, or None for the top.
    """
    WANTED.add(file)
    return f"source/{file}.html" + (f"#L-{line}" if line else "")
