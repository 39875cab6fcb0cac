"""A field stands on public names: a floor's package exports what it takes, and `natgrad.ground` is taken by the file.

`test_floors.py` holds that no field imports another one, or anything above it.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from field_names import FIELDS

import natgrad as ng

ROOT = Path(__file__).parents[2] / "natgrad"


def find_inner_imports(field: str, source: str) -> Iterator[str]:
    """Every import of a field's file, at any depth of it, that is not of a public name, as a sentence."""
    for node in ast.walk(ast.parse(source)):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{node.lineno}: a relative import, expected the whole name of the module"
            elif isinstance(node, ast.Import) and alias.name.startswith("natgrad."):
                yield f"{node.lineno}: import {alias.name}, expected from its floor's package import name"
            elif module.split(".")[0] == "natgrad" and (wrong := judge_import(field, module, alias.name)):
                yield f"{node.lineno}: from {module} import {alias.name}, {wrong}"


def judge_import(field: str, module: str, name: str) -> str:
    """What is wrong with `from module import name` in a field; empty if nothing is."""
    _, *path = module.split(".")
    if path[:1] == [field]:
        return ""
    if any(part.startswith("_") for part in [*path, name]):
        return "an internal: take a public name, or make it one"
    if len(path) == 0:
        return "" if name in ng.__all__ else "which natgrad does not list in __all__"
    if path[0] == "ground":
        return "" if len(path) == 2 else "expected the file of natgrad.ground that has it"
    package = importlib.import_module(f"natgrad.{path[0]}")
    if name not in package.__all__:
        return f"which natgrad.{path[0]} does not list in __all__"
    return "" if len(path) == 1 else f"expected it from natgrad.{path[0]}, which exports it"


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_imports_public_names_and_reads_as_its_table_of_contents(field: str):
    """Each public name is imported where the package lists it, and the docstring says more than what the field is."""
    wrong = [
        f"{path.relative_to(ROOT)}:{sentence}"
        for path in sorted((ROOT / field).rglob("*.py"))
        for sentence in find_inner_imports(field, path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n" + "\n".join(wrong)
    tree = ast.parse((ROOT / field / "__init__.py").read_text(encoding="utf-8"))
    imported = {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert set(importlib.import_module(f"natgrad.{field}").__all__) <= imported
    assert len((ast.get_docstring(tree) or "").split("\n\n")) >= 2


# The checker itself.

SOUND = """
import math
import torch
from natgrad.ground.checks import check_integer
from natgrad.optim import NaturalGradient
from natgrad.search.base import Search, _inner
"""
BREACHES = {
    "from natgrad.optim.optimizer import NaturalGradient": "expected it from natgrad.optim",
    "from natgrad.optim.step import natural_step": "does not list",
    "from natgrad.optim import step": "does not list",
    "from natgrad.optim import _step": "an internal",
    "from natgrad.ground._inner import check": "an internal",
    "from natgrad.ground import checks": "expected the file",
    "from natgrad import FIELDS": "does not list",
    "import natgrad.optim.step": "expected from its floor's package",
    "from .base import Search": "a relative import",
    "def f():\n    from natgrad.structures.base import Memory": "expected it from natgrad.structures",
}


def test_each_breach_is_named():
    assert list(find_inner_imports("search", SOUND)) == []
    for line, words in BREACHES.items():
        (sentence,) = find_inner_imports("search", line)
        assert words in sentence
