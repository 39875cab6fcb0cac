"""What is said of calls that cannot be."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import natgrad as ng
from natgrad.ground.messages import CallableModule, Columns

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
    assert dict(history) == {"loss": [], "kl": []}
    with pytest.raises(KeyError, match="'return' is no list of this history, expected one of loss, kl"):
        history["return"]
