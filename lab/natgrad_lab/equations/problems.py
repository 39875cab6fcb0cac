"""Differential equations on a rectangle with known solutions, as terms of `ng.residuals`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.residuals import HardConstraint, Periodic

VISCOSITY = 0.01 / math.pi
ROWS = 50
"""Intervals of time at whose ends the solution of Allen and Cahn's equation is kept."""


def solve_burgers(x: Tensor, nodes: int = 1001) -> Tensor:
    """u(x, t), (...,), from -sin(pi x) by Cole and Hopf's formula, by quadrature. x: (..., 2)."""
    s = torch.linspace(-12, 12, nodes, dtype=x.dtype, device=x.device)
    y = x[..., :1] - s * (4 * VISCOSITY * x[..., 1:]).sqrt()
    weights = torch.softmax(-torch.cos(math.pi * y) / (2 * math.pi * VISCOSITY) - s.square(), -1)
    return -(weights * torch.sin(math.pi * y)).sum(-1)


@lru_cache
def split_allen_cahn(modes: int = 512, steps: int = 4000) -> Tensor:
    """Fourier coefficients of u at the times 0, 1 / ROWS, ..., 1, (ROWS + 1, modes / 2 + 1).

    Strang's splitting: both parts of a step are exact, so that its error is O(1 / steps^2).
    """
    x = -1 + 2 * torch.arange(modes, dtype=torch.float64) / modes
    dt, waves = 1 / steps, math.pi * torch.arange(modes // 2 + 1)
    diffuse, u = torch.exp(-1e-4 * waves**2 * dt / 2), x**2 * torch.cos(math.pi * x)
    kept = [torch.fft.rfft(u)]
    for step in range(1, steps + 1):
        u = torch.fft.irfft(diffuse * torch.fft.rfft(u), modes)
        u = u / torch.sqrt(u**2 + (1 - u**2) * math.exp(-10 * dt))  # u' = 5 u - 5 u^3
        u = torch.fft.irfft(diffuse * torch.fft.rfft(u), modes)
        if step % (steps // ROWS) == 0:
            kept.append(torch.fft.rfft(u))
    return torch.stack(kept) / modes


def solve_allen_cahn(x: Tensor) -> Tensor:
    """u(x, t), (b,), from x^2 cos(pi x), periodic. x: (b, 2), its times multiples of 1 / ROWS."""
    found = split_allen_cahn()
    rows = found[(x[:, 1] * ROWS).round().long()]
    waves = math.pi * torch.arange(found.shape[1], dtype=x.dtype)
    turned = torch.exp(1j * waves * (x[:, :1] + 1))
    twice = torch.full_like(waves, 2.0)
    twice[0] = twice[-1] = 1.0  # the others stand for two coefficients
    return (twice * rows * turned).real.sum(1)


Points = dict[str, Any]
Box = tuple[tuple[float, float], tuple[float, float]]
SQUARE: Box = ((0.0, 1.0), (0.0, 1.0))
WIDE: Box = ((-1.0, 1.0), (0.0, 1.0))


@dataclass(frozen=True)
class EquationProblem:
    """An equation with its conditions.

    terms: for `ng.residuals`. draw: a generator -> points of every term. solution: points (b, 2) -> values (b,).
    axes: names of the two coordinates. coefficient: the true value of a number to be found, None where there is none.
    box: the rectangle. features: number of inputs of the network behind a first module, which `first` makes.
    wrap: what makes conditions hold by construction. adaptive: the term whose points are drawn anew from time to time
    where its residual is large; "": none.
    """

    terms: Mapping[str, Callable[..., Tensor]]
    draw: Callable[[torch.Generator], Points]
    solution: Callable[[Tensor], Tensor]
    axes: tuple[str, str]
    coefficient: float | None = None
    box: Box = SQUARE
    first: Callable[[], nn.Module] | None = None
    features: int = 2
    wrap: Callable[[nn.Module], nn.Module] | None = None
    adaptive: str = ""

    def unknowns(self, seed: int, width: int, depth: int = 1) -> dict[str, Any]:
        """A network with tanh, and the coefficient, from a wrong value, where there is one."""
        sizes = (self.features, *[width] * depth, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())][:-1]
            net: nn.Module = nn.Sequential(*([self.first()] if self.first else []), *layers).double()
        found: dict[str, Any] = {"u": self.wrap(net) if self.wrap else net}
        if self.coefficient is not None:
            found["k"] = nn.Parameter(torch.ones((), dtype=torch.float64))
        return found


def uniform(count: int, generator: torch.Generator) -> Tensor:
    """Points of the unit square."""
    return torch.rand(count, 2, generator=generator, dtype=torch.float64)


def widen(x: Tensor) -> Tensor:
    """From the unit square to (-1, 1) x (0, 1)."""
    return torch.stack([2 * x[:, 0] - 1, x[:, 1]], 1)


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


def helmholtz(k: float = 10.0) -> EquationProblem:
    """Laplace u + k^2 u = f with u = sin(pi x) sin(2 pi y), 0 on the edges."""

    def exact(x: Tensor) -> Tensor:
        return torch.sin(math.pi * x[..., 0]) * torch.sin(2 * math.pi * x[..., 1])

    def inside(u: Any, x: Tensor) -> Tensor:
        return ng.laplacian(u, x) + k**2 * u(x) - (k**2 - 5 * math.pi**2) * exact(x)

    return EquationProblem(
        {"inside": inside, "boundary": lambda u, x: u(x)},
        lambda g: {"inside": uniform(500, g), "boundary": on_edges(120, (0, 1, 2, 3), g)},
        exact,
        ("x", "y"),
    )


def burgers() -> EquationProblem:
    """u_t + u u_x = .01 / pi u_xx from -sin(pi x), 0 at both ends by construction: a shock at x = 0 from t = .32 on."""

    def start(x: Tensor) -> Tensor:
        return -torch.sin(math.pi * x[..., :1])  # 0 at both ends, too

    def inside(u: Any, x: Tensor) -> Tensor:
        carried = u(x) * ng.grad(u, x)[0]
        return ng.time_derivative(u, x) + carried - VISCOSITY * ng.laplacian(u, x, dims=[0])

    return EquationProblem(
        {"inside": inside},
        lambda g: {"inside": widen(uniform(1200, g))},
        solve_burgers,
        ("x", "t"),
        box=WIDE,
        wrap=lambda net: HardConstraint(net, lambda x: x[:, 1:] * (1 - x[:, :1] ** 2), start),
        adaptive="inside",
    )


def allen_cahn() -> EquationProblem:
    """u_t = .0001 u_xx + 5 u - 5 u^3 from x^2 cos(pi x), periodic in x; u = start + t net by construction."""

    def start(x: Tensor) -> Tensor:
        return x[..., :1] ** 2 * torch.cos(math.pi * x[..., :1])

    def inside(u: Any, x: Tensor) -> Tensor:
        return ng.time_derivative(u, x) - 1e-4 * ng.laplacian(u, x, dims=[0]) - 5 * (u(x) - u(x) ** 3)

    return EquationProblem(
        {"inside": inside},
        lambda g: {"inside": widen(uniform(1200, g))},
        solve_allen_cahn,
        ("x", "t"),
        box=WIDE,
        first=lambda: Periodic({0: 2.0}),
        features=3,
        wrap=lambda net: HardConstraint(net, lambda x: x[:, 1:], start),
        adaptive="inside",
    )
