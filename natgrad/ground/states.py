"""Objects whose state is what some of their attributes hold, as plain values and tensors that a file may have."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class Stateful:
    """An object whose state is what the attributes in `STATE` hold: its own, and those of its base classes."""

    STATE: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as plain values and tensors."""
        return {name: write_value(getattr(self, name)) for name in list_names(type(self))}

    def check_state(self, state: dict[str, Any]) -> None:
        """ValueError for a state that lacks a part of this one's, before anything changes.

        Args:
            state: What `state_dict` may have given.
        """
        check_parts(self, state)
        for name in list_names(type(self)):
            part = getattr(self, name)
            if isinstance(part, Stateful) and state[name] is not None:
                part.check_state(state[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there.

        Args:
            state: What `state_dict` gave.

        Raises:
            ValueError: If it lacks a part.
        """
        self.check_state(state)
        for name in list_names(type(self)):
            setattr(self, name, read_value(getattr(self, name), state[name]))


def amend(value: T, /, **changes: Any) -> T:
    """The dataclass with other values: `dataclasses.replace` in half its time, which goes through the fields by one."""
    return type(value)(**vars(value) | changes)


def check_parts(owner: Any, state: dict[str, Any]) -> None:
    """ValueError for a state that lacks a part of what an object's `state_dict()` has."""
    missing = sorted(owner.state_dict().keys() - state.keys())
    if missing:
        raise ValueError(
            f"the state lacks {missing}: a part was lost, or it is not of today's {type(owner).__name__}.state_dict()"
        )


def list_names(kind: type) -> list[str]:
    """The names of the attributes that make a state, those of base classes first."""
    return [name for each in reversed(kind.__mro__) for name in vars(each).get("STATE", ())]


def write_value(value: Any) -> Any:
    """A value as a file may have it: objects by their states, records by their fields."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.tensor(value, device="cpu")
    if isinstance(value, (list, deque)):
        return [write_value(part) for part in value]
    if isinstance(value, tuple):
        return tuple(write_value(part) for part in value)
    if isinstance(value, dict):
        return {name: write_value(part) for name, part in value.items()}
    if is_dataclass(value):
        return tuple(write_value(getattr(value, field.name)) for field in fields(value))
    return value


def read_value(held: Any, saved: Any) -> Any:
    """The value that `write_value` was given, in the place of one of its kind."""
    if saved is None:
        return None
    if isinstance(held, torch.Generator):
        held.set_state(saved)
        return held
    if hasattr(held, "load_state_dict"):
        held.load_state_dict(saved)
        return held
    if isinstance(held, (np.ndarray, np.generic)):
        return saved.numpy().copy()
    if isinstance(held, deque):
        return deque(saved, held.maxlen)
    if isinstance(saved, (list, tuple)) and (is_dataclass(held) or hasattr(held, "_fields")):
        return type(held)(*saved)
    return list(saved) if isinstance(saved, list) else saved
