"""What the pages of docs/api say."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

API = Path(__file__).parents[2] / "docs" / "api"


@cache
def listed_members() -> dict[str, list[str]]:
    """Module -> the members that docs/api lists under its `:::` directive."""
    found: dict[str, list[str]] = {}
    for page in sorted(API.rglob("*.md")):
        for block in re.finditer(r"^::: ([\w.]+)\n((?:[ \t]+.*\n|\n)*)", page.read_text(encoding="utf-8"), re.M):
            found.setdefault(block[1], []).extend(re.findall(r"^\s+- (\w+)$", block[2], re.M))
    return found
