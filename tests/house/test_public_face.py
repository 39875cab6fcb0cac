"""Every public name exists, has a docstring, and stands in the API docs."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from api_pages import API, listed_members

import natgrad as ng
from natgrad.ground.messages import CallableModule

IMPORTABLE = Path(__file__).parents[1] / "vectors" / "importable_names.json"  # from `ng`, whether or not it lists them


@cache
def table() -> dict[str, str]:
    """Name under `ng` -> where the table in docs/api/index.md sends the reader: a dotted name or a page."""
    text = (API / "index.md").read_text(encoding="utf-8")
    return dict(re.findall(r"\[`ng\.(\w+)`\][\[(]([\w./]+)[\])]", text))


def public_modules() -> Iterator[ModuleType]:
    """Every module that says what is public in it by __all__, natgrad itself and its earlier names excepted."""
    for info in pkgutil.walk_packages(ng.__path__, "natgrad."):
        if info.name.rpartition(".")[2].startswith("_") or info.name == "natgrad.applications":
            continue
        module = importlib.import_module(info.name)
        if hasattr(module, "__all__"):
            yield module


def without_docstring(thing: object, name: str) -> Iterator[str]:
    """The names of `thing` and of its public methods that lack a docstring. Methods may inherit theirs."""
    if inspect.isclass(thing):
        own = vars(thing).get("__doc__")
        if not own or own.startswith(f"{thing.__name__}("):  # a dataclass writes its signature where there is none
            yield name
        for attribute, value in vars(thing).items():
            is_method = callable(value) or isinstance(value, (property, classmethod, staticmethod))
            if is_method and not attribute.startswith("_") and not inspect.getdoc(getattr(thing, attribute)):
                yield f"{name}.{attribute}"
    elif (inspect.isroutine(thing) or inspect.ismodule(thing)) and not inspect.getdoc(thing):
        yield name


MODULES = {module.__name__: module for module in public_modules()}


def test_all_is_unique_and_there_and_has_docstrings():
    for module in (ng, *MODULES.values()):
        assert len(module.__all__) == len(set(module.__all__)), module.__name__
        missing = [lack for n in module.__all__ for lack in without_docstring(getattr(module, n), n)]
        assert not missing, f"{module.__name__}: no docstring on {missing}"
        assert inspect.getdoc(module), module.__name__


def nearest(module: str) -> str:
    """The module or the innermost folder around it that says what is public."""
    return max((name for name in MODULES if f"{module}.".startswith(f"{name}.")), key=len, default="")


def test_the_api_docs_list_every_public_name():
    """Under `::: the folder`, or under the module of it that holds the name; a folder within speaks for itself."""
    listed: dict[str, list[str]] = {name: [] for name in MODULES}
    for module, names in listed_members().items():
        if nearest(module):
            listed[nearest(module)] += names
    differing = [name for name in MODULES if sorted(listed[name]) != sorted(MODULES[name].__all__)]
    assert differing == [], "docs/api: the members of these are not their __all__"


def test_the_api_docs_and_their_table_list_nothing_else():
    for module, names in listed_members().items():
        missing = [n for n in names if not hasattr(importlib.import_module(module), n)]
        assert not missing, f"docs/api lists {missing} under '::: {module}', which has no such names"
    assert [name for name in table() if not hasattr(ng, name)] == []


def is_documented(name: str) -> bool:
    """True if the table's row for `ng.name` leads to a page, or to a member listed on one that is the same thing."""
    thing, place = getattr(ng, name), table().get(name, "")
    thing = getattr(thing, name) if isinstance(thing, CallableModule) else thing
    if isinstance(thing, ModuleType):
        return (API / place).is_file()
    module, _, attribute = place.rpartition(".")
    listed = attribute in listed_members().get(module, ())
    return listed and getattr(importlib.import_module(module), attribute) is thing


def test_the_table_of_names_leads_to_the_right_place():
    astray = [name for name in ng.__all__ if not name.startswith("__") and not is_documented(name)]
    assert astray == [], "docs/api/index.md has no row for these names of ng, or one that leads elsewhere"


def typed_names() -> set[str]:
    """What the README, the pages and the examples write after `ng.`, in their code and in their text."""
    root = API.parents[1]
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "examples").glob("*.py")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    return {name for text in texts for name in re.findall(r"\bng\.([A-Za-z]\w*)", text)}


def test_what_the_pages_type_has_a_row():
    typed = [name for name in typed_names() if not isinstance(getattr(ng, name), ModuleType)]
    assert sorted({*typed} - {*table()}) == [], "docs/api/index.md has no row for these names of ng"


@pytest.mark.filterwarnings("ignore:natgrad.applications goes:FutureWarning")
def test_what_was_importable_stays_so():
    assert [name for name in json.loads(IMPORTABLE.read_text(encoding="utf-8")) if not hasattr(ng, name)] == []


# The checker itself.


class Bare:
    def method(self) -> None: ...


class Told:
    """Has one."""

    def method(self) -> None:
        """Has one."""


class Heir(Told):
    """Its method has the one it inherits."""

    def method(self) -> None: ...


def test_missing_docstrings_are_found():
    assert list(without_docstring(Bare, "Bare")) == ["Bare", "Bare.method"]
    assert list(without_docstring(Heir, "Heir")) == []


MEANT = {
    "KFAC": "natgrad.kfac",
    "hessianfree": "natgrad.hessian_free",
    "Nystrom": "natgrad.solvers.Nystrom",
    "NoiseAwar": "natgrad.rules.NoiseAware",
}


@pytest.mark.parametrize(("typed", "meant"), MEANT.items())
def test_a_misspelt_name_is_told(typed: str, meant: str):
    with pytest.raises(AttributeError, match=rf"has no attribute '{typed}'; did you mean {meant}\?"):
        getattr(ng, typed)


@pytest.mark.parametrize("name", ["Adam", "__wrapped__", "quaternions"])
def test_a_name_like_none_is_refused_alone(name: str):
    assert not hasattr(ng, name)
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'$"):
        getattr(ng, name)
