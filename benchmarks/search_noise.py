"""Minima of noisy functions: what is reached within a budget, with and without noise handling, beside pycma's."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator

import cma
import numpy as np
import torch
from torch import Tensor

from benchmarks.search_problems import sphere
from benchmarks.tables import write_spread
from natgrad.search import minimize

HEADS = ("median f at the result (smallest-largest)", "evaluations")
BUDGET, DIM = 30_000, 10


def ellipsoid(X: Tensor) -> Tensor:
    return (X.square() * 1e3 ** torch.linspace(0, 1, X.shape[1], dtype=X.dtype)).sum(1)


Function = Callable[[Tensor], Tensor]


def noisy(f: Function, seed: int) -> Function:
    """f with normal noise of standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    return lambda X: f(X) + torch.randn(len(X), generator=generator, dtype=X.dtype)


def ours(f: Function, seed: int, noise: bool, popsize: int | None = None) -> tuple[float, int]:
    """True value at the result, which is the centre; without noise handling the last generation's centre."""
    last = []
    start = torch.full((DIM,), 3.0)
    result = minimize(
        noisy(f, seed),
        start,
        2.0,
        seed=seed,
        noise=noise,
        popsize=popsize,
        maxfevals=BUDGET,
        vectorized=True,
        callback=lambda search: last.append(search.centre()),
    )
    return float(f(last[-1].unsqueeze(0))), result.nfev


def theirs(f: Function, seed: int, handled: bool) -> tuple[float, int]:
    """pycma's, with its own noise handler."""
    values = noisy(f, seed)

    def value_at(x: np.ndarray) -> float:
        return float(values(torch.as_tensor(np.asarray(x)).unsqueeze(0)))

    options = {"verbose": -9, "seed": seed + 1, "maxfevals": BUDGET}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handler = cma.NoiseHandler(DIM, maxevals=[1, 1, 300]) if handled else None
        _, strategy = cma.fmin2(value_at, [3.0] * DIM, 2.0, options, noise_handler=handler)
    return float(f(torch.as_tensor(strategy.result.xfavorite).unsqueeze(0))), int(strategy.result.evaluations)


def figures(seeds: range) -> Iterator[tuple[str, ...]]:
    cases: dict[str, Callable[[Function, int], tuple[float, int]]] = {
        "as if there were none": lambda f, s: ours(f, s, False),
        "noise=True": lambda f, s: ours(f, s, True),
        "popsize=100": lambda f, s: ours(f, s, False, 100),
        "pycma": lambda f, s: theirs(f, s, False),
        "pycma, NoiseHandler up to 300": lambda f, s: theirs(f, s, True),
    }
    for title, f in (("sphere", sphere), ("ellipsoid 1e3", ellipsoid)):
        for name, run in cases.items():
            runs = [run(f, seed) for seed in seeds]
            spread = write_spread([value for value, _ in runs], ".3f")
            yield f"{title}, {name}", spread, f"{statistics.median(n for _, n in runs):.0f}"
