"""Evaluations that searches of black boxes take to a target, and what a generation costs beside pycma's."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cma
import numpy as np
import torch
from cma import bbobbenchmarks
from torch import Tensor

from benchmarks.timing import ratios
from natgrad.applications.search import (
    BIPOP,
    CGA,
    BernoulliSearch,
    BitSearch,
    GaussianModel,
    GaussianSearch,
    MarkovSearch,
    SearchResult,
    minimize,
)

HEADS = ("reached", "median evaluations (quartiles)", "pycma's median")
BBOB_HEADS = ("reached", "expected running time", "pycma's")
TARGET = 1e-8
PYCMA = {  # medians of ten seeds, cma 4.5.0, measured in this set-up
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


@dataclass(frozen=True)
class Problem:
    """A function of a batch, and where a search of it starts."""

    name: str
    f: Callable[[Tensor], Tensor]
    x0: Callable[[torch.Generator], Tensor]
    sigma0: float
    target: float = TARGET


def sphere(X: Tensor) -> Tensor:
    return X.square().sum(1)


def ellipsoid(X: Tensor) -> Tensor:
    d = X.shape[1]
    return (X.square() * 1e6 ** (torch.arange(d, dtype=X.dtype) / (d - 1))).sum(1)


def cigar(X: Tensor) -> Tensor:
    return X[:, 0].square() + 1e6 * X[:, 1:].square().sum(1)


def rosenbrock(X: Tensor) -> Tensor:
    return (100 * (X[:, 1:] - X[:, :-1].square()).square() + (1 - X[:, :-1]).square()).sum(1)


def problems(d: int) -> list[Problem]:
    """x0 uniform in [1, 5]^d and sigma0 = 2; Rosenbrock's from 0 with sigma0 = .5."""

    def anywhere(generator: torch.Generator) -> Tensor:
        return 1 + 4 * torch.rand(d, generator=generator, dtype=torch.float64)

    named = (("sphere", sphere), ("ellipsoid", ellipsoid), ("cigar", cigar))
    rows = [Problem(f"{name} {d}", f, anywhere, 2.0) for name, f in named]
    return [*rows, Problem(f"Rosenbrock {d}", rosenbrock, lambda generator: torch.zeros(d), 0.5)]


def bbob(number: int, d: int, instance: int) -> Problem:
    """A function of the BBOB suite; target 1e-8 above its minimum, x0 = 0, sigma0 = 2."""
    function = bbobbenchmarks.instantiate(number, iinstance=instance)[0]

    def values(X: Tensor) -> Tensor:
        return torch.as_tensor(np.asarray(function(X.numpy()), dtype=float))

    target = float(function.getfopt()) + TARGET
    return Problem(f"f{number} {d}", values, lambda generator: torch.zeros(d), 2.0, target)


def solve(problem: Problem, seed: int, **settings: Any) -> SearchResult:
    """The result of one run."""
    x0 = problem.x0(torch.Generator().manual_seed(1000 + seed))
    return minimize(problem.f, x0, problem.sigma0, ftarget=problem.target, seed=seed, **settings)


def counted(problem: Problem, seeds: int, **settings: Any) -> tuple[str, str, str]:
    """How many seeds reached the target, and the median of their evaluations."""
    results = [solve(problem, seed, **settings) for seed in range(seeds)]
    reached = sorted(result.nfev for result in results if result.success)
    median = "none"
    if len(reached) > 1:
        low, _, high = statistics.quantiles(reached, n=4)
        median = f"{statistics.median(reached):.0f} ({low:.0f}-{high:.0f})"
    return f"{len(reached)} of {seeds}", median, PYCMA.get(problem.name, "")


def figures(seeds: int, model: GaussianModel | None = None, dims: tuple[int, ...] = (10, 20)) -> list[tuple[str, ...]]:
    """The table of functions without instances."""
    return [(p.name, *counted(p, seeds, model=model)) for d in dims for p in problems(d)]


def bbob_figures(cases: tuple[tuple[int, int], ...], instances: int = 10) -> list[tuple[str, ...]]:
    """Expected running times: all evaluations over the number of successes."""
    rows = []
    for number, d in cases:
        restarts = BIPOP(9) if number == 15 else 0
        results = [solve(bbob(number, d, i + 1), i, restarts=restarts) for i in range(instances)]
        reached = sum(result.success for result in results)
        total = sum(result.nfev for result in results)
        name = f"f{number} {d}"
        rows.append((name, f"{reached} of {instances}", f"{total / max(reached, 1):.0f}", PYCMA[name]))
    return rows


def overhead(d: int, generations: int = 30, repeats: int = 7) -> tuple[str, ...]:
    """Time of `generations` of ask and tell over pycma's, interleaved, for a function that costs nothing."""
    weights = 1e6 ** (np.arange(d) / (d - 1))

    def theirs() -> Callable[[], None]:
        strategy = cma.CMAEvolutionStrategy(np.ones(d), 1.0, {"verbose": -9, "seed": 1})

        def work() -> None:
            for _ in range(generations):
                X = np.asarray(strategy.ask())
                strategy.tell(list(X), list((X**2) @ weights))

        return work

    def ours() -> Callable[[], None]:
        search = GaussianSearch(torch.ones(d), 1.0, seed=1)
        scale = torch.as_tensor(weights)

        def work() -> None:
            for _ in range(generations):
                X = search.ask()
                search.tell(X, X.square() @ scale)

        return work

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ratios(theirs(), {"ours": ours()}, repeats)
    return (f"d = {d}", str(found["ours"]))


BIT_HEADS = ("reached", "median evaluations (smallest-largest)", "goal or peer")


def onemax(X: Tensor) -> Tensor:
    return -X.sum(1)


def traps(X: Tensor) -> Tensor:
    """Traps of five bits: best with all ones, but every single bit says zero."""
    ones = X.reshape(len(X), -1, 5).sum(2)
    return -torch.where(ones == 5, 5.0, 4 - ones).sum(1)


@dataclass(frozen=True)
class Cut:
    """A random graph on 16 vertices, each edge there with probability 1/2, and its largest cut by enumeration."""

    edges: tuple[tuple[int, int], ...]
    best: float

    @staticmethod
    def random(seed: int) -> Cut:
        draws = torch.rand(16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        edges = tuple((int(i), int(j)) for i, j in (draws < 0.5).triu(1).nonzero().tolist())
        states = ((torch.arange(2**16).unsqueeze(1) >> torch.arange(16)) & 1).to(torch.float64)
        return Cut(edges, float(Cut(edges, 0.0)(states).min()))

    def __call__(self, X: Tensor) -> Tensor:
        left, right = torch.tensor(self.edges).T
        return -(X[:, left] - X[:, right]).abs().sum(1)


def reached_at(search: BitSearch, f: Callable[[Tensor], Tensor], target: float, budget: int) -> int | None:
    """Evaluations up to the first of the target, or None."""
    while search.best.fun > target + 1e-9 and not search.stop() and search.nfev < budget:
        X = search.ask()
        search.tell(X, f(X))
    return search.best.nfev if search.best.fun <= target + 1e-9 else None


def one_plus_one(f: Callable[[Tensor], Tensor], n: int, target: float, seed: int, budget: int) -> int | None:
    """The (1+1)-EA: every bit flips with chance 1 / n, the child stays if it is no worse."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 2, (1, n), generator=generator).to(torch.float64)
    value = float(f(x))
    for count in range(2, budget):
        if value <= target + 1e-9:
            return count - 1
        child = (x - (torch.rand(1, n, generator=generator) < 1 / n).to(torch.float64)).abs()
        if (new := float(f(child))) <= value:
            x, value = child, new
    return None


def bit_figures(seeds: int) -> Iterator[tuple[str, ...]]:
    blocks = [range(5 * i, 5 * i + 5) for i in range(6)]
    cuts = [Cut.random(seed) for seed in range(seeds)]
    everyone: list[tuple[str, str, Callable[[int], int | None]]] = [
        (
            "OneMax 100, BernoulliSearch",
            "cGA 1142",
            lambda s: reached_at(BernoulliSearch(100, seed=s), onemax, -100, 20000),
        ),
        (
            "OneMax 100, the same with CGA()",
            "",
            lambda s: reached_at(BernoulliSearch(100, seed=s, update=CGA()), onemax, -100, 20000),
        ),
        (
            "trap-5 on 30 bits, cliques given",
            "1300",
            lambda s: reached_at(MarkovSearch(30, blocks, seed=s), traps, -30, 12000),
        ),
        (
            "trap-5 on 30 bits, cliques learned",
            "10000",
            lambda s: reached_at(MarkovSearch(30, seed=s), traps, -30, 12000),
        ),
        ("trap-5 on 30 bits, BernoulliSearch", "", lambda s: reached_at(BernoulliSearch(30, seed=s), traps, -30, 2000)),
        (
            "MaxCut on 16 vertices, graph given",
            "800",
            lambda s: reached_at(MarkovSearch(16, cuts[s].edges, seed=s), cuts[s], cuts[s].best, 5000),
        ),
        (
            "MaxCut on 16 vertices, learned",
            "800",
            lambda s: reached_at(MarkovSearch(16, seed=s), cuts[s], cuts[s].best, 5000),
        ),
        ("MaxCut on 16 vertices, (1+1)-EA", "", lambda s: one_plus_one(cuts[s], 16, cuts[s].best, s, 5000)),
    ]
    for name, goal, run in everyone:
        yield name, *told([run(seed) for seed in range(seeds)]), goal


def told(counts: list[int | None]) -> tuple[str, str]:
    reached = [count for count in counts if count is not None]
    number = f"{len(reached)} of {len(counts)}"
    return number, f"{statistics.median(reached):.0f} ({min(reached)}-{max(reached)})" if reached else "none"
