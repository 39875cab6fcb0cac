"""Whole training steps of the structured optimisers beside SGD, Adam, Muon and SOAP, and the memory that they take."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import natgrad as ng
from benchmarks.timing import Ratio, measure_time, ratio, ratios, time_in_turn
from benchmarks.training import TrainingCase, classifier
from natgrad.ground.linalg import eigh
from natgrad.operators import Arranged
from natgrad.structures import Layerwise
from natgrad_lab.experiments.contestants import JoinedOptimizers, Muon

CYCLE = 20  # steps that are timed together: one update of the statistics and one of the inverses
HEADS = ("step / SGD step",)
EIGEN_HEADS = ("time / gradient",)
Make = Callable[[nn.Module, nn.Module], torch.optim.Optimizer]
RATE = 1e-4  # small: the networks stay where they are


def muon_single(model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    """Muon in float32, with Adam on what is not a matrix."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return JoinedOptimizers(Muon(matrices, RATE), torch.optim.Adam(rest, lr=RATE, fused=True))


def soap(model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    """pytorch_optimizer's, its eigenvectors refreshed every 10 steps (its default)."""
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), lr=RATE)


CONTESTANTS: dict[str, Make] = {
    "SGD": lambda model, _: torch.optim.SGD(model.parameters(), lr=RATE),
    "Adam": lambda model, _: torch.optim.Adam(model.parameters(), lr=RATE, fused=True),
    "Muon (float32)": muon_single,
    "SOAP": soap,
    "kfac": partial(ng.kfac, lr=RATE),
    "kfac, factors every step": partial(ng.kfac, lr=RATE, update_every=1),
    "ekfac": partial(ng.ekfac, lr=RATE),
    "diagonal": partial(ng.diagonal, lr=RATE),
    "unitwise": partial(ng.unitwise, lr=RATE),
}


def iteration(work: TrainingCase, make: Make, late: bool = True) -> Callable[[], object]:
    """A whole step of a fresh model; late in training, where the intervals are as long as they get."""
    torch.manual_seed(0)
    model = work.build()
    optimizer = make(model, work.criterion)
    loss = getattr(optimizer, "loss", work.criterion)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(work.inputs), work.targets).backward()
        optimizer.step()

    if late:
        step()
        settle(optimizer)
    return step


def settle(optimizer: torch.optim.Optimizer) -> None:
    """As after a thousand steps and fifty readings, of which the first are asked more than the later ones."""
    if isinstance(optimizer, ng.StructuredNaturalGradient):
        state = optimizer.state_dict()
        state["natgrad"]["clock"]["step"] += 1000
        state["natgrad"]["heard"][0] += 50
        state["natgrad"]["heard"][2] += 50  # updates that looked for losses besides the criterion
        if optimizer.rule.turns_at:  # spectral by then
            state["natgrad"]["clock"]["turned"] = 1000
        optimizer.load_state_dict(state)


def cycles(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, Ratio]:
    """Seconds of whole cycles over those of the first, after one of warming up; every step of all in turn."""
    turns = [time_in_turn(steps, CYCLE, warm=0) for _ in range(repeats + 1)][1:]
    times = {name: [sum(turn[name]) for turn in turns] for name in steps}
    base = next(iter(times.values()))
    return {name: ratio(values, base) for name, values in times.items()}


def report(work: TrainingCase, repeats: int, names: Iterable[str] = CONTESTANTS) -> list[tuple[str, ...]]:
    """Rows (optimizer, its step in SGD steps), SGD's own in milliseconds."""
    steps = {name: iteration(work, CONTESTANTS[name]) for name in names}
    times = cycles(steps, repeats)
    seconds = statistics.median(measure_time(steps["SGD"]) for _ in range(5))
    return [(name, f"{1000 * seconds:.0f} ms" if name == "SGD" else str(r)) for name, r in times.items()]


FIRST = 100  # steps
FIRST_HEADS = (f"first {FIRST} steps / SGD steps", "the first ten of them", "the last ten")
AT_FIRST: dict[str, Make] = {
    "SGD": CONTESTANTS["SGD"],
    "Adam": CONTESTANTS["Adam"],
    "kfac": ng.kfac,
    "ekfac": ng.ekfac,
    "kfac, factors every step": partial(ng.kfac, update_every=1),
}


def first_steps(work: TrainingCase, names: Iterable[str] = AT_FIRST) -> list[tuple[str, ...]]:
    """Rows (optimizer, its first hundred steps in as many SGD steps, the first and the last ten), at own rates."""
    steps = {name: iteration(work, AT_FIRST[name], late=False) for name in dict.fromkeys(("SGD", *names))}
    iteration(work, CONTESTANTS["SGD"], late=False)()  # products and their kernels are loaded
    spent = time_in_turn(steps, FIRST, warm=0)
    base = spent.pop("SGD")
    parts = (slice(None), slice(10), slice(-10, None))
    return [(name, *(f"{sum(took[part]) / sum(base[part]):.2f}" for part in parts)) for name, took in spent.items()]


# What EKFAC's parts cost in gradients: factors, eigenbases, the diagonal in them, and an update in a kept basis

STALE = 0.9999  # eigenvectors are kept, whatever has become of the factors


def eigen_parts(work: TrainingCase) -> dict[str, Callable[[], object]]:
    """Each from the parameters: a forward pass of its own, drawn labels and their backward pass included."""
    model = work.build()
    params, metric = dict(ng.trainable(model)), ng.fisher(model, work.criterion)

    def update(structure: Layerwise, memory: Any = None) -> tuple[ng.Operator, Any]:
        return structure.update(memory, metric, params, work.inputs)

    lasting = ng.EigenKronecker(decay=0.95, stale=STALE)
    memory = update(lasting)[1]  # layers that are known to explain their parameters are not compared again
    operator = update(ng.Kronecker(factored=True))[0]
    assert isinstance(operator, Arranged)
    factors = [side for _, part in operator.parts for side in (part.left, part.right)]  # type: ignore[attr-defined]
    return {
        "K-FAC: pass and factors": lambda: update(ng.Kronecker(), memory),
        "K-FAC: inverses of all factors": lambda: operator.inverse(1e-3),
        "eigendecompositions of all factors": lambda: [eigh(factor) for factor in factors],
        "EKFAC: built anew": lambda: update(ng.EigenKronecker(), memory),
        "EKFAC: updated, eigenvectors kept": lambda: update(lasting, memory),
    }


def gradient_of(work: TrainingCase) -> Callable[[], object]:
    """One forward and backward pass."""
    model = work.build()
    params = list(model.parameters())
    return lambda: torch.autograd.grad(work.criterion(model(work.inputs), work.targets), params)


def report_eigen(repeats: int) -> list[tuple[str, str]]:
    """Rows (which part, its time in gradients), on the classifier."""
    work = classifier()
    return [(name, str(times)) for name, times in ratios(gradient_of(work), eigen_parts(work), repeats).items()]


def memory_report(names: Iterable[str] = CONTESTANTS) -> list[tuple[str, str]]:
    """Rows (optimizer, MiB): growth of the highest resident memory over twenty steps of the classifier."""
    rows = []
    for name in names:
        command = [sys.executable, "-m", "benchmarks.kfac", name, str(torch.get_num_threads())]
        growth = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append((name, f"{float(growth):.0f}"))
    return rows


def resident(key: str) -> float:
    """VmRSS (now) or VmHWM (highest so far) of this process, in MiB. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def main() -> None:
    """The memory of one optimizer: libraries, model and data are there before the first reading."""
    name, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    work, model = classifier(), classifier(2)
    iteration(model, CONTESTANTS["SGD"])()  # products and their kernels are loaded
    if name == "SOAP":
        import pytorch_optimizer  # noqa: F401
    before = resident("VmRSS")
    step = iteration(work, CONTESTANTS[name], late=False)
    for _ in range(20):
        step()
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main()
