"""Numbers and nouns as a person would write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def unique(values: Any) -> tuple[Any, ...]:
    """Different values in the order of their first appearance.

    Args:
        values: Any iterable.
    """
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return tuple(found)


def plural(number: int, word: str) -> str:
    """1 seed, 3 seeds.

    Args:
        number: How many.
        word: The singular.
    """
    return f"{number} {word}" + ("" if number == 1 else "s")


def join_words(words: Sequence[str]) -> str:
    """a; a and b; a, b and c.

    Args:
        words: In the order in which they are written.
    """
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def capital(text: str) -> str:
    """With a capital first letter.

    Args:
        text: Any.
    """
    return text[:1].upper() + text[1:]


def factor(times: float) -> str:
    """1.32 -> "1.3 times", 1.004 -> "0.4 %": how much higher one loss is than another.

    Args:
        times: Their ratio, at least 1.
    """
    return f"{times:.2g} times" if times >= 1.5 else f"{(times - 1) * 100:.2g} %"


def short(value: float | None) -> str:
    """Three digits, as a person would write them; a dash for a missing value.

    Args:
        value: A number; None where it is missing.
    """
    if value is None or not math.isfinite(value):
        return "-"
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
