"""`ng.ang` with its defaults beside tuned Adam on energies that its defaults were not all chosen on: held-out loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import natgrad as ng
from benchmarks import energies
from benchmarks.kept_results import keep_result

STEPS, BATCH = 300, 50
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
HEADS = ("untrained", "Adam at its best rate", "ng.ang", "lowest of ng.ang")
KNOWN = Path("build/benchmarks/ang.json")
"""What was raced already, by model, data and method: an interrupted run goes on from here. Delete it to begin anew."""

Build = Callable[[energies.EnergyTask, dict[str, Tensor]], Any]


def race(name: str, which: int, build: Build, steps: int = STEPS) -> list[float]:
    """Held-out loss (a fifth of the rows) before and after every tenth part of so many steps; NaN from a failure on."""
    task = energies.make(name, which)
    cut = len(task.data) // 5
    held_out, rows = task.data[:cut], task.data[cut:]
    params = {key: p.clone().requires_grad_() for key, p in task.params.items()} or ng.trainable(task.log_p)
    opt, g = build(task, params), energies.generator(7)
    found = [value(task, params, held_out)]
    for step in range(1, steps + 1):
        opt.zero_grad()
        x = rows[torch.randint(0, len(rows), (BATCH,), generator=g)]
        try:
            ng.score_matching_loss(task.log_p, params, x).backward()
            opt.step()
        except (ValueError, RuntimeError):  # losses or gradients that are not finite
            return found + [math.nan] * (11 - len(found))
        if step % (steps // 10) == 0:
            found.append(value(task, params, held_out))
    return found


def value(task: energies.EnergyTask, params: dict[str, Tensor], x: Tensor) -> float:
    return float(ng.score_matching_loss(task.log_p, params, x).detach())


def adam(rate: float) -> Build:
    return lambda task, params: torch.optim.Adam(list(params.values()), lr=rate)


def ours(task: energies.EnergyTask, params: dict[str, Tensor]) -> ng.NaturalGradient:
    return ng.ang(params, ng.score_metric(task.log_p))


def figures(steps: int = STEPS) -> Iterator[tuple[str, ...]]:
    """A row per model and set of data."""
    for name in energies.MODELS:
        for which in range(3):
            ends = {rate: recall_race(name, which, f"adam {rate:g}", adam(rate), steps) for rate in RATES}
            best = min(RATES, key=lambda rate: last(ends[rate]))
            own = recall_race(name, which, "ang", ours, steps)
            lowest = min(v for v in own if not math.isnan(v))
            theirs = f"{ends[best][-1]:.4g} ({best:g})"
            yield f"{name} {which}", f"{own[0]:.4g}", theirs, f"{own[-1]:.4g}", f"{lowest:.4g}"


def recall_race(name: str, which: int, method: str, build: Build, steps: int) -> list[float]:
    """`race`, or what it said in an earlier run."""
    return keep_result(KNOWN, f"{name} {which} {method} {steps}", lambda: race(name, which, build, steps))


def last(losses: list[float]) -> float:
    return math.inf if math.isnan(losses[-1]) else losses[-1]
