"""BBOB in 20 and 40 variables: the share of 51 targets that are reached, and how early, beside pycma's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cma
import numpy as np
import torch
from torch import Tensor

from benchmarks.kept_results import keep_result
from natgrad.search import BIPOP, minimize

HEADS = ("targets, ours", "pycma", "area, ours", "pycma", "best, ours", "pycma")
KNOWN = Path("build/benchmarks/search_bbob.json")
TARGETS = 10.0 ** np.linspace(2, -8, 51)
CASES = {20: tuple(range(1, 25)), 40: tuple(range(1, 25))}


class CountedFunction:
    """A function of the suite, its evaluations, and after how many of them each target was reached."""

    def __init__(self, number: int, d: int, instance: int) -> None:
        import ioh  # the suite: only where it is installed

        suite = ioh.ProblemClass.BBOB  # type: ignore[attr-defined]
        self.f = ioh.get_problem(number, instance=instance, dimension=d, problem_class=suite)
        self.least, self.budget = float(self.f.optimum.y), 2000 * d
        self.count, self.best, self.hits = 0, np.inf, np.full(len(TARGETS), np.inf)

    def __call__(self, x: np.ndarray) -> float:
        value = float(self.f(x))
        self.count += 1
        if self.count <= self.budget and value - self.least < self.best:
            self.best = value - self.least
            self.hits[(self.best <= TARGETS) & np.isinf(self.hits)] = self.count
        return value

    def many(self, X: Tensor) -> Tensor:
        return torch.tensor([self(x) for x in X.numpy()], dtype=torch.float64)

    def summary(self) -> tuple[float, float, float]:
        """The share of targets, its mean over the logarithm of the evaluations, and the best value."""
        times = 10 ** np.linspace(0, np.log10(self.budget), 200)
        return float(np.isfinite(self.hits).mean()), float((self.hits[:, None] <= times).mean()), float(self.best)


def run_ours(number: int, d: int, instance: int) -> tuple[float, float, float]:
    """`ng.minimize` with BIPOP, from zero with sigma0 = 2; the seed is the instance."""
    f = CountedFunction(number, d, instance)
    settings: dict[str, Any] = {"ftarget": f.least + 1e-8, "maxfevals": f.budget, "restarts": BIPOP(9)}
    minimize(f.many, torch.zeros(d, dtype=torch.float64), 2.0, seed=instance, vectorized=True, **settings)
    return f.summary()


def run_pycma(number: int, d: int, instance: int) -> tuple[float, float, float]:
    """`cma.fmin2` with BIPOP, likewise."""
    f = CountedFunction(number, d, instance)
    options = {"verbose": -9, "seed": instance + 1, "ftarget": f.least + 1e-8, "maxfevals": f.budget}
    cma.fmin2(f, np.zeros(d), 2.0, options, restarts=9, bipop=True)
    return f.summary()


def figures(instances: range, dims: tuple[int, ...] = (20, 40)) -> Iterator[tuple[str, ...]]:
    """A row per function, means over instances (best values: medians); then the means of all."""
    for d in dims:
        rows: list[list[float]] = []
        for number in CASES[d]:
            row: list[list[float]] = []
            for name, contestant in (("ours", run_ours), ("pycma", run_pycma)):
                summaries = [
                    keep_result(KNOWN, f"{number} {d} {i} {name}", partial(contestant, number, d, i)) for i in instances
                ]
                best = statistics.median(f[2] for f in summaries)
                row.append([statistics.mean(f[0] for f in summaries), statistics.mean(f[1] for f in summaries), best])
            pairs = [value for pair in zip(*row, strict=True) for value in pair]
            rows.append(pairs[:4])
            yield f"f{number}, {d}-d", *(f"{v:.3f}" for v in pairs[:4]), *(f"{v:.0e}" for v in pairs[4:])
        yield f"mean, {d}-d", *(f"{statistics.mean(column):.4f}" for column in zip(*rows, strict=True)), "", ""
