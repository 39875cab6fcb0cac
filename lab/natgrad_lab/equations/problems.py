"""Differential equations on the unit square with known solutions, as terms of `ng.residuals`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng

Points = dict[str, Any]


@dataclass(frozen=True)
class EquationProblem:
    """An equation with its conditions.

    terms: for `ng.residuals`. draw: a generator -> points of every term. solution: points (b, 2) -> values (b,).
    axes: names of the two coordinates. coefficient: the true value of a number to be found, None where there is none.
    """

    terms: Mapping[str, Callable[..., Tensor]]
    draw: Callable[[torch.Generator], Points]
    solution: Callable[[Tensor], Tensor]
    axes: tuple[str, str]
    coefficient: float | None = None

    def unknowns(self, seed: int, width: int) -> dict[str, Any]:
        """A network of one hidden layer with tanh, and the coefficient, from a wrong value, where there is one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
        found: dict[str, Any] = {"u": net}
        if self.coefficient is not None:
            found["k"] = nn.Parameter(torch.ones((), dtype=torch.float64))
        return found


def uniform(count: int, generator: torch.Generator) -> Tensor:
    """Points of the unit square."""
    return torch.rand(count, 2, generator=generator, dtype=torch.float64)


def on_edges(count: int, sides: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Points of some edges of the unit square, as many on each. 0: left, 1: right, 2: bottom, 3: top."""
    x = uniform(count, generator)
    side = torch.tensor(sides)[torch.arange(count) % len(sides)]
    x[torch.arange(count), side // 2] = (side % 2).double()
    return x


def poisson() -> EquationProblem:
    """-Laplace u = 2 pi^2 sin(pi x) sin(pi y), u = 0 on the edges."""

    def exact(x: Tensor) -> Tensor:
        return torch.sin(math.pi * x).prod(-1)

    return EquationProblem(
        {"inside": lambda u, x: ng.laplacian(u, x) + 2 * math.pi**2 * exact(x), "boundary": lambda u, x: u(x)},
        lambda g: {"inside": uniform(400, g), "boundary": on_edges(120, (0, 1, 2, 3), g)},
        exact,
        ("x", "y"),
    )


def heat() -> EquationProblem:
    """u_t = u_xx / 4 from u = sin(pi x), u = 0 at both ends."""

    def exact(x: Tensor) -> Tensor:
        return torch.exp(-(math.pi**2) * x[..., 1] / 4) * torch.sin(math.pi * x[..., 0])

    return EquationProblem(
        {
            "inside": lambda u, x: ng.time_derivative(u, x) - ng.laplacian(u, x, dims=[0]) / 4,
            "conditions": lambda u, x: u(x) - exact(x),
        },
        lambda g: {"inside": uniform(400, g), "conditions": on_edges(120, (0, 1, 2), g)},
        exact,
        ("x", "t"),
    )


def inverse() -> EquationProblem:
    """The same with an unknown k in place of 1 / 4, from 100 measured values of u inside."""
    forward = heat()
    k = 0.25

    def draw(g: torch.Generator) -> Points:
        sensors = uniform(100, g)
        return forward.draw(g) | {"data": (sensors, forward.solution(sensors))}

    return EquationProblem(
        {
            "inside": lambda u, k, x: ng.time_derivative(u, x) - k * ng.laplacian(u, x, dims=[0]),
            "conditions": lambda u, k, x: u(x) - forward.solution(x),
            "data": lambda u, k, x, y: u(x) - y,
        },
        draw,
        forward.solution,
        forward.axes,
        k,
    )
