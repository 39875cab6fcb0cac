"""Functions of bits that depend on one another: evaluations to the minimum, beside evolution's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.bit_contestants import PEERS, SEARCHES, CountedProblem
from benchmarks.kept_results import keep_result

BUDGET = 20_000
KNOWN = Path("build/benchmarks/search_landscapes.json")
CONTESTANTS = SEARCHES | PEERS
TITLE = f"{BUDGET} evaluations, {{}}; kept in {KNOWN}"
HEADS = ("cliques given", "cliques learned", "BernoulliSearch", "(1+1)-EA", "the same, restarted", "UMDA 50", "cGA")


def build_nk(seed: int, n: int, k: int) -> CountedProblem:
    """An NK landscape: the mean over bits of a table of uniform numbers, read at the bit and k others at random."""
    draws = np.random.default_rng(seed)
    groups = [(i, *sorted(draws.choice([j for j in range(n) if j != i], k, replace=False).tolist())) for i in range(n)]
    tables, index = draws.random((n, 2 ** (k + 1))), np.array(groups)
    powers = 2 ** np.arange(k + 1)

    def values(X: np.ndarray) -> np.ndarray:
        places = X.astype(int)[:, index] @ powers
        return -tables[np.arange(n), places].mean(1)

    states = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    least = min(float(values(part).min()) for part in np.array_split(states, 16))
    return CountedProblem(f"NK landscape, {n} bits, K = {k}", n, values, least, BUDGET, groups)


def build_traps(seed: int, traps: int) -> CountedProblem:
    """Traps of five bits: best with all ones, but every single bit says zero. Their bits are shuffled."""
    groups = np.random.default_rng(seed).permutation(5 * traps).reshape(traps, 5)

    def values(X: np.ndarray) -> np.ndarray:
        ones = X[:, groups].sum(2)
        return -np.where(ones == 5, 5.0, 4 - ones).sum(1)

    cliques = [tuple(group) for group in groups.tolist()]
    return CountedProblem(f"trap-5, {5 * traps} bits", 5 * traps, values, -5.0 * traps, BUDGET, cliques)


def build_spin_glass(seed: int, side: int) -> CountedProblem:
    """A square lattice of spins with couplings of +1 and -1 between neighbours, open at its edges."""
    sites = np.arange(side**2).reshape(side, side)
    across, down = (sites[:, :-1], sites[:, 1:]), (sites[:-1], sites[1:])
    first, second = (np.concatenate([a.ravel(), b.ravel()]) for a, b in zip(across, down, strict=True))
    draws = np.random.default_rng(seed)
    rows, columns = draws.choice([-1.0, 1.0], across[0].shape), draws.choice([-1.0, 1.0], down[0].shape)
    couplings = np.concatenate([rows.ravel(), columns.ravel()])

    def values(X: np.ndarray) -> np.ndarray:
        spins = 2 * X - 1
        return -(spins[:, first] * spins[:, second]) @ couplings

    cliques = list(zip(first.tolist(), second.tolist(), strict=True))
    least = find_least_energy(rows, columns)
    return CountedProblem(f"spin glass, {side} x {side}", side**2, values, least, BUDGET, cliques)


def find_least_energy(rows: np.ndarray, columns: np.ndarray) -> float:
    """The least energy of a spin glass, row by row. rows, columns: couplings (side, side - 1) and (side - 1, side)."""
    side = len(rows)
    spins = np.array(list(product((-1.0, 1.0), repeat=side)))
    least = np.zeros(len(spins))
    for i in range(side):
        if i > 0:
            least = least.reshape((2,) * side)
            for j, coupling in enumerate(columns[i - 1]):  # one spin after the other: 2^side steps each, not 4^side
                up, down = np.take(least, 0, j), np.take(least, 1, j)
                alike, unlike = np.minimum(up - coupling, down + coupling), np.minimum(up + coupling, down - coupling)
                least = np.stack([alike, unlike], j)
        least = least.reshape(-1) - (spins[:, :-1] * spins[:, 1:]) @ rows[i]
    return float(least.min())


def build_formula(seed: int, n: int = 30, clauses: int = 120) -> CountedProblem:
    """A satisfiable formula of clauses of three literals: how many are not satisfied."""
    draws = np.random.default_rng((seed, clauses))  # not those with which a contestant begins
    planted, groups, wrong = draws.integers(0, 2, n), [], []
    while len(groups) < clauses:
        group = np.sort(draws.choice(n, 3, replace=False))
        literal = draws.integers(0, 2, 3)
        if (literal == planted[group]).any():
            groups.append(tuple(group.tolist()))
            wrong.append(1 - literal)
    index, bad = np.array(groups), np.array(wrong)

    def values(X: np.ndarray) -> np.ndarray:
        return (X.astype(int)[:, index] == bad).all(2).sum(1).astype(float)

    return CountedProblem(f"{clauses} clauses of 3 literals, {n} bits", n, values, 0.0, BUDGET, groups)


PROBLEMS: tuple[Callable[[int], CountedProblem], ...] = (
    lambda seed: build_nk(seed, 18, 2),
    lambda seed: build_nk(seed, 18, 4),
    lambda seed: build_traps(seed, 6),
    lambda seed: build_traps(seed, 12),
    lambda seed: build_spin_glass(seed, 8),
    lambda seed: build_spin_glass(seed, 12),
    lambda seed: build_formula(seed),
)


def run(number: int, contestant: str, seed: int) -> tuple[bool, float, int]:
    """Whether the minimum was found, the best value, and after how many evaluations it came."""
    problem = PROBLEMS[number](seed)
    CONTESTANTS[contestant](problem, seed)
    return problem.has_reached, problem.best, problem.found


def figures(seeds: range) -> Iterator[tuple[str, ...]]:
    """A row per problem: how often the minimum was found, and the median evaluations of those runs."""
    for number, build in enumerate(PROBLEMS):
        cells = []
        for contestant in CONTESTANTS:
            keys = {seed: f"{number} {contestant} {seed} {BUDGET}" for seed in seeds}
            runs = [keep_result(KNOWN, key, partial(run, number, contestant, seed)) for seed, key in keys.items()]
            counts = [count for reached, _, count in runs if reached]
            median = f" in {statistics.median(counts):.0f}" if counts else ""
            cells.append(f"{len(counts)} of {len(runs)}{median}")
        yield build(seeds[0]).name, *cells
