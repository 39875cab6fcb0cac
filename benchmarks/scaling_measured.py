"""The predictions of `scaling.py` beside 1, 2 and 4 gloo processes on this machine.

Processor seconds, not seconds: more processes than cores wait for one another, and nobody predicts that.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from benchmarks.scaling import Machine, perceptron, predict
from natgrad.ground.linalg import invert_or_nan

LOAD = perceptron([512] * 9, 64)
STEPS, WARM = 8, 3


@dataclass(frozen=True)
class ProcessCost:
    """Of one process."""

    seconds: float
    report: dict[str, Any]
    grown: dict[str, int]
    small: float
    large: float
    rates: dict[str, float]


def measure_calls(work: Callable[[], object], times: int) -> float:
    """Processor seconds of one call, after one that is not counted."""
    work()
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times


def measure_rates(n: int = 513) -> dict[str, float]:
    """What a processor second holds: n^3 of damped inverses, operations of products, bytes out of no cache, copied."""
    root, square, large = torch.randn(n, 2 * n), torch.randn(512, 512), torch.randn(2**22)
    matrix = root @ root.T / n + torch.eye(n)
    return {
        "inverse": n**3 / measure_calls(lambda: invert_or_nan(matrix), 10),
        "exact": 2 * 512**3 / measure_calls(lambda: square @ square, 20),
        "copies": 4 * 2**22 / measure_calls(large.clone, 10),
    }


def measure_sum(numbers: int, times: int) -> float:
    """Processor seconds of one sum over all processes."""
    tensor = torch.zeros(numbers)
    distributed.barrier()
    start = time.process_time()
    for _ in range(times):
        distributed.all_reduce(tensor)
    return (time.process_time() - start) / times


def run(rank: int, ranks: int, share: str, folder: str) -> None:
    """Steps of one process, each with an update and inversions."""
    torch.set_num_threads(1)
    small = large = 0.0
    torch.manual_seed(0)
    layers = [part for m in LOAD.layers for part in (nn.Linear(m.inputs, m.outputs), nn.Tanh())]
    model: nn.Module = nn.Sequential(*layers[:-1])
    if ranks > 1:
        store = f"file://{folder}/store"
        distributed.init_process_group("gloo", store, timedelta(seconds=240), world_size=ranks, rank=rank)
        small, large = measure_sum(10, 100), measure_sum(2**20, 10)
        model = DistributedDataParallel(model)
    # while the other processes do the same: they share caches, memory and cores
    rates = measure_rates()
    opt = ng.kfac(model, nn.CrossEntropyLoss(), update_every=1, invert_every=1, measure=False, share=share)
    x, y = torch.randn(LOAD.batch, 512), torch.randint(0, 512, (LOAD.batch,))
    start, before = 0.0, dict[str, int]()
    for step in range(WARM + STEPS):
        if step == WARM:
            start, before = time.process_time(), dict(ng.report_sharing(opt).sent_bytes)
        opt.zero_grad()
        opt.loss(model(x), y).backward()
        opt.step()
    seconds = (time.process_time() - start) / STEPS
    report = ng.report_sharing(opt)
    grown = {kind: (size - before.get(kind, 0)) // STEPS for kind, size in report.sent_bytes.items()}
    torch.save(vars(ProcessCost(seconds, vars(report), grown, small, large, rates)), f"{folder}/{rank}.pt")
    if ranks > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def start(ranks: int, share: str) -> list[ProcessCost]:
    """What every process found."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run, (ranks, share, folder), nprocs=ranks, start_method="spawn")  # type: ignore[attr-defined]
        return [ProcessCost(**torch.load(Path(folder) / f"{rank}.pt", weights_only=False)) for rank in range(ranks)]


def compare() -> None:
    """A row for each number of processes."""
    torch.set_num_threads(1)
    alone = start(1, "speed")[0]
    inversions, rate = alone.report["all_inversions"], 1 / alone.rates["inverse"]
    kernels = replace(Machine(gemm=float("inf"), weight=4), **alone.rates)
    rest = alone.seconds - predict(LOAD, kernels, 1, "speed", update_every=1, invert_every=1).seconds
    print(f"{LOAD.size / 1e6:.1f} million parameters; {1e3 * alone.seconds:.0f} ms a step of one process,")
    print(
        f"of which {1e3 * rate * inversions:.0f} ms are inversions ({rate * 1e12:.0f} ps for each of n^3 in a kernel)."
    )
    print("| processes | share | processor ms, predicted | measured | inversions | state MB | update MB | step MB |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks, share in itertools.product((2, 4), ("speed", "memory")):
        runs = start(ranks, share)
        small, large = (sum(getattr(run, kind) for run in runs) / ranks for kind in ("small", "large"))
        rates = {kind: sum(run.rates[kind] for run in runs) / ranks for kind in alone.rates}
        machine = replace(
            kernels,
            **rates,
            near=2 * 2**22 * (ranks - 1) / ranks / (large - small),
            latency=small / (ranks - 1).bit_length(),
            node=ranks,
            fixed=rest,
        )
        predicted = predict(LOAD, machine, ranks, share, update_every=1, invert_every=1)
        seconds = max(run.seconds for run in runs)
        reports = [run.report for run in runs]
        work = max(report["inversions"] for report in reports) / inversions
        state = max(report["state_bytes"] for report in reports)
        update = runs[0].grown.get("statistics", 0) + runs[0].grown.get("inverses", 0)
        step = runs[0].grown.get("directions", 0)
        pairs = [(predicted.work, work, 1.0), (predicted.state, state, 1e6), (predicted.update_bytes, update, 1e6)]
        pairs.append((predicted.step_bytes, step, 1e6))
        cells = [f"{a / unit:.4g} / {b / unit:.4g}" for a, b, unit in pairs]
        print(
            f"| {ranks} | {share} | {1e3 * predicted.seconds:.0f} | {1e3 * seconds:.0f} | {' | '.join(cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    compare()
