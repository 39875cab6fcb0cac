"""Searches of bits that race one another: ours, and evolution's with their restarts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from natgrad.search import BernoulliSearch, MarkovSearch, Search

PATIENCE = 100  # evaluations per bit without a better value, after which all but the plain EA begin anew


class CountedProblem:
    """f of rows of n bits to be made small: its evaluations, and the best of them within the budget.

    least: its minimum, at which a race ends. cliques: groups of bits that f depends on jointly, for a search told.
    """

    def __init__(
        self,
        name: str,
        n: int,
        f: Callable[[np.ndarray], np.ndarray],
        least: float,
        budget: int,
        cliques: list[tuple[int, ...]] | None = None,
    ) -> None:
        self.name, self.n, self.f, self.least, self.budget, self.cliques = name, n, f, least, budget, cliques
        self.best, self.found, self.count = math.inf, 0, 0

    def __call__(self, X: np.ndarray) -> np.ndarray:
        values = np.asarray(self.f(X), dtype=float)
        for value in values.tolist():
            self.count += 1
            if self.count <= self.budget and value < self.best:
                self.best, self.found = value, self.count
        return values

    @property
    def over(self) -> bool:
        return self.count >= self.budget or self.has_reached

    @property
    def has_reached(self) -> bool:
        """True once the minimum has been seen."""
        return self.best <= self.least + 1e-9 * max(1.0, abs(self.least))


def run_search(f: CountedProblem, first: Search) -> None:
    """By ask and tell, begun anew with twice the population where it ends, as `ng.minimize` does."""
    search, run, popsize = first, 0, first.popsize
    while not f.over:
        if search.stop():
            run += 1
            search = first.renew(popsize * 2**run, run)
        X = search.ask()
        search.tell(X, torch.as_tensor(f(X.numpy())))


SEARCHES: dict[str, Callable[[CountedProblem, int], None]] = {
    "given": lambda f, seed: run_search(f, MarkovSearch(f.n, f.cliques, seed=seed)),  # the cliques
    "learned": lambda f, seed: run_search(f, MarkovSearch(f.n, seed=seed)),
    "bernoulli": lambda f, seed: run_search(f, BernoulliSearch(f.n, seed=seed)),
}


def run_evolution(f: CountedProblem, seed: int, restarted: bool = False) -> None:
    """The (1+1)-EA: every bit flips with chance 1 / n, the child stays if it is no worse."""
    draws = np.random.default_rng(seed)
    while not f.over:
        x = draws.integers(0, 2, (1, f.n))
        value = least = f(x)[0]
        since = f.count
        while not f.over and not (restarted and f.count - since >= PATIENCE * f.n):
            child = np.where(draws.random((1, f.n)) < 1 / f.n, 1 - x, x)
            new = f(child)[0]
            x, value = (child, new) if new <= value else (x, value)
            least, since = (value, f.count) if value < least else (least, since)


def run_umda(f: CountedProblem, seed: int, popsize: int = 50) -> None:
    """UMDA: the means of the better half, within [1 / n, 1 - 1 / n]."""
    draws = np.random.default_rng(seed)
    means, anew = np.full(f.n, 0.5), 0
    while not f.over:
        X = (draws.random((popsize, f.n)) < means).astype(int)
        means = X[f(X).argsort(kind="stable")[: popsize // 2]].mean(0).clip(1 / f.n, 1 - 1 / f.n)
        if f.count - max(f.found, anew) >= PATIENCE * f.n:
            means, anew = np.full(f.n, 0.5), f.count


def run_cga(f: CountedProblem, seed: int) -> None:
    """cGA with a population of 8 sqrt(n)."""
    draws = np.random.default_rng(seed)
    means, anew = np.full(f.n, 0.5), 0
    while not f.over:
        X = (draws.random((2, f.n)) < means).astype(int)
        first, second = X[f(X).argsort(kind="stable")]
        means = (means + (first - second) / (8 * math.sqrt(f.n))).clip(1 / f.n, 1 - 1 / f.n)
        if f.count - max(f.found, anew) >= PATIENCE * f.n:
            means, anew = np.full(f.n, 0.5), f.count


PEERS: dict[str, Callable[[CountedProblem, int], None]] = {
    "ea": run_evolution,
    "ea restarted": partial(run_evolution, restarted=True),  # when its patience ends
    "umda": run_umda,
    "cga": run_cga,
}
