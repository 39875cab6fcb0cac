"""Evaluations that searches of bits and categories take to the first minimum, beside evolution's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.tables import write_spread
from natgrad.search import (
    CGA,
    PBIL,
    BernoulliSearch,
    CategoricalSearch,
    GaussianSearch,
    MarkovSearch,
    ProductSearch,
    Search,
)

HEADS = ("reached", "median evaluations (smallest-largest)", "peer", "goal")


def onemax(X: Tensor) -> Tensor:
    return -X.sum(1)


def traps(X: Tensor) -> Tensor:
    """Traps of five bits: best with all ones, but every single bit says zero."""
    ones = X.reshape(len(X), -1, 5).sum(2)
    return -torch.where(ones == 5, 5.0, 4 - ones).sum(1)


def parities(X: Tensor) -> Tensor:
    """How many groups of four bits have an even sum, negated: no pair of bits tells anything."""
    return -(X.reshape(len(X), -1, 4).sum(2) % 2 == 0).sum(1).to(torch.float64)


@dataclass(frozen=True)
class Cut:
    """A random graph on 16 vertices, each edge there with probability 1/2, and its largest cut by enumeration."""

    edges: tuple[tuple[int, int], ...]
    weights: Tensor
    best: float

    @staticmethod
    def random(seed: int, weighted: bool = False) -> Cut:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(16, 16, generator=generator, dtype=torch.float64)
        edges = tuple((int(i), int(j)) for i, j in (draws < 0.5).triu(1).nonzero().tolist())
        weights = torch.ones(len(edges), dtype=torch.float64)
        if weighted:
            weights = torch.rand(len(edges), generator=generator, dtype=torch.float64)
        states = ((torch.arange(2**16).unsqueeze(1) >> torch.arange(16)) & 1).to(torch.float64)
        return Cut(edges, weights, float(Cut(edges, weights, 0.0)(states).min()))

    def __call__(self, X: Tensor) -> Tensor:
        left, right = torch.tensor(self.edges).T
        return -(X[:, left] - X[:, right]).abs() @ self.weights


def reached_at(search: Search, f: Callable[[Tensor], Tensor], target: float, budget: int) -> int | None:
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


def catcma(sizes: list[int], f: Callable[[Tensor], Tensor], target: float, seed: int, budget: int) -> int | None:
    """CatCMA with margin of the `cmaes` package, on categories alone."""
    from cmaes import CatCMAwM  # a peer: only where it is installed

    optimizer = CatCMAwM(c_space=sizes, seed=seed + 1)
    used = 0
    while used < budget:
        asked = [optimizer.ask() for _ in range(optimizer.population_size)]
        numbers = torch.tensor([[int(np.argmax(row)) for row in answer.c] for answer in asked])
        values = f(numbers.to(torch.float64)).tolist()
        for k, value in enumerate(values):
            if value <= target + 1e-9:
                return used + k + 1
        used += len(values)
        optimizer.tell(list(zip(asked, values, strict=True)))
    return None


Run = Callable[[int], "int | None"]
Row = tuple[str, str, str, Run]  # name, peer's figure, goal, evaluations of a seed


def onemax_rows() -> list[Row]:
    def ours(seed: int, **settings: Any) -> int | None:
        return reached_at(BernoulliSearch(100, seed=seed, **settings), onemax, -100, 60_000)

    return [
        ("OneMax 100, BernoulliSearch", "CatCMAwM 654, cGA 1142", "700", ours),
        ("OneMax 100, update=CGA()", "", "", lambda s: ours(s, update=CGA())),
        ("OneMax 100, update=PBIL(.1, 4), popsize 20", "", "", lambda s: ours(s, update=PBIL(0.1, 4), popsize=20)),
        ("OneMax 100, CatCMAwM", "", "", lambda s: catcma([2] * 100, onemax, -100, s, 60_000)),
        ("OneMax 100, (1+1)-EA", "", "", lambda s: one_plus_one(onemax, 100, -100, s, 60_000)),
    ]


def trap_rows() -> list[Row]:
    blocks = [range(5 * i, 5 * i + 5) for i in range(6)]

    def ours(search: Search, budget: int = 60_000) -> int | None:
        return reached_at(search, traps, -30, budget)

    return [
        ("trap-5 on 30 bits, cliques given", "1300", "1300", lambda s: ours(MarkovSearch(30, blocks, seed=s))),
        ("trap-5, cliques learned", "", "10000", lambda s: ours(MarkovSearch(30, seed=s))),
        ("trap-5, BernoulliSearch up to 2000", "0 of 10", "", lambda s: ours(BernoulliSearch(30, seed=s), 2000)),
        ("trap-5, update=PBIL(.1, 4)", "0 of 10", "", lambda s: ours(BernoulliSearch(30, seed=s, update=PBIL(0.1, 4)))),
        ("trap-5, update=CGA()", "0 of 10", "", lambda s: ours(BernoulliSearch(30, seed=s, update=CGA()))),
        ("trap-5, (1+1)-EA", "", "", lambda s: one_plus_one(traps, 30, -30, s, 60_000)),
    ]


def cut_rows(weighted: bool) -> list[Row]:
    def best_of(make: Callable[[int, Cut], Search]) -> Run:
        def run(seed: int) -> int | None:
            cut = Cut.random(seed, weighted)
            return reached_at(make(seed, cut), cut, cut.best, 20_000)

        return run

    def evolution(seed: int) -> int | None:
        cut = Cut.random(seed, weighted)
        return one_plus_one(cut, 16, cut.best, seed, 20_000)

    name = "MaxCut 16, weighted," if weighted else "MaxCut 16,"
    pairs = list(combinations(range(16), 2))
    return [
        (f"{name} MarkovSearch, graph given", "", "800", best_of(lambda s, cut: MarkovSearch(16, cut.edges, seed=s))),
        (f"{name} MarkovSearch, all pairs", "", "800", best_of(lambda s, cut: MarkovSearch(16, pairs, seed=s))),
        (f"{name} MarkovSearch, learned", "", "800", best_of(lambda s, cut: MarkovSearch(16, seed=s))),
        (f"{name} BernoulliSearch", "8597", "", best_of(lambda s, cut: BernoulliSearch(16, seed=s))),
        (
            f"{name} update=PBIL(.1, 4)",
            "8597",
            "",
            best_of(lambda s, cut: BernoulliSearch(16, seed=s, update=PBIL(0.1, 4))),
        ),
        (f"{name} (1+1)-EA", "776", "", evolution),
    ]


def parity_rows() -> list[Row]:
    groups = [range(4 * i, 4 * i + 4) for i in range(15)]

    def ours(search: Search) -> int | None:
        return reached_at(search, parities, -15, 4_000)

    return [
        ("parities of 4 on 60 bits, cliques given", "", "", lambda s: ours(MarkovSearch(60, groups, seed=s))),
        ("parities, cliques learned", "", "", lambda s: ours(MarkovSearch(60, seed=s))),
        ("parities, (1+1)-EA", "", "", lambda s: one_plus_one(parities, 60, -15, s, 4_000)),
    ]


def categories(X: Tensor) -> Tensor:
    """How many of the variables are not at 1."""
    return (X != 1).sum(1).to(torch.float64)


def sum_mixed(X: Tensor) -> Tensor:
    """Five reals, three integers to rank in the next columns, five categories: 0 at the minimum."""
    return X[:, :5].square().sum(1) + (X[:, 5:8] - 3).square().sum(1) + categories(X[:, 8:])


def mixed_search(seed: int) -> Search:
    real = GaussianSearch([2.0] * 5 + [0.0] * 3, 2.0, 20, seed, integers=[5, 6, 7])
    return ProductSearch(real, CategoricalSearch([5] * 5, 20, seed, update=PBIL(0.1, 5)))


def category_rows() -> list[Row]:
    sizes = [5] * 30

    def ours(seed: int, **settings: Any) -> int | None:
        return reached_at(CategoricalSearch(sizes, seed=seed, **settings), categories, 0, 20_000)

    return [
        ("30 categories of 5, CategoricalSearch", "", "", ours),
        ("30 categories of 5, update=CGA()", "", "", lambda s: ours(s, update=CGA())),
        ("30 categories of 5, CatCMAwM", "", "", lambda s: catcma(sizes, categories, 0, s, 20_000)),
        (
            "5 reals, 3 integers, 5 categories of 5 to 1e-8",
            "",
            "",
            lambda s: reached_at(mixed_search(s), sum_mixed, 1e-8, 20_000),
        ),
    ]


def figures(seeds: range) -> Iterator[tuple[str, ...]]:
    rows = [*onemax_rows(), *trap_rows(), *cut_rows(False), *cut_rows(True), *parity_rows(), *category_rows()]
    for name, peer, goal, run in rows:
        try:
            counts = [run(seed) for seed in seeds]
        except ModuleNotFoundError as error:
            yield name, f"needs {error.name}", "", peer, goal
            continue
        reached = [count for count in counts if count is not None]
        numbers = write_spread(reached, ".0f") if reached else "none"
        yield name, f"{len(reached)} of {len(counts)}", numbers, peer, goal
