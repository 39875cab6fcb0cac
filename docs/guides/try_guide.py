"""Runs the code of one guide as a newcomer does: in an environment with natgrad and what the page says to install.

`make guide NAME=lightning` runs docs/guides/lightning.md; any other page of docs/ is given as `NAME=theory/step`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def main(name: str) -> int:
    """Installs and runs in a folder that is deleted afterwards; the exit status of the page's code.

    Args:
        name: Of a page of docs/guides without `.md`, or its path from docs/.
    """
    page = find_page(name)
    text = page.read_text(encoding="utf-8")
    packages = read_packages(text)
    with tempfile.TemporaryDirectory(prefix="natgrad-guide-") as folder:
        python = Path(folder) / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        sys.stderr.write(f"{page.relative_to(ROOT)}: a new environment with natgrad {' '.join(packages)}\n")
        venv.create(Path(folder) / "venv", with_pip=True)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([python, *install, "--editable", str(ROOT), *packages], check=True)
        program = Path(folder) / f"{page.stem}_guide.py"
        program.write_text(join_code(text), encoding="utf-8")
        return subprocess.run([python, program.name], cwd=folder, check=False).returncode


def find_page(name: str) -> Path:
    """The page's file.

    Args:
        name: As `main` takes it.

    Raises:
        SystemExit: If there is no such page with code.
    """
    pages = [path for path in (DOCS / "guides" / f"{name}.md", DOCS / f"{name}.md") if path.is_file()]
    if not pages or not join_code(pages[0].read_text(encoding="utf-8")):
        known = [path.stem for path in sorted((DOCS / "guides").glob("*.md")) if "```python" in path.read_text("utf-8")]
        raise SystemExit(f"no guide named {name!r} with code to run: expected one of {', '.join(known)}")
    return pages[0]


def read_packages(text: str) -> list[str]:
    """What the page says to install beside natgrad, before its first code.

    Args:
        text: A page.
    """
    lines = re.findall(r"`pip install ([\w .\[\]-]+)`", text.partition("```python")[0])
    return [package for line in lines for package in line.split() if package not in ("-e", ".")]


def join_code(text: str) -> str:
    """The page's blocks of Python as one program, each on its own line of the page.

    Args:
        text: A page.
    """
    program = ""
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        program += "\n" * (text[: block.start(1)].count("\n") - program.count("\n")) + block[1]
    return program


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [""]))
