"""Contestants with something to choose: the best variant of each on the first seed runs from all seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Variant = TypeVar("Variant")


def race_variants(
    train: Callable[[Variant, int], float], variants: Mapping[str, Variant], seeds: Sequence[int]
) -> tuple[str, list[float]]:
    """The variant with the least error on the first seed, and its errors on all of them, the least first."""
    tried = {name: train(variant, seeds[0]) for name, variant in variants.items()}
    chosen = min(tried, key=tried.__getitem__)
    return chosen, sorted([tried[chosen], *(train(variants[chosen], seed) for seed in seeds[1:])])


def write_errors(chosen: str, errors: Sequence[float]) -> str:
    """Median, least and largest error, and the variant that they are of. errors: the least first."""
    words = f"{statistics.median(errors):.1e} ({errors[0]:.1e} to {errors[-1]:.1e})"
    return f"{words}, {chosen}" if chosen else words


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """SystemExit for names that are not known."""
    if unknown := sorted({*names} - {*known}):
        raise SystemExit(f"{what} {', '.join(unknown)}: expected some of {', '.join(known)}")
