"""Checkpoints of trainers that are made of parts: optimizers, generators, running moments, counts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from copy import deepcopy
from typing import Any

import torch

from natgrad.state_files import FORMAT, check_format


class Attributes:
    """Plain values that an object holds, as one part: a number, or a tuple of several.

    Args:
        owner: The object.
        names: Of its attributes.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner, self.names = owner, names

    def state_dict(self) -> Any:
        """The value, or a tuple of them."""
        values = tuple(getattr(self.owner, name) for name in self.names)
        return values[0] if len(values) == 1 else values

    def load_state_dict(self, state: Any) -> None:
        """Give the owner these values.

        Args:
            state: What `state_dict` gave.
        """
        values = (state,) if len(self.names) == 1 else tuple(state)
        for name, value in zip(self.names, values, strict=True):
            setattr(self.owner, name, value)


def write_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The state of every part under its name, and the number of the format.

    Args:
        parts: Objects with `state_dict` and `load_state_dict`, or generators.
    """
    return {"format": FORMAT} | {name: write_part(part) for name, part in parts.items()}


def write_part(part: Any) -> Any:
    """The state of a part."""
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def read_parts(parts: Mapping[str, Any], state: Any, saver: str, optional: Set[str] = frozenset()) -> None:
    """Go on from what `write_parts` gave. All parts are as before where one does not fit.

    Args:
        parts: As they were written.
        state: What was saved.
        saver: Who saves such a state, for the error message.
        optional: Names that older checkpoints lack; those parts are left as they are.

    Raises:
        ValueError: If an entry is missing, or does not fit its part; for the format of a newer version.
    """
    require_entries(parts.keys() - optional, state, saver)
    check_format(state)
    found = {name: part for name, part in parts.items() if name in state}
    before: dict[str, Any] = {}
    for name, part in found.items():
        before[name] = deepcopy(write_part(part))
        try:
            read_part(part, state[name])
        except Exception as error:
            for changed, old in before.items():
                read_part(found[changed], old)
            raise ValueError(
                f"the saved {name!r} is that of another network, environment or setting: {error}. Nothing was changed"
            ) from error


def read_part(part: Any, state: Any) -> None:
    """Give a part its state."""
    if isinstance(part, torch.Generator):
        part.set_state(state.cpu())
    else:
        part.load_state_dict(state)


def require_entries(names: Set[str], state: Any, saver: str) -> None:
    """ValueError unless a state has all these entries."""
    missing = sorted(name for name in names if not isinstance(state, Mapping) or name not in state)
    if missing:
        raise ValueError(
            f"the saved state lacks {missing}: a part was lost, or it was not saved by {saver}. Nothing was changed"
        )
