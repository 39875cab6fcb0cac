"""Keywords that belong to groups of settings: `TRPO(batch=512)` means `TRPO(rollouts=Rollouts(batch=512))`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, cast


@dataclass(frozen=True)
class Group:
    """A group of settings that a constructor takes whole or one by one.

    Args:
        default: The group as it is where nothing is said, a frozen dataclass.
        prefix: What stands before its fields' names among the keywords.
    """

    default: Any
    prefix: str = ""

    def read(self, whole: str, choices: Mapping[str, Any]) -> Any:
        """The group with all that was said of it."""
        given = choices.get(whole, self.default)
        kind = cast("type[Any]", type(self.default))
        if not isinstance(given, kind):
            hint = "; did you forget the parentheses?" if given is kind else ""
            raise TypeError(f"{whole} is {given!r}, expected {kind.__name__}(...){hint}")
        return replace(given, **{name: choices[key] for key, name in self.names().items() if key in choices})

    def names(self) -> dict[str, str]:
        """keyword -> field."""
        return {f"{self.prefix}{one.name}": one.name for one in fields(self.default)}


def read_groups(
    caller: str, groups: Mapping[str, Group], choices: Mapping[str, Any], own: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Every group as the keywords say, by its keyword."""
    known = [*own, *groups, *(key for group in groups.values() for key in group.names())]
    for name in choices:
        if name not in known or name in own:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"its keywords are {', '.join(known)}"
            raise TypeError(f"{caller} takes no {name!r}: {hint}")
    return {whole: group.read(whole, choices) for whole, group in groups.items()}
