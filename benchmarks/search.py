"""Evaluations that the Gaussian search takes to a target, beside pycma's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cma
import numpy as np
import torch
from cma import bbobbenchmarks
from torch import Tensor

from benchmarks.kept_results import keep_result
from benchmarks.search_problems import TARGET, Problem, problems, solve
from benchmarks.tables import write_spread
from natgrad.search import BIPOP, IPOP, XNES, GaussianModel

HEADS = ("reached", "median evaluations (smallest-largest)", "pycma's median", "goal")
BBOB_HEADS = ("reached", "at once", "expected running time", "median of the first runs", "pycma's", "goal")
PYCMA = {  # medians of ten seeds, of f: expected running times on ten instances; cma 4.5.0 in this set-up
    "sphere 10": "1475",
    "sphere 20": "2814",
    "ellipsoid 10": "4070",
    "ellipsoid 20": "13026",
    "cigar 10": "3965",
    "cigar 20": "8280",
    "Rosenbrock 10": "5055, 9 of 10",
    "Rosenbrock 20": "16218",
    "f1 5": "715",
    "f2 5": "1391",
    "f8 5": "1947",
    "f10 5": "1528",
    "f15 5": "27594",
    "f1 20": "2706",
    "f2 20": "13693",
    "f8 20": "24677",
    "f10 20": "13484",
}


def bbob(number: int, d: int, instance: int) -> Problem:
    """A function of the BBOB suite; target 1e-8 above its minimum, x0 = 0, sigma0 = 2."""
    function = bbobbenchmarks.instantiate(number, iinstance=instance)[0]

    def values(X: Tensor) -> Tensor:
        return torch.as_tensor(np.asarray(function(X.numpy()), dtype=float))

    target = float(function.getfopt()) + TARGET
    return Problem(f"f{number} {d}", values, lambda generator: torch.zeros(d), 2.0, target)


def spread(counts: list[int]) -> str:
    """Median, smallest and largest."""
    return write_spread(counts, ".0f") if counts else "none"


def goal(name: str, factor: float) -> str:
    """pycma's figure times a factor."""
    return f"{float(PYCMA[name].split(',')[0]) * factor:.0f}" if name in PYCMA else ""


def figures(
    seeds: range, model: GaussianModel | None = None, dims: tuple[int, ...] = (10, 20)
) -> Iterator[tuple[str, ...]]:
    """Rows of functions without instances: how many seeds reached the target, and their evaluations."""
    for problem in (p for d in dims for p in problems(d)):
        results = [solve(problem, seed, model=model) for seed in seeds]
        reached = [result.nfev for result in results if result.success]
        peer = PYCMA[problem.name] if model is None else ""
        aim = goal(problem.name, 1.05) if model is None else ""
        yield problem.name, f"{len(reached)} of {len(seeds)}", spread(reached), peer, aim


def natural_figures(seeds: range) -> Iterator[tuple[str, ...]]:
    """The same with the natural gradient alone."""
    peers = {"sphere 10": "6532", "ellipsoid 10": "9274", "cigar 10": "10666", "Rosenbrock 10": "9596"}
    for name, reached, counts, _, _ in figures(seeds, XNES(), (10,)):
        yield name, reached, counts, peers[name]


def bbob_figures(seeds: range, cases: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, ...]]:
    """Expected running times: all evaluations over the number of successes.

    Instances 1 to 10 in turn. f8 and f10 have local minima or look like it: where a run ends in one, the next begins at
    x0 with the same population, as the expected running time supposes. f15 has BIPOP.
    """
    for number, d in cases:
        restarts = BIPOP(9) if number == 15 else IPOP(9, factor=1)
        results = [solve(bbob(number, d, seed % 10 + 1), seed, restarts=restarts) for seed in seeds]
        reached = sum(result.success for result in results)
        firsts = [r.nfev for r in results if r.success and r.history["run"][-1] == 0]
        total = sum(result.nfev for result in results)
        name = f"f{number} {d}"
        running = f"{total / max(reached, 1):.0f}"
        aim = goal(name, 1.3 if number == 15 else 1.1)
        yield name, f"{reached} of {len(seeds)}", f"{len(firsts)}", running, spread(firsts), PYCMA[name], aim


SURROGATE_HEADS = ("reached", "surrogate=True", "reached", "pycma's lq-CMA-ES")
KNOWN = Path("build/benchmarks/search_surrogate.json")


def surrogate_figures(seeds: range, dims: tuple[int, ...] = (5, 10)) -> Iterator[tuple[str, ...]]:
    """Evaluations with a quadratic model of f, beside pycma's."""
    for problem in (p for d in dims for p in problems(d)):
        cells: list[str] = []
        for key, contestant in (("assisted", search_with_surrogate), ("assisted_peer", search_with_pycma)):
            counts = [
                keep_result(KNOWN, f"{problem.name} {key} {seed}", partial(contestant, problem, seed)) for seed in seeds
            ]
            reached = [count for count in counts if count is not None]
            cells += [f"{len(reached)} of {len(counts)}", spread(reached)]
        yield problem.name, *cells


def search_with_surrogate(problem: Problem, seed: int) -> int | None:
    """Evaluations up to the target with `surrogate=True`."""
    result = solve(problem, seed, surrogate=True, maxfevals=20_000)
    return result.nfev if result.success else None


def search_with_pycma(problem: Problem, seed: int) -> int | None:
    """Evaluations up to the target by pycma's `fmin_lq_surr2`."""
    x0 = problem.x0(torch.Generator().manual_seed(1000 + seed)).numpy().astype(float)
    count, reached = 0, 0

    def f(x: np.ndarray) -> float:
        nonlocal count, reached
        count += 1
        value = float(problem.f(torch.as_tensor(x).unsqueeze(0))[0])
        reached = reached or (count if value <= problem.target else 0)
        return value

    options = {"verbose": -9, "seed": seed + 1, "ftarget": problem.target, "maxfevals": 20_000}
    cma.fmin_lq_surr2(f, x0, problem.sigma0, options)
    return reached or None
