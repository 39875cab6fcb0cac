"""Numbers and nouns as a person would write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

VAST = 1e6  # times as much that are told as a ratio, at most


def unique(values: Any) -> tuple[Any, ...]:
    """Different values in the order of their first appearance."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return tuple(different)


def plural(number: int, word: str) -> str:
    """1 seed, 3 seeds."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def join_words(words: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def capital(text: str) -> str:
    """With a capital first letter."""
    return text[:1].upper() + text[1:]


def how_much_higher(high: float, low: float) -> str:
    """1.3 times higher; 0.4 % higher for 1.004; "higher" alone where a ratio says nothing: zero, negative, vast."""
    times = high / low if low > 0 and math.isfinite(high) else math.inf
    if times > VAST:
        return "higher"
    return f"{times:.2g} times higher" if times >= 1.5 else f"{(times - 1) * 100:.2g} % higher"


def short(value: float | None) -> str:
    """Three digits, as a person would write them; a dash for a missing value."""
    if value is None or not math.isfinite(value):
        return "-"
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def span(values: Sequence[float], form: str = "{:.3g}") -> tuple[str, str]:
    """The median, and in small type the lowest and the highest."""
    return form.format(median(values)), f"{form.format(min(values))} to {form.format(max(values))}"
