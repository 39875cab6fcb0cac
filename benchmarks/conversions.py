"""Milliseconds of one thread for the conversions of a batch of normals."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.timing import time_in_turn
from natgrad.families import MultivariateNormal

BATCH = 10_000
DIMENSIONS = (1, 3, 10)
TITLE = f"{BATCH} normals, milliseconds of CPU time (quartiles)"
HEADS = tuple(f"d = {d}, {name}" for d in DIMENSIONS for name in ("float32", "float64"))


def works(d: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(BATCH, d, d, generator=generator, dtype=dtype)
    covariance = root @ root.mT + torch.eye(d, dtype=dtype)
    mean = torch.randn(BATCH, d, generator=generator, dtype=dtype)
    family = MultivariateNormal(d)
    theta = family.from_mean_covariance(mean, covariance)
    return {
        "theta -> mean, covariance -> theta": lambda: family.from_mean_covariance(*family.mean_covariance(theta)),
        "theta -> eta -> theta": lambda: family.natural(family.expectation(theta)),
    }


def report(repeats: int) -> list[tuple[str, ...]]:
    cells: dict[str, list[str]] = {}
    for d in DIMENSIONS:
        for dtype in (torch.float32, torch.float64):
            for name, work in works(d, dtype).items():
                times = time_in_turn({"": work}, repeats)[""]
                low, middle, high = (1e3 * q for q in statistics.quantiles(times, n=4))
                cells.setdefault(name, []).append(f"{middle:.1f} ({low:.1f}-{high:.1f})")
    return [(name, *row) for name, row in cells.items()]
