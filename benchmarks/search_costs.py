"""What a generation of the Gaussian search costs: its time beside pycma's, and its memory."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import cma
import numpy as np
import torch

from benchmarks.timing import ratios
from natgrad.search import GaussianSearch

HEADS = ("time / pycma's",)
MEMORY_HEADS = ("MiB above the import", "bytes / d", "ms / generation", "popsize")


def overheads(repeats: int) -> Iterator[tuple[str, ...]]:
    """Over the dimension."""
    for d in (2, 5, 10, 20, 50, 100, 200, 500, 1000):
        yield overhead(d, 30 if d <= 200 else 10, repeats if d <= 200 else 3)


def overhead(d: int, generations: int, repeats: int) -> tuple[str, ...]:
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
        times = ratios(theirs(), {"ours": ours()}, repeats)
    return (f"d = {d}", str(times["ours"]))


MEASURED = """
import sys, time, torch
import natgrad as ng
from natgrad.search import LowRank, Separable

torch.set_num_threads(1)
d, model = int(sys.argv[1]), {"Separable": Separable, "LowRank": LowRank}[sys.argv[2]]()


def kib(name):  # Linux: the line `VmHWM:  1234 kB`
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))


def generation(search):
    start = time.process_time()
    X = search.ask()
    search.tell(X, X.square().sum(1))
    return time.process_time() - start


generation(ng.GaussianSearch(torch.ones(10), 1.0, seed=1, model=model))
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew: importing has one of its own
before = kib("VmRSS")
search = ng.GaussianSearch(torch.ones(d, dtype=torch.float64), 1.0, seed=1, model=model)
times = sorted(generation(search) for _ in range(40))
print(kib("VmHWM") - before, times[20], search.popsize)
"""


def memory() -> Iterator[tuple[str, ...]]:
    """Highest resident memory in a process of its own, above what it has after importing; 40 generations."""
    for model in ("Separable", "LowRank"):
        for d in (1_000, 10_000, 100_000):
            words = subprocess.run(
                [sys.executable, "-c", MEASURED, str(d), model], capture_output=True, text=True, check=True
            ).stdout.split()
            kib, seconds = float(words[0]), float(words[1])
            yield f"{model}, d = {d}", f"{kib / 1024:.1f}", f"{kib * 1024 / d:.0f}", f"{seconds * 1e3:.2f}", words[2]
