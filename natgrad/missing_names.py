"""What to say of a name that natgrad does not have: `ng.KFAC` is `ng.kfac`, `ng.Nystrom` is `ng.solvers.Nystrom`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from types import ModuleType
from typing import NoReturn


def refuse_missing(package: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` of a package, whose error names what was likely meant.

    Args:
        package: Its name.
    """

    def refuse(name: str) -> NoReturn:
        raise AttributeError(f"module {package!r} has no attribute {name!r}{suggest_name(name, sys.modules[package])}")

    return refuse


def suggest_name(name: str, package: ModuleType) -> str:
    """`; did you mean ng.kfac?`, or nothing where no name is near.

    Args:
        name: What was asked for.
        package: Where; its folders' names are looked at too.
    """
    if name.startswith("_"):
        return ""
    known = {key: thing for key, thing in vars(package).items() if not key.startswith("_")}
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
