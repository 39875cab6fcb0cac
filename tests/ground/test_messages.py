"""What is said of calls that cannot be."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest

import natgrad as ng
from natgrad.ground.messages import CallableModule, Columns, describe_call

# not natgrad.testing: in a test's own file pytest would take what is called so, and can be called, for a test
MODULES = sorted(
    name
    for name in set(dir(ng)) - {"testing"}
    if isinstance(thing := getattr(ng, name), ModuleType) and not isinstance(thing, CallableModule)
)


@pytest.mark.parametrize("name", MODULES)
def test_the_call_of_a_module_is_a_sentence(name: str) -> None:
    module: Any = getattr(ng, name)
    with pytest.raises(TypeError, match=rf"^ng\.{name} is a module and no function \(.*help\(ng\.{name}\)"):
        module("ising")


def test_the_call_of_a_fields_folder_is_a_sentence_too() -> None:
    assert callable(ng.minimize)  # which loads the folder
    module: Any = ng.search
    with pytest.raises(TypeError, match=r"^ng\.search is a module and no function"):
        module("ising")


def test_a_history_is_a_dict_of_lists() -> None:
    history = Columns(("loss", "kl"), "steps")
    lists = {"loss": [], "kl": []}
    assert dict(history) == lists
    assert [*history] == [*history.keys()] == [*lists]
    assert dict(history.items()) == lists
    assert [*history.values()] == [*lists.values()]
    assert "kl" in history
    assert "return" not in history
    assert (history.get("kl"), history.get("return"), history.get("return", 3)) == ([], None, 3)
    with pytest.raises(KeyError, match="'return' is no list of this history, expected one of loss, kl"):
        history["return"]


def test_a_wrong_call_is_shown_whole_where_it_is_short() -> None:
    def few(data: Any, rate: float = 1.0) -> None: ...

    def many(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, last: Any) -> None: ...

    short, long = (describe_call("made", inspect.signature(f), None, (), {}) for f in (few, many))
    assert short == "made(): 'data' is missing; expected made(data, rate=...)"
    assert "made(a, b, " in long
    assert long.endswith(", ...)")
