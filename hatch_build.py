"""Links of the package's metadata that lead somewhere from outside of the repository, where that is known."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RAW = "https://raw.githubusercontent.com"


class CustomMetadataHook(MetadataHookInterface):
    """Sets `readme` and `urls`. The repository is the one that GitHub builds in; without one links stay as they are."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill the fields that pyproject.toml calls dynamic.

        Args:
            metadata: The project's table.
        """
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository, ref = os.environ.get("GITHUB_REPOSITORY"), os.environ.get("GITHUB_REF_NAME", "main")
        metadata["urls"] = {}
        if repository:
            home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            text = link_absolutely(text, f"{RAW}/{repository}/{ref}", f"{home}/blob/{ref}")
            metadata["urls"] = {
                "Source": home,
                "Documentation": f"{home}/blob/{ref}/docs/index.md",
                "Changelog": f"{home}/blob/{ref}/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def link_absolutely(text: str, pictures: str, pages: str) -> str:
    """Markdown whose relative links lead to a repository: PyPI shows the text without its files.

    Args:
        text: Markdown.
        pictures: The address under which the files lie as they are.
        pages: The address under which they are shown.
    """
    relative = r"(?!https?:|mailto:|#)([^)\s]+)"
    text = re.sub(rf"(!\[[^\]]*\]\(){relative}", rf"\g<1>{pictures}/\g<2>", text)
    text = re.sub(r'(<img[^>]*\ssrc=")(?!https?:)([^"]+)', rf"\g<1>{pictures}/\g<2>", text)
    return re.sub(rf"(\]\(){relative}", rf"\g<1>{pages}/\g<2>", text)
