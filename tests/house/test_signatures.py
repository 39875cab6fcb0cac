"""A function takes at most eight arguments by name: what belongs together is a settings object."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 8
LONG = {
    "minimize": "its keywords are typed one or two at a time, and peers have the same flat list",
    "residuals": "the same, and each of them means something of its own there",
    "stochastic_reconfiguration": "nine, of which four are those of `ng.NaturalGradient` with defaults of their own",
    "WakeSleep": "eight, and `group=`, which every optimizer takes",
    "look_up_bags": "torch's own signature, in whose place it is called",
}


def long_signatures(source: str) -> Iterator[str]:
    """The names of the functions that take more, and of the classes; `self`, `*args` and `**options` do not count."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    built = {id(part): node.name for node in classes for part in node.body if getattr(part, "name", "") == "__init__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = [a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
            if len([name for name in named if name not in ("self", "cls")]) > MOST:
                yield built.get(id(node), node.name)


def test_signatures_are_short():
    files = [path for folder in ("natgrad", "lab", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {name for path in files for name in long_signatures(path.read_text(encoding="utf-8"))}
    assert found == set(LONG)


def test_a_long_signature_is_found():
    names = ", ".join("abcdefgh")
    assert not list(long_signatures(f"class A:\n    def short(self, {names}, **more): ..."))
    assert list(long_signatures(f"def long({names}, *, i): ...")) == ["long"]
