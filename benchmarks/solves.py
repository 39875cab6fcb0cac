"""A whole damped solve of a small residual net with many rows, in multiples of one gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import natgrad as ng
from benchmarks.timing import peak_memory, ratios


def report(repeats: int, rows: int = 1000) -> list[tuple[str, str, str]]:
    """Net 2-64-64-1 on `rows` points: sample space, the dense matrix, ten CG steps."""
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x, y = torch.rand(rows, 2), torch.rand(rows, 1)
    metric, params = ng.fisher(model, ng.Gaussian()), ng.trainable(model)
    leaves = list(params.values())

    def gradient() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((model(x) - y).square().mean(), leaves)

    flat = ng.Space(params).flatten(dict(zip(params, gradient(), strict=True)))

    def solve(solver: ng.Solver) -> Callable[[], object]:
        return lambda: ng.natural_gradient(metric.at(params, x), flat, solver=solver, damping=1e-3)

    works = {
        "sample space, layer by layer": solve(ng.SampleSpace()),
        "dense matrix and Cholesky": solve(ng.Direct()),
        "ten CG steps": solve(ng.CG(rtol=0, max_steps=10)),
    }
    times = ratios(gradient, works, repeats)
    base = peak_memory(gradient)
    return [(name, str(times[name]), f"{peak_memory(thing) / base:.2f}") for name, thing in works.items()]
