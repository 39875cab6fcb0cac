"""Processor seconds to a training loss: the classifier of the step benchmark on Fashion-MNIST (needs the data)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

import natgrad as ng
from benchmarks.tables import write_spread
from benchmarks.training import classifier
from natgrad_lab.data import fashion_mnist
from natgrad_lab.experiments.contestants import JoinedOptimizers, Muon

GOAL, SECONDS, SEEDS = 0.25, 15.0, (0, 1, 2)
HEADS = (f"seconds to {GOAL}", f"loss after {SECONDS:.0f} s", "best test loss")
Make = Callable[[nn.Module, nn.Module], torch.optim.Optimizer]


def adam(rate: float) -> Make:
    return lambda model, criterion: torch.optim.Adam(model.parameters(), lr=rate)


def muon(rate: float) -> Make:
    """In float32, with Adam on the biases."""

    def make(model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
        matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == want] for want in (True, False))
        return JoinedOptimizers(Muon(matrices, rate), torch.optim.Adam(rest, lr=1e-3))

    return make


CONTESTANTS: dict[str, Make] = {
    "kfac": ng.kfac,
    "online_ng": ng.online_ng,
    "Adam, .0005": adam(5e-4),
    "Adam, .001": adam(1e-3),
    "Muon, .02": muon(0.02),
    "Muon, .05": muon(0.05),
}


def train(make: Make, seed: int) -> list[tuple[float, float, float]]:
    """Seconds, training loss, test loss, about once a second of SECONDS; batches of 512, evaluations do not count."""
    torch.manual_seed(seed)
    work, data = classifier(), fashion_mnist().flat()
    model = work.build()
    optimizer = make(model, work.criterion)
    loss_of = getattr(optimizer, "loss", work.criterion)
    spent, rows = 0.0, list[tuple[float, float, float]]()
    while spent < SECONDS:
        picked = torch.randint(0, len(data.train_x), (512,))
        start = time.process_time()
        optimizer.zero_grad()
        loss_of(model(data.train_x[picked]), data.train_y[picked]).backward()
        optimizer.step()
        spent += time.process_time() - start
        if spent >= len(rows) + 1:
            with torch.no_grad():
                parts = ((data.train_x, data.train_y), (data.test_x, data.test_y))
                train_loss, test_loss = (float(work.criterion(model(x[:5000]), y[:5000])) for x, y in parts)
            rows.append((spent, train_loss, test_loss))
    return rows


def report() -> list[tuple[str, ...]]:
    """Rows (optimizer, median and range over the seeds of each figure)."""
    rows = []
    for name, make in CONTESTANTS.items():
        runs = [train(make, seed) for seed in SEEDS]
        figures = (
            [next((seconds for seconds, loss, _ in run if loss <= GOAL), math.inf) for run in runs],
            [run[-1][1] for run in runs],
            [min(test for _, _, test in run) for run in runs],
        )
        rows.append((name, *(write_spread(values, ".3g") for values in figures)))
        print("  ".join(rows[-1]), flush=True)  # progress
    return rows
