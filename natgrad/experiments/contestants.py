"""The optimisers that the laboratory races, built by name from one point of a grid."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

import natgrad as ng
from natgrad.experiments.frame import Choice, Contestant


def natural_gradient(grid: Iterable[Choice]) -> Contestant:
    """Truncated Newton on the exact Fisher: `ng.hessian_free`.

    Choices: batch; metric, how many of the batch's examples the metric is taken on; damping, where Levenberg-Marquardt
    starts (its floor is a thousandth of that: damping has the units of the loss); products with the metric per step,
    at most.
    """

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        solver = ng.CG(rtol=1e-6, max_steps=int(choice["products"]), progress=5e-4)
        damping = ng.LevenbergMarquardt(start=choice["damping"], floor=choice["damping"] / 1000)
        return ng.hessian_free(model, criterion, solver=solver, damping=damping, metric_batch=int(choice["metric"]))

    return Contestant("natural gradient", tuple(grid), build)


def adam(grid: Iterable[Choice]) -> Contestant:
    """torch.optim.Adam with its own defaults. Choices: batch, lr."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=choice["lr"])

    return Contestant("Adam", tuple(grid), build)


def sgd(grid: Iterable[Choice], momentum: float = 0.9) -> Contestant:
    """torch.optim.SGD with heavy-ball momentum. Choices: batch, lr."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=choice["lr"], momentum=momentum)

    return Contestant("SGD-momentum", tuple(grid), build)


def grid(**axes: Iterable[float]) -> list[Choice]:
    """All combinations: grid(batch=(64, 256), lr=(.1,)) -> [{batch: 64, lr: .1}, {batch: 256, lr: .1}]."""
    choices: list[dict[str, float]] = [{}]
    for name, values in axes.items():
        choices = [{**choice, name: value} for choice in choices for value in values]
    return list(choices)
