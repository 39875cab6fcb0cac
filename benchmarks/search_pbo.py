"""The 23 functions of bits of IOHprofiler's PBO suite: the best value at equal evaluations, beside evolution's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kept_results import keep_result
from natgrad.applications.search import BernoulliSearch

BITS, BUDGET = 64, 20_000
PATIENCE = 100  # evaluations per bit without a better value, after which all but the plain EA begin anew
KNOWN = Path("build/benchmarks/search_pbo.json")
HEADS = ("BernoulliSearch", "(1+1)-EA", "the same, restarted", "UMDA 50", "cGA", "ours")


class Problem:
    """A function of the suite to be made small, its counted evaluations, and the best of them."""

    def __init__(self, number: int) -> None:
        import ioh  # the suite: only where it is installed

        suite = ioh.ProblemClass.PBO  # type: ignore[attr-defined]
        self.f = ioh.get_problem(number, instance=1, dimension=BITS, problem_class=suite)
        self.name = f"F{number} {self.f.meta_data.name}"
        self.best, self.found, self.count = math.inf, 0, 0

    def __call__(self, X: np.ndarray) -> np.ndarray:
        values = [-float(self.f(row)) for row in X.astype(int).tolist()]
        for value in values:
            self.count += 1
            if self.count <= BUDGET and value < self.best:
                self.best, self.found = value, self.count
        return np.array(values)

    @property
    def over(self) -> bool:
        return self.count >= BUDGET or self.best <= -float(self.f.optimum.y) + 1e-9


def ours(f: Problem, seed: int) -> None:
    """By ask and tell, begun anew with twice the population where it ends, as `ng.minimize` does."""
    first = search = BernoulliSearch(BITS, seed=seed)
    run = 0
    while not f.over:
        if search.stop():
            run += 1
            search = first.renew(first.popsize * 2**run, run)
        X = search.ask()
        search.tell(X, torch.as_tensor(f(X.numpy())))


def evolve(f: Problem, seed: int, restarted: bool = False) -> None:
    """The (1+1)-EA: every bit flips with chance 1 / n, the child stays if it is no worse."""
    draws = np.random.default_rng(seed)
    while not f.over:
        x = draws.integers(0, 2, (1, BITS))
        value = least = f(x)[0]
        since = f.count
        while not f.over and not (restarted and f.count - since >= PATIENCE * BITS):
            child = np.where(draws.random((1, BITS)) < 1 / BITS, 1 - x, x)
            new = f(child)[0]
            x, value = (child, new) if new <= value else (x, value)
            least, since = (value, f.count) if value < least else (least, since)


def estimate(f: Problem, seed: int, popsize: int = 50) -> None:
    """UMDA: the means of the better half, within [1 / n, 1 - 1 / n]."""
    draws = np.random.default_rng(seed)
    means, anew = np.full(BITS, 0.5), 0
    while not f.over:
        X = (draws.random((popsize, BITS)) < means).astype(int)
        means = X[f(X).argsort(kind="stable")[: popsize // 2]].mean(0).clip(1 / BITS, 1 - 1 / BITS)
        if f.count - max(f.found, anew) >= PATIENCE * BITS:
            means, anew = np.full(BITS, 0.5), f.count


def compete(f: Problem, seed: int) -> None:
    """cGA with a population of 8 sqrt(n)."""
    draws = np.random.default_rng(seed)
    means, anew = np.full(BITS, 0.5), 0
    while not f.over:
        X = (draws.random((2, BITS)) < means).astype(int)
        first, second = X[f(X).argsort(kind="stable")]
        means = (means + (first - second) / (8 * math.sqrt(BITS))).clip(1 / BITS, 1 - 1 / BITS)
        if f.count - max(f.found, anew) >= PATIENCE * BITS:
            means, anew = np.full(BITS, 0.5), f.count


CONTESTANTS: dict[str, Callable[[Problem, int], None]] = {
    "ours": ours,
    "ea": evolve,
    "ea restarted": lambda f, seed: evolve(f, seed, restarted=True),
    "umda": estimate,
    "cga": compete,
}


def run(number: int, contestant: str, seed: int) -> tuple[str, float, int]:
    """The function's name, the best value, and after how many evaluations it came."""
    problem = Problem(number)
    CONTESTANTS[contestant](problem, seed)
    return problem.name, -problem.best, problem.found


def kept_run(number: int, contestant: str, seed: int) -> Any:
    """`run`, or what it gave in an earlier call."""
    key = f"{number} {contestant} {seed} {BITS} {BUDGET}"
    return keep_result(KNOWN, key, lambda: run(number, contestant, seed))


def figures(seeds: range) -> Iterator[tuple[str, ...]]:
    """A row per function: median of the best values, and in brackets the median of the evaluations up to them."""
    for number in range(1, 24):
        medians: list[tuple[float, float]] = []
        name = ""
        for contestant in CONTESTANTS:
            found = [kept_run(number, contestant, seed) for seed in seeds]
            name = found[0][0]
            medians.append((statistics.median(f[1] for f in found), statistics.median(f[2] for f in found)))
        yield name, *(f"{best:.4g} ({count:.0f})" for best, count in medians), judge(medians[0], medians[1:])


def judge(own: tuple[float, float], others: list[tuple[float, float]]) -> str:
    """By the value; where that is the same, by the evaluations, of which a tenth more or less is level."""
    best, count = max(others, key=lambda pair: (pair[0], -pair[1]))
    if abs(own[0] - best) > 1e-9 * abs(best):
        return "ahead" if own[0] > best else "behind"
    if abs(own[1] - count) <= 0.1 * count:
        return "level"
    return "ahead" if own[1] < count else "behind"
