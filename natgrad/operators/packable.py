"""Which operator classes checkpoints may name."""

from __future__ import annotations

from typing import Any

PACKABLE: dict[str, type[Any]] = {}
"""The operator classes that checkpoints may name."""


def register_packable(kind: type[Any]) -> None:
    """Let checkpoints name an operator class. TypeError for a class of yours with the name of one of natgrad's."""
    known = PACKABLE.get(kind.packed_as, kind)
    foreign = (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__)
    if foreign and known.__module__.startswith("natgrad."):
        raise TypeError(f"{kind.packed_as!r} is an operator of natgrad's: choose another name, packed_as='...'")
    PACKABLE[kind.packed_as] = kind
