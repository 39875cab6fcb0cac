"""The building stands: imports go down, never up, never in a circle, never into private parts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, eq=False)
class House:
    """One package: its floors, and who is on none.

    Args:
        package: Its import name.
        floors: Top-level module or folder -> floor.
        shared: Floors whose neighbours may import one another, as long as there is no cycle.
        highest: What stands on no floor -> the highest floor that it may import; "" is the package's `__init__`.
        closed: Packages that it must not import.
    """

    package: str
    floors: Mapping[str, int]
    shared: frozenset[int]
    highest: Mapping[str, int]
    closed: tuple[str, ...] = ()

    @property
    def public(self) -> int:
        """The floor from which the package's own public face may be imported."""
        return max(self.floors.values())


def read_floors() -> dict[str, int]:
    """Name -> floor, from the contributors' table."""
    rows = re.findall(r"^\| (\d) \| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    pairs = [(name, int(floor)) for floor, names in rows for name in re.findall(r"`(.*?)`", names)]
    return {name.rstrip("/").removesuffix(".py"): floor for name, floor in pairs}


HIGHEST = {"": 7, "testing": 6, "applications": 7}
NATGRAD = House("natgrad", read_floors(), frozenset(), HIGHEST, closed=("natgrad_lab",))
LAB = House(
    "natgrad_lab",
    dict.fromkeys(("words", "figures", "data"), 0)
    | {"experiments": 1, "cli": 3}
    | dict.fromkeys(("report", "papers", "networks", "energies", "equations", "policies", "quantum", "descent"), 2),
    shared=frozenset({0}),
    highest={"": 0},
)
FOLDERS = {NATGRAD: ROOT / "natgrad", LAB: ROOT / "lab" / "natgrad_lab"}


Import = tuple[str, int]  # the module, and the line of the file


def modules(root: Path) -> dict[str, str]:
    """Dotted name relative to the package ("" for its own __init__) -> source text."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def packages(sources: Mapping[str, str]) -> set[str]:
    """The modules that hold other modules: those whose relative imports start at themselves."""
    return {name for name in sources if any(other.startswith(name + ".") for other in sources)} | {""}


def imports(house: House, name: str, sources: Mapping[str, str]) -> Iterator[Import]:
    """Every module that `name` imports, at any depth of the file and under TYPE_CHECKING too, as dotted names.

    The package's own come relative to it, with the package itself as ""; others in full. `from a import b` counts
    as a.b where that is a module, and as both where b is private; torch._b counts where it is only used.
    """
    for node in ast.walk(ast.parse(sources[name])):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _inside(house, alias.name), node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = _inside(house, node.module or "") if node.level == 0 else _relative(name, node, packages(sources))
            for alias in node.names:
                longer = f"{base}.{alias.name}" if base else alias.name
                yield longer if longer in sources else base, node.lineno
                if _is_private(alias.name):
                    yield longer, node.lineno
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and ast.unparse(node).startswith("torch."):
            yield ast.unparse(node), node.lineno


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _inside(house: House, name: str) -> str:
    """natgrad.a.b -> a.b, natgrad -> "", others unchanged."""
    return "" if name == house.package else name.removeprefix(f"{house.package}.")


def _relative(name: str, node: ast.ImportFrom, holders: set[str]) -> str:
    parts = name.split(".") if name else []
    up = node.level - 1 if name in holders else node.level
    return ".".join([*parts[: len(parts) - up], *(node.module.split(".") if node.module else [])])


def breaches(house: House, sources: Mapping[str, str]) -> list[str]:
    """Every breach as one sentence: `module:line` and what is wrong with it."""
    found = [
        f"{top}: has no floor; place it on one in CONTRIBUTING.md, or in this test for the laboratory"
        for top in sorted({name.split(".")[0] for name in sources})
        if top not in house.floors and top not in house.highest
    ]
    graph: dict[str, set[str]] = {}
    for name in sources:
        targets = list(imports(house, name, sources))
        graph[name] = {target for target, _ in targets if target in sources and target != name}
        for target, line in targets:
            wrong = _private(house, name, target) or _upward(house, name, target, sources)
            if wrong:
                found.append(f"{name or house.package}:{line} {wrong}")
    found += [f"import cycle: {' -> '.join(m or house.package for m in cycle)}" for cycle in cycles(graph)]
    return found


def _private(house: House, name: str, target: str) -> str | None:
    """What is wrong with module `name` using `target`, if that is private to torch or to another folder."""
    parts = target.split(".")
    if not any(_is_private(part) for part in parts):
        return None
    if parts[0] == "torch":
        return f"uses {target}, a private part of torch"
    if parts[0] in house.floors and parts[0] != name.split(".")[0]:
        return f"imports {target}, an internal of {parts[0]}"
    return None


def _upward(house: House, name: str, target: str, sources: Mapping[str, str]) -> str | None:
    """What is wrong with module `name` importing `target`, or None."""
    if target.split(".")[0] in house.closed:
        return f"imports {target}: it depends on {house.package}, not the other way round"
    top, other = name.split(".")[0], target.split(".")[0]
    if target not in sources or other == top:
        return None
    if other == "testing":
        return "imports testing, which is for users and tests: nothing imports it"
    if other == "":
        above = house.floors.get(top, 0) < house.public
        return f"imports {house.package} itself, which stands above it" if above else None
    if other not in house.floors:
        return None  # unplaced: said once, by `breaches`
    theirs = house.floors[other]
    if top in house.highest:
        limit = house.highest[top]
        return None if theirs <= limit else f"imports {target} of floor {theirs}, above its limit {limit}"
    mine = house.floors.get(top, theirs + 1)
    if theirs > mine:
        return f"imports {target}: floor {mine} may not reach up to floor {theirs}"
    if theirs == mine and mine not in house.shared:
        return f"imports {target}: a neighbour on the same floor {mine}"
    return None


def cycles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Import cycles, each as a closed path.

    A folder that collects its modules is none, as long as those modules do not import the folder in turn.
    """
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                yield from visit(target, [*path, name])
            done.add(name)

    for start in sorted(graph):
        yield from visit(start, [])


@pytest.mark.parametrize("house", FOLDERS, ids=lambda house: house.package)
def test_the_building_stands(house: House):
    found = breaches(house, modules(FOLDERS[house]))
    assert not found, "\n" + "\n".join(found)


# The checker itself: each kind of breach, built in a few lines, is found; what is allowed is not.

SOUND = {
    "": "from natgrad.optim import step\nfrom natgrad import operators",
    "ground": "",
    "ground.spaces": "import torch",
    "ground.pure": "from natgrad.ground.spaces import Space",
    "operators": "from natgrad.operators.base import Operator\nfrom .dense import Dense",
    "operators.base": "import torch\nfrom torch import nn",
    "operators.dense": "from .base import Operator\nfrom ..ground import spaces",
    "solvers": "from natgrad.solvers.cg import CG",
    "solvers.cg": "from natgrad.operators import Operator",
    "families": "",
    "optim": "from natgrad.solvers import CG",
    "testing": "from natgrad.optim import step",
    "search": "import natgrad as ng",
}

BREACHES = {
    "upwards": ({"ground.spaces": "from natgrad.operators import Operator"}, "may not reach up"),
    "upwards, relative": ({"operators.base": "from ..solvers.cg import CG"}, "may not reach up"),
    "upwards, inside a function": ({"ground.spaces": "def f():\n    import natgrad.optim"}, "may not reach up"),
    "upwards, for types only": (
        {"ground.spaces": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from natgrad.optim import step"},
        "may not reach up",
    ),
    "neighbour": ({"families": "from natgrad.solvers import CG"}, "a neighbour on the same floor"),
    "neighbour's internals": ({"families": "from natgrad.solvers.cg import CG"}, "a neighbour on the same floor"),
    "the public face, from below": ({"solvers.cg": "import natgrad as ng"}, "stands above it"),
    "the laboratory": ({"optim": "from natgrad_lab.experiments import Race"}, "not the other way round"),
    "a field, in testing": ({"testing": "from natgrad import search"}, "above its limit"),
    "a field, in another": ({"policy": "from natgrad.search import minimize"}, "a neighbour on the same floor"),
    "testing, imported": ({"optim": "from natgrad.testing import check_metric"}, "nothing imports it"),
    "private torch": ({"ground.spaces": "from torch._C import x"}, "private part of torch"),
    "private torch, deeper": ({"ground.spaces": "import torch.nn.utils._named"}, "private part of torch"),
    "private torch, by name": ({"ground.spaces": "from torch import _foreach_add_"}, "private part of torch"),
    "private torch, used": ({"ground.spaces": "import torch\ntorch.nn._x(1)"}, "private part of torch"),
    "another folder's private name": ({"optim": "from natgrad.solvers.cg import _step"}, "an internal of solvers"),
    "no floor": ({"helpers": ""}, "place it on one"),
    "cycle": (
        {"ground.spaces": "from natgrad.ground import pure", "ground.pure": "from natgrad.ground.spaces import Space"},
        "import cycle",
    ),
    "cycle inside a folder": ({"operators.base": "from .dense import Dense"}, "import cycle"),
    "cycle through the folder": ({"operators.base": "from natgrad.operators import Dense"}, "import cycle"),
}


def test_a_sound_building_has_no_breach():
    assert breaches(NATGRAD, SOUND) == []


@pytest.mark.parametrize("case", BREACHES)
def test_each_kind_of_breach_is_found(case: str):
    change, sentence = BREACHES[case]
    first, *others = breaches(NATGRAD, SOUND | change)
    assert sentence in first
    assert all(other.startswith("import cycle") for other in others)  # looking up often closes a circle as well


@pytest.mark.parametrize("house", FOLDERS, ids=lambda house: house.package)
def test_every_floor_lies_on_the_one_below(house: House):
    assert all(b - a in (0, 1) for a, b in pairwise(sorted(house.floors.values())))
