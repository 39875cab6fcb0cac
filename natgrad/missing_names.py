"""What to say of a name that natgrad does not have: `ng.KFAC` is `ng.kfac`, `ng.Nystrom` is `ng.solvers.Nystrom`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any


def find_name(package: str, fields: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A `__getattr__` of a package: loads a field when its name is asked for, else says what was likely meant.

    Args:
        package: Its name.
        fields: The names that each field supplies.
    """
    homes = {name: home for home, names in fields.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            near = suggest_name(name, sys.modules[package])
            raise AttributeError(f"module {package!r} has no attribute {name!r}{near}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        thing = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, thing)
        return thing

    return find


def suggest_name(name: str, package: ModuleType) -> str:
    """`; did you mean ng.kfac?`, or nothing where no name is near.

    Args:
        name: What was asked for.
        package: Where; its folders' names are looked at too.
    """
    if name.startswith("_"):
        return ""
    known = {key: getattr(package, key) for key in dir(package) if not key.startswith("_")}
    folders = [thing for thing in known.values() if isinstance(thing, ModuleType)]
    places = {spell_plainly(n): f"{m.__name__}.{n}" for m in folders for n in getattr(m, "__all__", ())}
    places |= {spell_plainly(n): f"{package.__name__}.{n}" for n in known}
    near = get_close_matches(spell_plainly(name), places, n=1, cutoff=0.75)
    return f"; did you mean {places[near[0]]}?" if near else ""


def spell_plainly(name: str) -> str:
    """In small letters and without underscores.

    Args:
        name: Of a class or a function.
    """
    return name.lower().replace("_", "")
