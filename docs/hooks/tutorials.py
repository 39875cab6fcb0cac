"""For mkdocs: every file of docs/tutorials is executed, and becomes a page, a notebook and a place in the gallery.

What a tutorial shows is kept in build/tutorials, under a hash of its source and of natgrad's.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from tutorial_cells import Cell, Picture, read_cells, write_notebook, write_page

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("tutorial_cells.py")
KEPT = ROOT / "build" / "tutorials"
COMPUTING = ("torch", "numpy", "scipy", "scikit-learn", "gymnasium", "matplotlib")
ORDER = (
    "ten_minutes", "state_report", "exact_fisher", "energy_models", "black_box", "policy", "posterior", "helmholtz",
    "normal_geometry", "reproduce_a_paper",
)  # fmt: skip
"""Of the gallery; those that are not named here follow in alphabetical order."""


def sources() -> list[Path]:
    """The tutorials, in the order of the gallery."""
    rank = {name: place for place, name in enumerate(ORDER)}
    return sorted((ROOT / "docs" / "tutorials").glob("*.py"), key=lambda p: (rank.get(p.stem, len(rank)), p.stem))


def describe(cells: list[Cell]) -> tuple[str, str]:
    """(title, summary) of a tutorial: its heading, and the first paragraph below.

    Args:
        cells: Of the tutorial.

    Raises:
        PluginError: If the first cell is not a heading and a paragraph.
    """
    found = re.match(r"# (.+)\n\n(.+?)(?:\n\n|\Z)", cells[0].source, re.S) if cells else None
    if found is None:
        raise PluginError("a tutorial begins with '# %% [markdown]', a line '# # Title', and a paragraph")
    return found[1], " ".join(found[2].split())


def on_config(config: MkDocsConfig) -> None:
    """The tutorials in the navigation, behind the first page.

    Args:
        config: Of mkdocs; its `nav` is changed.
    """
    pages = [{describe(read_cells(p.read_text()))[0]: f"tutorials/{p.stem}.md"} for p in sources()]
    start = next(part["Start"] for part in config.nav or [] if "Start" in part)
    start.insert(1, {"Tutorials": ["tutorials/index.md", *pages]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages, pictures and notebooks of all tutorials, and the gallery.

    Args:
        files: Of the site; changed.
        config: Of mkdocs.
    """

    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, f"tutorials/{path}", content=content))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shown = list(pool.map(run_or_recall, sources()))
    cards = []
    for path, cells in zip(sources(), shown, strict=True):
        name, (title, summary) = path.stem, describe(cells)
        pictures = [picture for cell in cells for picture in cell.pictures]
        for number, picture in enumerate(pictures, 1):
            add(f"{name}_{number}.png", base64.b64decode(picture.png))
        add(f"{name}.md", write_page(cells, name))
        add(f"{name}.ipynb", write_notebook(cells))
        cards.append(write_card(name, title, summary, bool(pictures)))
    add("index.md", GALLERY.format(cards="\n".join(cards)))


GALLERY = """# Tutorials

Each page is a program that takes some minutes to read and some seconds to run, on one core. matplotlib draws the
pictures; a page that needs more says so.

<div class="gallery" markdown="0">
{cards}
</div>
"""


def write_card(name: str, title: str, summary: str, has_picture: bool) -> str:
    """A tutorial's place in the gallery.

    Args:
        name: The file's name without `.py`.
        title: Its heading.
        summary: Its first paragraph.
        has_picture: Whether its first picture is shown.
    """
    image = f'<img src="{name}_1.png" alt="">' if has_picture else ""
    plain = html.escape(re.sub(r"[`*]|\[(.*?)\]\(.*?\)", r"\1", summary))
    return f'<a class="card" href="{name}.html">{image}<b>{html.escape(title)}</b> <span>{plain}</span></a>'


def run_or_recall(path: Path) -> list[Cell]:
    """The tutorial's cells with what they show: kept from an earlier build, or run in a process of its own.

    Args:
        path: The tutorial.

    Raises:
        PluginError: With its traceback, if the tutorial fails.
    """
    kept = find_kept(path)
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        command = [sys.executable, str(RUNNER), str(path), str(part)]
        given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "lab")])}
        done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
        if done.returncode:
            raise PluginError(f"docs/tutorials/{path.name} failed:\n{done.stderr}")
        part.replace(kept)
    return read_shown(kept)


def find_kept(path: Path) -> Path:
    """The file of what the tutorial shows, as it is now; it is there if the tutorial has run.

    Args:
        path: The tutorial.
    """
    return KEPT / f"{path.stem}-{fingerprint(path)}.json"


def read_shown(kept: Path) -> list[Cell]:
    """The cells of a tutorial with what they show.

    Args:
        kept: The file, see `find_kept`.
    """
    cells: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
    return [Cell(**{**cell, "pictures": [Picture(**p) for p in cell["pictures"]]}) for cell in cells]


def fingerprint(path: Path) -> str:
    """A hash of what the tutorial's outputs depend on: sources, the interpreter, packages that compute and draw.

    Args:
        path: The tutorial.
    """
    digest = hashlib.sha256(path.read_bytes())
    packages = [*(ROOT / "natgrad").rglob("*.py"), *(ROOT / "lab" / "natgrad_lab").rglob("*.py")]
    for file in [RUNNER, ROOT / "constraints.txt", *sorted(packages)]:
        digest.update(file.read_bytes())
    digest.update(repr([sys.version, *(find_version(name) for name in COMPUTING)]).encode())
    return digest.hexdigest()[:16]


def find_version(package: str) -> str:
    """Of an installed package; empty if it is not installed.

    Args:
        package: Its name in the registry.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
