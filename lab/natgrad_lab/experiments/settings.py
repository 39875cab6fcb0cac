"""Settings of an experiment from the command line: `--set key=value` onto a frozen dataclass."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

from natgrad_lab.experiments.base import LabError


def override(kind: type, assignments: Iterable[str], size: Mapping[str, Any] | None = None) -> Any:
    """kind() with some fields replaced.

    Args:
        kind: A dataclass of settings.
        assignments: "key=value" each; the last one of a key counts.
        size: Values in place of the defaults.

    Raises:
        LabError: For an unknown key (it lists the known ones) or a value of another type (it says which).
    """
    hints = get_type_hints(kind)
    values = dict(size or {})
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise LabError(f"--set {assignment} has no equals sign, expected key=value")
        if key not in hints:
            raise LabError(f"--set {key}: no such setting, expected one of {', '.join(f.name for f in fields(kind))}")
        values[key] = parse(key, text, hints[key])
    return kind(**values)


@dataclass(frozen=True)
class StudySettings:
    """Of every study on one thread."""

    threads: int | None = 1  # of torch; none: as many as it takes
    device: str = "cpu"  # or a name such as cuda


RECURRING = {  # what a setting of that name is wherever its own line does not say
    "tuning_seed": "of the runs over the grids; the race has seeds 0, 1, 2 ...",
    "looked_at": "examples of each part per evaluation, at most",
}


def describe_settings(kind: type) -> list[tuple[str, str, str]]:
    """Name, default and comment of every setting, for help."""
    comments = dict(RECURRING)
    for base in reversed(kind.__mro__[:-1]):
        with contextlib.suppress(OSError):  # a class of `change_defaults` has no source
            for line in inspect.getsource(base).splitlines():
                if setting := re.match(r"    (\w+): [^#]*#\s*(.+)", line):
                    comments[setting[1]] = setting[2]
    defaults = {field.name: field.default for field in fields(kind)}
    return [(name, "none" if value is None else str(value), comments.get(name, "")) for name, value in defaults.items()]


def change_defaults(kind: type, **defaults: Any) -> type:
    """A class of the same settings with other defaults."""
    hints = get_type_hints(kind)
    changed = [(key, hints[key], value) for key, value in defaults.items()]
    return make_dataclass(kind.__name__, changed, bases=(kind,), frozen=True)


def check_positive(settings: Any, *names: str) -> None:
    """LabError for a field that is not above 0."""
    for name in names:
        if not getattr(settings, name) > 0:
            raise LabError(f"{name} is {getattr(settings, name)}, expected a positive number")


def check_counts(settings: Any, *names: str, least: float = 1, most: float = math.inf) -> None:
    """LabError for a field that is not within the least and the most that it may be."""
    for name in names:
        if not least <= getattr(settings, name) <= most:
            end = f" and at most {most:g}" if most < math.inf else ""
            raise LabError(f"{name} is {getattr(settings, name)}, expected a number of at least {least:g}{end}")


def check_word(settings: Any, name: str, known: Iterable[str]) -> None:
    """LabError for a field that is none of the known words."""
    if getattr(settings, name) not in known:
        raise LabError(f"{name} is {getattr(settings, name)!r}, expected one of {', '.join(known)}")


def split_words(name: str, text: str, known: Iterable[str], between: str = ",") -> list[str]:
    """The words of a setting, joined by commas. LabError for one that is not known."""
    words, known = [word.strip() for word in text.split(between)], list(known)
    for word in words:
        if word not in known:
            raise LabError(f"{name} has the word {word!r}, expected words among {', '.join(known)}")
    return words


def fill(settings: Any, values: Mapping[str, Any]) -> None:
    """Give the fields that are None their values: sizes that another setting decides on. LabError for one below 1."""
    for key, value in values.items():
        if getattr(settings, key) is None:
            object.__setattr__(settings, key, value)
        if getattr(settings, key) < 1:
            raise LabError(f"{key} is {getattr(settings, key)}, expected a number of at least 1")


def require_size(size: int | None) -> int:
    """A size that `fill` has given its value."""
    assert size is not None
    return size


def parse(key: str, text: str, hint: Any) -> Any:
    """text as the annotated type: int, float, bool, str, or one of them `| None` ("none")."""
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional and text.lower() == "none":
        return None
    bare = next(a for a in get_args(hint) if a is not types.NoneType) if optional else hint
    try:
        return _READERS[bare](text)
    except (ValueError, KeyError) as error:
        wanted = _WORDS[bare] + (" or none" if optional else "")
        raise LabError(f"--set {key}={text}: expected {wanted}") from error


def read_number(kind: type[int | float], least: float, text: str) -> float:
    """A number; ValueError below the least, and for nan, which passes comparisons and spoils a run in silence."""
    number = kind(text)
    if not number >= least:
        raise ValueError(text)
    return number


_READERS: dict[type, Callable[[str], Any]] = {
    int: partial(read_number, int, 0),  # no setting has a use for a negative one
    float: partial(read_number, float, -math.inf),
    str: str,
    bool: lambda text: {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()],
}
_WORDS = {int: "a whole number of at least 0", float: "a number", str: "text", bool: "true or false"}
