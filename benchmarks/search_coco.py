"""COCO's suites with integers and with 640 variables: the best value at equal evaluations, beside pycma's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cma
import numpy as np
import torch
from torch import Tensor

from benchmarks.kept_results import keep_result
from natgrad.search import BIPOP, Full, LowRank, Separable, minimize

KNOWN = Path("build/benchmarks/search_coco.json")
MIXED_HEADS = ("ours", "pycma", "ours is")
LARGE_HEADS = ("LowRank", "Separable", "Full", "pycma", "pycma, VkD")
MIXED_BUDGET, LARGE_BUDGET = 500, 50  # evaluations per variable
LARGE = (1, 2, 5, 6, 8, 10, 12, 13, 20)


class CocoProblem:
    """A problem of a suite, its evaluations, the best value, and after how many evaluations it came."""

    def __init__(self, suite: str, number: int, d: int, instance: int, per_variable: int) -> None:
        import cocoex  # the suites: only where they are installed

        self.suite = cocoex.Suite(suite, "", f"dimensions:{d} function_indices:{number} instance_indices:{instance}")
        self.f, self.budget = self.suite[0], per_variable * d
        self.best, self.found, self.count, self.reached = np.inf, 0, 0, False

    def __call__(self, x: np.ndarray) -> float:
        value = float(self.f(np.asarray(x, dtype=float)))
        self.count += 1
        if self.count <= self.budget and value < self.best and not self.reached:
            self.best, self.found = value, self.count
            self.reached = bool(self.f.final_target_hit)  # 1e-8 above the minimum
        return value

    def many(self, X: Tensor) -> Tensor:
        return torch.tensor([self(x) for x in X.numpy()], dtype=torch.float64)

    @property
    def over(self) -> bool:
        return self.reached or self.count >= self.budget

    def summary(self) -> tuple[float, int, bool]:
        return self.best, self.found, self.reached


def run_ours_mixed(number: int, d: int, instance: int) -> tuple[float, int, bool]:
    """`ng.minimize` with BIPOP; sigma0 is a quarter of each variable's range."""
    p = CocoProblem("bbob-mixint", number, d, instance, MIXED_BUDGET)
    lower, upper = (torch.as_tensor(np.array(b)) for b in (p.f.lower_bounds, p.f.upper_bounds))
    settings: dict[str, Any] = {"integers": range(p.f.number_of_integer_variables), "bounds": (lower, upper)}
    settings |= {"restarts": BIPOP(9), "maxfevals": p.budget, "callback": lambda search: p.over}
    start = torch.as_tensor(np.array(p.f.initial_solution))
    minimize(p.many, start, (upper - lower) / 4, seed=instance, vectorized=True, **settings)
    return p.summary()


def run_pycma_mixed(number: int, d: int, instance: int) -> tuple[float, int, bool]:
    """`cma.fmin2` with BIPOP and its own treatment of integers, likewise."""
    p = CocoProblem("bbob-mixint", number, d, instance, MIXED_BUDGET)
    lower, upper = np.array(p.f.lower_bounds), np.array(p.f.upper_bounds)
    options = {"verbose": -9, "seed": instance + 1, "maxfevals": p.budget, "bounds": [lower.tolist(), upper.tolist()]}
    options |= {"integer_variables": list(range(p.f.number_of_integer_variables)), "CMA_stds": (upper - lower) / 4}
    options |= {"termination_callback": [lambda strategy: p.over]}
    cma.fmin2(p, np.array(p.f.initial_solution), 1.0, options, restarts=9, bipop=True)
    return p.summary()


def mixed_figures(instances: range, dims: tuple[int, ...] = (5, 20)) -> Iterator[tuple[str, ...]]:
    """A row per function: medians over instances of best values and of the evaluations up to them."""
    for d in dims:
        for number in range(1, 25):
            medians: list[tuple[float, float, bool]] = []
            for name, contestant in (("ours", run_ours_mixed), ("pycma", run_pycma_mixed)):
                summaries = [
                    keep_result(KNOWN, f"mixed {number} {d} {i} {name}", partial(contestant, number, d, i))
                    for i in instances
                ]
                best, count = (statistics.median(f[k] for f in summaries) for k in (0, 1))
                medians.append((best, count, all(f[2] for f in summaries)))
            cells = [f"{best:.6g} ({count:.0f}{', reached' if hit else ''})" for best, count, hit in medians]
            yield f"f{number}, {d}-d", *cells, judge_race(*medians)


def judge_race(ours: tuple[float, float, bool], theirs: tuple[float, float, bool]) -> str:
    """Ahead with a better value, or at the minimum with fewer evaluations; within a tenth of them is level."""
    if ours[2] and theirs[2]:
        if abs(ours[1] - theirs[1]) <= 0.1 * theirs[1]:
            return "level"
        return "ahead" if ours[1] < theirs[1] else "behind"
    if abs(ours[0] - theirs[0]) <= 1e-8 * max(1.0, abs(theirs[0])):
        return "level"
    return "ahead" if ours[0] < theirs[0] else "behind"


def run_ours_large(model: Any, number: int, instance: int) -> tuple[float, int, bool]:
    """`ng.minimize` in 640 variables, from zero with sigma0 = 2."""
    p = CocoProblem("bbob-largescale", number, 640, instance, LARGE_BUDGET)
    settings: dict[str, Any] = {"model": model, "maxfevals": p.budget, "callback": lambda search: p.over}
    minimize(p.many, torch.zeros(640, dtype=torch.float64), 2.0, seed=instance, vectorized=True, **settings)
    return p.summary()


def run_pycma_large(restricted: bool, number: int, instance: int) -> tuple[float, int, bool]:
    """`cma.fmin2`, likewise, with the whole covariance or with VkD-CMA."""
    from cma.restricted_gaussian_sampler import GaussVkDSampler

    p = CocoProblem("bbob-largescale", number, 640, instance, LARGE_BUDGET)
    options = {"verbose": -9, "seed": instance + 1, "maxfevals": p.budget}
    options |= {"termination_callback": [lambda strategy: p.over]}
    cma.fmin2(p, np.zeros(640), 2.0, GaussVkDSampler.extend_cma_options(options) if restricted else options)
    return p.summary()


LARGE_CONTESTANTS: dict[str, Callable[[int, int], tuple[float, int, bool]]] = {
    "low rank": partial(run_ours_large, LowRank()),
    "separable": partial(run_ours_large, Separable()),
    "full": partial(run_ours_large, Full()),
    "pycma": partial(run_pycma_large, False),
    "vkd": partial(run_pycma_large, True),
}


def large_figures(instances: range) -> Iterator[tuple[str, ...]]:
    """A row per function in 640-d: medians of the best values."""
    for number in LARGE:
        cells = []
        for name, contestant in LARGE_CONTESTANTS.items():
            summaries = [
                keep_result(KNOWN, f"large {number} {i} {name}", partial(contestant, number, i)) for i in instances
            ]
            cells.append(f"{statistics.median(f[0] for f in summaries):.6g}")
        yield f"f{number}, 640-d", *cells
