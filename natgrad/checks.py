"""Checks of single numbers and words: the error names the argument, what was expected and what came."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_integer(name: str, value: Any, least: int = 1, *, of: str = "", hint: str = "") -> int:
    """The value as a Python integer of at least `least`; NumPy's integers are taken too, booleans are not."""
    found = operator.index(value) if is_integer(value) else least - 1
    if found < least:
        raise ValueError(f"{name} is {value!r}, expected {f'{of}, ' if of else ''}an integer >= {least}{hint}")
    return found


def check_positive(name: str, value: Any, *, hint: str = "") -> None:
    """Check that a value is a finite number > 0."""
    if not is_real(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a finite number > 0{hint}")


def check_number(name: str, value: Any, least: float = 0.0, most: float = math.inf, *, hint: str = "") -> None:
    """Check that a value is a number within bounds, which may be infinite but never NaN."""
    if not is_real(value) or not least <= value <= most:
        wanted = f"a number in [{least:g}, {most:g}]" if most < math.inf else f"a number >= {least:g}"
        raise ValueError(f"{name} is {value!r}, expected {wanted}{hint}")


def check_share(name: str, value: Any, *, hint: str = "") -> None:
    """Check that a value is a number in [0, 1), such as the weight of the past."""
    if not is_real(value) or not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}, expected a number in [0, 1){hint}")


def check_choice(name: str, value: Any, choices: Collection[Any], *, hint: str = "") -> None:
    """Check that a value is one of a few."""
    if not isinstance(value, (str, int, float, type(None))) or value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {value!r}, expected one of {listed}{hint}")


def is_real(value: Any) -> bool:
    """True for a real number, NumPy's and a tensor's without dimensions too; not for a boolean."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """True for an integer, NumPy's and an integer tensor's with one number too; not for a boolean."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
