"""Every argument of a public callable is documented, and the examples in docstrings run."""

from __future__ import annotations

import doctest
import enum
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import is_typeddict

import pytest
import torch
from api_pages import listed_members
from torch import nn

import natgrad as ng
import natgrad_lab

SECTIONS = ("Args", "Attributes")
PACKAGES = ("natgrad", "natgrad_lab")
LABORATORY = ("natgrad_lab.experiments", "natgrad_lab.report")  # its folders that list names


def named_arguments(docstring: str | None) -> set[str]:
    """The names, without stars, that the sections `Args:` and `Attributes:` explain, one a line."""
    found: set[str] = set()
    section = ""
    for line in (docstring or "").splitlines():
        if title := re.fullmatch(r"([A-Z]\w+):", line):
            section = title[1]
        elif section in SECTIONS and (argument := re.match(r"    \*{0,2}(\w+)(?: \([^)]*\))?: +\S", line)):
            found.add(argument[1])
        elif line and not line.startswith(" "):
            section = ""
    return found


def ancestors(cls: type) -> list[type]:
    """The class and its bases that belong to the library, nearest first."""
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] in PACKAGES]


def own_docstring(thing: object) -> str | None:
    """The docstring that was written for it, not an inherited one."""
    doc = thing.__doc__ if not isinstance(thing, type) else vars(thing).get("__doc__")
    return inspect.cleandoc(doc) if doc else None


def argument_names(call: Callable[..., object], *, bound: bool) -> list[str]:
    """The names of a function's arguments; bound: without the first, which is `self` or `cls`."""
    names = list(inspect.signature(call).parameters)[1 if bound else 0 :]
    return [name for name in names if not name.startswith("_")]


def find_undocumented(thing: object, name: str) -> Iterator[str]:
    """`name(argument)` for every argument of a function, a constructor or a public method without an explanation."""
    if inspect.isfunction(thing):
        known = named_arguments(own_docstring(thing))
        yield from (f"{name}({a})" for a in argument_names(thing, bound=False) if a not in known)
    elif isinstance(thing, type) and ancestors(thing) and not (issubclass(thing, enum.Enum) or is_typeddict(thing)):
        yield from _of_constructor(thing, name)
        for base in ancestors(thing):
            for attribute in vars(base):
                if attribute == "__call__" or not attribute.startswith("_"):
                    yield from _of_method(thing, attribute, name)


def _of_constructor(cls: type, name: str) -> Iterator[str]:
    init = vars(next((base for base in cls.__mro__ if "__init__" in vars(base)), object)).get("__init__")
    if inspect.isfunction(init) and init.__module__ != "typing" and not getattr(cls, "_is_protocol", False):
        known = set().union(*(named_arguments(own_docstring(where)) for where in (init, *ancestors(cls))))
        yield from (f"{name}({a})" for a in argument_names(init, bound=True) if a not in known)


def _of_method(cls: type, attribute: str, name: str) -> Iterator[str]:
    """An argument may be explained where the method is first written."""
    methods = [vars(base)[attribute] for base in ancestors(cls) if attribute in vars(base)]
    bound = not isinstance(methods[0], staticmethod)
    functions = [inspect.unwrap(getattr(m, "__func__", m)) for m in methods]
    if inspect.isfunction(functions[0]):
        known = set().union(*(named_arguments(own_docstring(f)) for f in functions))
        missing = [a for a in argument_names(functions[0], bound=bound) if a not in known]
        yield from (f"{name}.{attribute}({a})" for a in missing)


def modules() -> Iterator[ModuleType]:
    """Every module of the library; that of earlier names, which warns, has none of its own."""
    for info in pkgutil.walk_packages(ng.__path__, "natgrad."):
        if info.name != "natgrad.applications":
            yield importlib.import_module(info.name)


def public_things() -> dict[str, object]:
    """`module.name` -> what the `__all__` of natgrad, of a folder or of a file lists, and what docs/api lists."""
    folders = [ng, *modules(), *map(importlib.import_module, LABORATORY)]
    listed = [(module, name) for module in folders for name in getattr(module, "__all__", ())]
    pages = {m: names for m, names in listed_members().items() if m.split(".")[0] in PACKAGES}
    listed += [(importlib.import_module(module), name) for module, names in pages.items() for name in names]
    things = [(getattr(module, name), name) for module, name in listed]
    named = {f"{thing.__module__}.{name}": thing for thing, name in things if _has_arguments(thing)}
    return dict(sorted(named.items()))


def _has_arguments(thing: object) -> bool:
    return isinstance(thing, type) or inspect.isfunction(thing)


PUBLIC = public_things()


def test_every_argument_is_documented():
    missing = dict.fromkeys(lack for name, thing in PUBLIC.items() for lack in find_undocumented(thing, name))
    assert not missing, f"no line under Args for {', '.join(missing)}"


# What a step makes for itself and nobody holds in hand.
INNER = ("Attributes", "GraphLeaves", "KnownPlaces", "Lazy", "Region", "Taps")


def test_every_public_object_shows_what_it_was_built_with():
    classes = [thing for thing in PUBLIC.values() if isinstance(thing, type) and not inspect.isabstract(thing)]
    silent = {
        cls.__name__ for cls in classes if cls.__repr__ is object.__repr__ and not getattr(cls, "_is_protocol", 0)
    }
    assert silent == set(INNER), "write __repr__ with natgrad.ground.messages.write_choices"


def examples() -> Iterator[doctest.DocTest]:
    """Every docstring of the library that holds lines to type."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in modules():
        yield from (test for test in finder.find(module, module.__name__) if test.examples)


class NumberChecker(doctest.OutputChecker):
    """Compares numbers up to round-off, and the text between them without its spaces."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return NUMBER.split("".join(want.split())) == NUMBER.split("".join(got.split())) and all(
            math.isclose(float(a), float(b), rel_tol=1e-3, abs_tol=1e-4)
            for a, b in zip(NUMBER.findall(want), NUMBER.findall(got), strict=True)
        )


NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
PROMPT = {"ng": ng, "torch": torch, "nn": nn}
EXAMPLES = {test.name: test for test in examples()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str):
    torch.manual_seed(0)
    if ".policy." in name:
        pytest.importorskip("gymnasium")
    test = EXAMPLES[name]
    test.globs = dict(PROMPT)
    said: list[str] = []
    runner = doctest.DocTestRunner(NumberChecker())
    assert runner.run(test, out=said.append).failed == 0, "".join(said)


def test_output_is_compared_up_to_round_off():
    same = {"tensor([1., 2.])": "tensor([1.0000, 2.0000])", "tensor(0.)": "tensor(-2.2e-16)"}
    other = {"tensor([1.1, 2.])": "tensor([1., 2.])", "tensor([1., 2.])": "tensor([1.])", "True": "False"}
    assert all(NumberChecker().check_output(want, got, 0) for want, got in same.items())
    assert not any(NumberChecker().check_output(want, got, 0) for want, got in other.items())


# The checker itself.


@dataclass(frozen=True)
class Told:
    """Has one field.

    Args:
        field: It.
    """

    field: float

    def method(self, x: float, *rest: float) -> float:
        """x.

        Args:
            x: A number,
                told on two lines.
            rest: More.

        Returns:
            x: it is no argument.
        """
        return x


class Heir(Told):
    """Says nothing of the field."""

    def method(self, x: float, *rest: float, y: float = 0.0) -> float:
        return y


Told.__module__ = Heir.__module__ = "natgrad.told"


def test_undocumented_arguments_are_found():
    assert list(find_undocumented(Told, "Told")) == []
    assert set(find_undocumented(Heir, "Heir")) == {"Heir.method(y)"}


SECTIONS_READ = {
    "x.\n\nArgs:\n    x: A number.\n    **more: Others.": {"x", "more"},
    "x.\n\nx: a number.   y: another.": set(),
    "x.\n\nReturns:\n    x: A number.": set(),
    "x.\n\nAttributes:\n    x (float): A number.\n        See: there.": {"x"},
    None: set(),
}


def test_sections_are_read():
    assert {docstring: named_arguments(docstring) for docstring in SECTIONS_READ} == SECTIONS_READ


def list_laboratory() -> Iterator[tuple[str, object]]:
    """Names and values of what the laboratory's files define for each other: functions, classes and their methods."""
    for info in pkgutil.walk_packages(natgrad_lab.__path__, "natgrad_lab."):
        module = importlib.import_module(info.name)
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", "") == info.name and _has_arguments(thing) and not name.startswith("_"):
                yield f"{info.name}.{name}", thing
                inner = vars(thing) if isinstance(thing, type) else {}
                methods = (a for a, m in inner.items() if inspect.isfunction(m) or isinstance(m, property))
                yield from ((f"{info.name}.{name}.{a}", getattr(thing, a)) for a in methods if not a.startswith("_"))


def is_explained(thing: object) -> bool:
    """True with a docstring that somebody wrote: a base's counts, a data class's own signature does not."""
    text = inspect.getdoc(thing) or ""
    return bool(text) and not text.startswith(f"{getattr(thing, '__name__', '')}(")


def test_the_laboratory_says_what_it_computes():
    missing = [name for name, thing in list_laboratory() if not is_explained(thing)]
    assert not missing, f"no docstring: {missing}"
