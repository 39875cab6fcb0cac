"""The 23 functions of bits of IOHprofiler's PBO suite: the best value at equal evaluations, beside evolution's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.bit_contestants import PEERS, SEARCHES, CountedProblem
from benchmarks.kept_results import keep_result

BITS, BUDGET = 64, 20_000
KNOWN = Path("build/benchmarks/search_pbo.json")
TITLE = f"{BITS} bits, {BUDGET} evaluations, {{}}; kept in {KNOWN}"
HEADS = ("BernoulliSearch", "(1+1)-EA", "the same, restarted", "UMDA 50", "cGA", "ours")


CONTESTANTS = {"ours": SEARCHES["bernoulli"]} | PEERS


def run(number: int, contestant: str, seed: int) -> tuple[str, float, int]:
    """The function's name, the best value, and after how many evaluations it came."""
    # A function of the suite, to be made small
    import ioh  # the suite: only where it is installed

    suite = ioh.ProblemClass.PBO  # type: ignore[attr-defined]
    f = ioh.get_problem(number, instance=1, dimension=BITS, problem_class=suite)

    def values(X: np.ndarray) -> np.ndarray:
        return np.array([-float(f(row)) for row in X.astype(int).tolist()])

    problem = CountedProblem(f"F{number} {f.meta_data.name}", BITS, values, -float(f.optimum.y), BUDGET)
    CONTESTANTS[contestant](problem, seed)
    return problem.name, -problem.best, problem.found


def figures(seeds: range) -> Iterator[tuple[str, ...]]:
    """A row per function: median of the best values, and in brackets the median of the evaluations up to them."""
    for number in range(1, 24):
        medians: list[tuple[float, float]] = []
        name = ""
        for contestant in CONTESTANTS:
            keys = {seed: f"{number} {contestant} {seed} {BITS} {BUDGET}" for seed in seeds}
            runs = [keep_result(KNOWN, key, partial(run, number, contestant, seed)) for seed, key in keys.items()]
            name = runs[0][0]
            medians.append((statistics.median(f[1] for f in runs), statistics.median(f[2] for f in runs)))
        yield name, *(f"{best:.4g} ({count:.0f})" for best, count in medians), judge(medians[0], medians[1:])


def judge(own: tuple[float, float], others: list[tuple[float, float]]) -> str:
    """By the value; where that is the same, by the evaluations, of which a tenth more or less is level."""
    best, count = max(others, key=lambda pair: (pair[0], -pair[1]))
    if abs(own[0] - best) > 1e-9 * abs(best):
        return "ahead" if own[0] > best else "behind"
    if abs(own[1] - count) <= 0.1 * count:
        return "level"
    return "ahead" if own[1] < count else "behind"
