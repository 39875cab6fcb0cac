"""Recorded trajectories: where each optimiser stands after some steps on a small problem with fixed seeds, in float64.

A change of the house must not move them. `python tests/shared/trajectories.py` writes the vectors anew, for a change
that is meant to change a step; the changelog then says which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

import natgrad as ng

VECTORS = Path(__file__).parents[1] / "vectors" / "trajectories.json"
STEPS = (1, 10, 50)
FEWER = (1, 10, 28)
"""From about the 25th step on, where gradients are mostly noise, `ng.kfac` multiplies round-off by ten in a step."""

Problem = Callable[[], Iterator[list[Tensor]]]


def flatten(params: Iterable[Tensor]) -> list[float]:
    """All entries, one after the other."""
    return torch.cat([p.detach().reshape(-1) for p in params]).tolist()


def record(problem: Problem, steps: Iterable[int]) -> dict[str, list[float]]:
    """step -> the parameters after it, entry by entry."""
    torch.manual_seed(0)
    wanted, found = set(steps), {}
    torch.set_default_dtype(torch.float64)  # from the start on: drawn in float32, starts differ between processors
    try:
        for step, params in enumerate(problem(), start=1):
            if step in wanted:
                found[str(step)] = flatten(params)
            if step == max(wanted):
                break
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def convolutional() -> nn.Module:
    """A convolution, a norm, a linear layer: what `kfac` has blocks for, and a shift that it has none for."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(1, 2, 3), nn.LayerNorm(8), nn.Linear(8, 3)
            self.shift = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.norm(self.conv(x).flatten(1)) + self.shift))

    return Net()


def train_structured(recipe: Callable[..., Any], **options: Any) -> Problem:
    """A drop-in on images of 4 by 4, with sampled labels."""

    def run() -> Iterator[list[Tensor]]:
        model = convolutional()
        x, y = torch.randn(300, 1, 4, 4), torch.randint(3, (300,))
        optimizer = recipe(model, nn.CrossEntropyLoss(), **options)
        while True:
            optimizer.zero_grad()
            optimizer.loss(model(x), y).backward()
            optimizer.step()
            yield list(model.parameters())

    return run


def train_matrix_free(recipe: Callable[..., Any], **options: Any) -> Problem:
    """A matrix-free optimiser on a regression."""

    def run() -> Iterator[list[Tensor]]:
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        x, y = torch.randn(100, 3), torch.randn(100, 2)
        optimizer = recipe(model, nn.MSELoss(), **options)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = optimizer.loss(model(x), y)
            loss.backward()
            return loss

        while True:
            optimizer.step(closure)
            yield list(model.parameters())

    return run


def train_ang() -> Iterator[list[Tensor]]:
    """Score matching of light-tailed independent variables: locations and scales."""
    data = torch.randn(600, 3) * torch.tensor([0.5, 1.0, 2.0]) + 0.3
    params = {"location": torch.zeros(3, requires_grad=True), "scale": torch.zeros(3, requires_grad=True)}

    def log_p(params: dict[str, Tensor], x: Tensor) -> Tensor:
        z = x - params["location"]
        return -(params["scale"].exp() * z.square() + 0.05 * z**4).sum()

    optimizer = ng.ang(params, ng.score_metric(log_p))
    while True:
        for batch in data.split(200):
            optimizer.zero_grad()
            ng.score_matching_loss(log_p, params, batch).backward()
            optimizer.step()
            yield list(params.values())


def train_policy() -> Iterator[list[Tensor]]:
    """TRPO on CartPole, an update a step."""
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    learner = ng.TRPO(policy, gymnasium.make("CartPole-v1"), batch=128, seed=0)
    while True:
        learner.learn(128, progress=False)
        yield list(policy.parameters())


def train_machine() -> Iterator[list[Tensor]]:
    """A Helmholtz machine by natural wake-sleep."""
    machine = ng.HelmholtzMachine([6, 4, 2])
    data = (torch.rand(40, 6) < 0.3).double()
    optimizer = ng.NaturalWakeSleep(machine, lr=0.1, samples=4)
    while True:
        for batch in data.split(20):
            optimizer.step(batch)
            yield list(machine.parameters())


ADAPTIVE = ng.LevenbergMarquardt(start=0.03, per="block")
PROBLEMS: dict[str, tuple[Problem, tuple[int, ...]]] = {
    "kfac": (train_structured(ng.kfac), FEWER),
    "kfac, Levenberg-Marquardt": (
        train_structured(ng.kfac, damping=ng.LevenbergMarquardt(start=0.03, per="block")),
        FEWER,
    ),
    "ekfac": (train_structured(ng.ekfac), FEWER),
    "unitwise": (train_structured(ng.unitwise), STEPS),
    "diagonal": (train_structured(ng.diagonal), STEPS),
    "online_ng": (train_structured(ng.online_ng), STEPS),
    "hessian_free": (train_matrix_free(ng.hessian_free), (1, 5)),
    "natgrad_cg": (train_matrix_free(ng.natgrad_cg, damping=0.2), (1, 10)),
    "ang": (train_ang, STEPS),
    "TRPO": (train_policy, (1, 4)),
    "wake-sleep": (train_machine, STEPS),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    VECTORS.write_text(json.dumps({name: record(*problem) for name, problem in PROBLEMS.items()}, indent=1) + "\n")
