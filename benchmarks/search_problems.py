"""Functions of a batch without instances, where searches of them start, and what independent draws take on them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from natgrad.search import SearchResult, gaussian, minimize

TARGET = 1e-8
DRAWS_HEADS = ("evaluations", "independent draws")
DRAWS_DIMENSIONS = (5, 20)


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


def solve(problem: Problem, seed: int, **settings: Any) -> SearchResult:
    """The result of one run."""
    x0 = problem.x0(torch.Generator().manual_seed(1000 + seed))
    return minimize(problem.f, x0, problem.sigma0, ftarget=problem.target, seed=seed, vectorized=True, **settings)


def draw_independently(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Vectors of N(0, I), shape (count, d)."""
    return torch.randn(count, len(like), generator=generator, dtype=like.dtype, device=like.device)


def compare_draws(seeds: range) -> Iterator[tuple[str, ...]]:
    """Median evaluations to the target, of runs that reach it, and how many times as many others take."""
    independent = mock.patch.object(gaussian, "draw_orthogonal_normals", draw_independently)
    for problem in (problem for d in DRAWS_DIMENSIONS for problem in problems(d)):

        def count(problem: Problem = problem) -> float:
            results = [solve(problem, seed) for seed in seeds]
            return statistics.median(result.nfev for result in results if result.success)

        ours = count()
        with independent:
            theirs = count()
        yield problem.name, f"{ours:.0f}", f"{theirs / ours:.2f} times"
