"""Where a name of the library is explained on the site, and on which line of which file it stands."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"natgrad": ROOT / "natgrad", "natgrad_lab": ROOT / "lab" / "natgrad_lab"}
REFERENCE = re.compile(r"((?:natgrad|lab/natgrad_lab)/[\w/]+\.py)(?:: ([\w.]+))?")
"""`natgrad/solvers/base.py: Solver.solve`, or the file alone."""


def find_line(file: str, dotted: str) -> int | None:
    """The line on which a name is defined, from 1; None where the file has no such name.

    Args:
        file: From the repository's root.
        dotted: A class, function, method, field or constant.
    """
    body: list[ast.stmt] = parse_file(file).body
    line = None
    for part in dotted.split("."):
        found = next((node for node in body if part in defined_names(node)), None)
        if found is None:
            return None
        line, body = found.lineno, getattr(found, "body", [])
    return line


def defined_names(node: ast.stmt) -> list[str]:
    """What a statement defines: a class, a function, or variables.

    Args:
        node: Of a module's or a class's body.
    """
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def parse_file(file: str) -> ast.Module:
    """The syntax tree of a file.

    Args:
        file: From the repository's root.
    """
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


@cache
def listed_on() -> dict[tuple[str, str], str]:
    """(module, name) of every object that docs/api lists -> its page and anchor."""
    places = {}
    for page in sorted((ROOT / "docs" / "api").rglob("*.md")):
        for block in re.finditer(r"^::: ([\w.]+)\n((?:[ \t]+.*\n|\n)*)", page.read_text(encoding="utf-8"), re.M):
            module = importlib.import_module(block[1])
            for name in re.findall(r"^\s+- (\w+)$", block[2], re.M):
                home = getattr(getattr(module, name, None), "__module__", block[1])
                place = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
                places[home, name] = f"{place}#{block[1]}.{name}"
    return places


@cache
def find_anchor(dotted: str) -> str | None:
    """Page and anchor on the site of `ng.kfac`, `ng.kfac(...)`, `natgrad.rules.NoiseAware`; None if it has none.

    Args:
        dotted: As pages write it in code.
    """
    found = re.match(r"(?:ng|natgrad)((?:\.\w+)+)", dotted)
    if found is None:
        return None
    thing: object = importlib.import_module("natgrad")
    owner, name = thing, ""
    for name in found[1][1:].split("."):
        owner, thing = thing, getattr(thing, name, None)
        if thing is None:
            return None
    if inspect.ismodule(thing):
        pages = [ROOT / "docs" / "api" / f"{name}.md", ROOT / "docs" / "api" / name / "index.md"]
        found_pages = [
            page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in pages if page.exists()
        ]
        return found_pages[0] if found_pages else None
    if inspect.isclass(owner):
        inside = listed_on().get((owner.__module__, owner.__name__))
        return f"{inside}.{name}" if inside and name in vars(owner) and inspect.isroutine(thing) else inside
    return listed_on().get((getattr(thing, "__module__", ""), getattr(thing, "__name__", name)))


def find_anchor_in(file: str, dotted: str) -> str | None:
    """Page and anchor of what is defined in a file, or None.

    Args:
        file: From the repository's root.
        dotted: Its name in the file.
    """
    module = file.removeprefix("lab/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    first, _, rest = dotted.partition(".")
    place = listed_on().get((module, first))
    if place is None or not rest:
        return place
    owner = getattr(importlib.import_module(module), first)
    return f"{place}.{rest}" if inspect.isroutine(vars(owner).get(rest)) and not rest.startswith("_") else place
