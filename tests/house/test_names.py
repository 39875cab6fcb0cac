"""A search for a name finds one thing: folders share public names, a class has one home, a function is a verb."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("natgrad", "lab/natgrad_lab", "benchmarks")  # one search runs over all of them
# their functions are verbs too; a small class of one test's own may be named as it likes
TESTS = ("tests", "lab/tests")
DEFINITION = r"^ *(?:async )?def (\w+)"

IRREGULAR = re.compile(
    "beaten|begun|bent|bound|broken|brought|built|caught|chosen|done|drawn|driven|fallen|felt|forgotten|found|frozen|given|"
    "gone|grown|heard|held|hidden|kept|known|laid|left|lost|made|met|paid|said|seen|sent|shown|shrunk|sold|spent|spoken|"
    "stuck|taken|thrown|told|torn|(un|over|re)?written|worn"
)
VERBS = frozenset({"embed", "exceed", "feed", "need", "run", "seed", "shed", "speed"})
# of a Hamiltonian, units, walkers: public names, as the field has them
FIELD = frozenset({"connected", "hidden", "stuck"})


def read_sources(*packages: str) -> dict[str, str]:
    """Dotted module name -> its source."""
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return {name: path.read_text(encoding="utf-8") for name, path in zip(names, paths, strict=True)}


def hidden_imports(trees: Mapping[str, ast.Module], public: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """(folder, name) of every name that a module takes from another folder, which does not list it.

    Args:
        trees: Module -> syntax tree.
        public: Folder -> the names that it lists.
    """
    for name, tree in trees.items():
        mine = name if name in public else name.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module in trees:
                folder = node.module if node.module in public else node.module.rpartition(".")[0]
                if folder not in ("natgrad", "natgrad.ground", mine):  # whose files are taken one by one
                    yield from ((folder, a.name) for a in node.names if a.name not in public.get(folder, set()))


def namesakes(sources: Mapping[str, str]) -> set[str]:
    """Names of classes that are defined more than once."""
    homes = Counter(name for source in sources.values() for name in re.findall(r"^ *class (\w+)", source, re.MULTILINE))
    return {name for name, count in homes.items() if count > 1}


def participles(sources: Mapping[str, str]) -> list[str]:
    """Functions and methods whose whole name is a participle: one word in -ed, or an irregular one."""
    pairs = [(m, name) for m, source in sources.items() for name in re.findall(DEFINITION, source, re.MULTILINE)]
    return [f"{module}.{name}" for module, name in pairs if is_participle(name.strip("_"))]


def is_participle(word: str) -> bool:
    """True for one word in -ed, or an irregular participle."""
    return word not in VERBS | FIELD and bool(re.fullmatch("[a-z]+ed", word) or IRREGULAR.fullmatch(word))


TREES = {name: ast.parse(source) for name, source in read_sources("natgrad").items()}
FOLDERS = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in (ROOT / "natgrad").rglob("__init__.py")}
PUBLIC: dict[str, set[str]] = {
    folder: set(getattr(importlib.import_module(folder), "__all__", ())) for folder in FOLDERS
}


def test_folders_share_what_they_list():
    assert sorted(set(hidden_imports(TREES, PUBLIC))) == []


def test_a_class_has_one_home():
    assert sorted(namesakes(read_sources(*PACKAGES))) == []


@pytest.mark.parametrize("folder", [*PACKAGES, *TESTS])
def test_functions_are_verbs(folder: str):
    assert participles(read_sources(folder)) == []


# The checker itself.


def test_each_kind_is_found():
    sources = {
        "natgrad.a": "class Home: ...\nfrom natgrad.b import listed, odd\nfrom natgrad.b.inner import deep",
        "natgrad.b": "",
        "natgrad.b.inner": "class Home: ...\ndef merged(): ...\ndef merge_rows(): ...\ndef speed(): ...\n"
        "async def unwritten(): ...",
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    public: dict[str, set[str]] = {"natgrad.a": set(), "natgrad.b": {"listed"}}
    assert set(hidden_imports(trees, public)) == {("natgrad.b", "odd"), ("natgrad.b", "deep")}
    assert namesakes(sources) == {"Home"}
    assert participles(sources) == ["natgrad.b.inner.merged", "natgrad.b.inner.unwritten"]
