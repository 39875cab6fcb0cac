"""Physics-informed networks by Gauss-Newton beside Adam: Poisson's equation, heat, and a diffusion to be found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

import natgrad as ng
from natgrad_lab.equations import pinn_page
from natgrad_lab.equations.problems import EquationProblem, heat, inverse, poisson
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.study import Findings, Numbers, Piece, Run, Study

GRID = 51


@dataclass(frozen=True)
class PinnSettings:
    """What `--set` can change."""

    seconds: float = 6.0  # of CPU time per method
    width: int = 32  # of the hidden layer
    redraw: bool = False  # other points at every step
    adam: float = 0.01  # on a cosine to zero
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("seconds", "adam"):
            if not getattr(self, name) > 0:
                raise LabError(f"{name} is {getattr(self, name)}, expected a positive number")
        if self.width < 1:
            raise LabError(f"width is {self.width}, expected at least 1")


def by_residuals(
    problem: EquationProblem, unknowns: dict[str, Any], s: PinnSettings, draw: Callable[[], Any]
) -> Iterator[None]:
    """`ng.residuals` as it comes."""
    opt = ng.residuals(unknowns, problem.terms)
    while True:
        opt.step(**draw())
        yield


def by_adam(
    problem: EquationProblem, unknowns: dict[str, Any], s: PinnSettings, draw: Callable[[], Any]
) -> Iterator[None]:
    """Adam on the same loss, its rate on a cosine to zero over the seconds."""
    net = unknowns["u"]
    parameters = [*net.parameters(), *([unknowns["k"]] if "k" in unknowns else [])]
    opt, began = torch.optim.Adam(parameters, s.adam), time.process_time()
    while True:
        share = min(1.0, (time.process_time() - began) / s.seconds)
        opt.param_groups[0]["lr"] = s.adam * (1 + math.cos(math.pi * share)) / 2
        opt.zero_grad()
        mean_squares(problem, unknowns, draw()).backward()
        opt.step()
        yield


def mean_squares(problem: EquationProblem, unknowns: dict[str, Any], points: Any) -> Tensor:
    """The loss by torch.func alone: the sum of the terms' mean squares."""
    net, params = unknowns["u"], dict(unknowns["u"].named_parameters())
    given = [unknowns["k"]] if "k" in unknowns else []
    total = torch.zeros((), dtype=torch.float64)
    for name, term in problem.terms.items():
        chosen = points[name] if isinstance(points[name], tuple) else (points[name],)

        def one(*point: Tensor, term: Callable[..., Tensor] = term) -> Tensor:
            field = lambda y: functional_call(net, params, (y.unsqueeze(0),)).squeeze(0)  # noqa: E731
            return term(field, *given, *point).reshape(-1)

        total = total + vmap(one)(*chosen).square().sum(1).mean()
    return total


METHODS = {"ng.residuals": by_residuals, "Adam": by_adam}


def solve(make: Callable[[], EquationProblem], method: str, run: Run) -> Numbers:
    """Relative error against CPU seconds and steps; solution and error field on a grid at the end."""
    s: PinnSettings = run.settings
    problem, generator = make(), torch.Generator().manual_seed(run.seed)
    unknowns = problem.unknowns(run.seed, s.width)
    fixed = problem.draw(generator)
    draw = (lambda: problem.draw(generator)) if s.redraw else (lambda: fixed)
    spent, steps, looks = 0.0, 0, 1
    curve = [(0.0, 0, relative_error(problem, unknowns))]
    training = METHODS[method](problem, unknowns, s, draw)
    while spent < s.seconds:
        run.advance(spent / s.seconds)
        began = time.process_time()
        next(training)
        spent, steps = spent + time.process_time() - began, steps + 1
        if spent >= s.seconds * (looks / 60) or spent >= s.seconds:
            looks += 1
            curve.append((spent, steps, relative_error(problem, unknowns)))
    x = grid()
    with torch.no_grad():
        found = unknowns["u"](x).squeeze(1)
    exact = problem.solution(x)
    numbers: Numbers = {
        "curve": curve,
        "steps": steps,
        "solution": found.view(GRID, GRID).tolist(),
        "error": (found - exact).view(GRID, GRID).tolist(),
    }
    return numbers | ({"k": float(unknowns["k"].detach())} if "k" in unknowns else {})


def grid() -> Tensor:
    """Points of the unit square, row by row, the first coordinate running fastest."""
    ticks = torch.linspace(0, 1, GRID, dtype=torch.float64)
    return torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), -1).view(-1, 2)


def relative_error(problem: EquationProblem, unknowns: dict[str, Any]) -> float:
    """|u - exact| / |exact| on the grid."""
    exact = problem.solution(grid())
    with torch.no_grad():
        return float((unknowns["u"](grid()).squeeze(1) - exact).norm() / exact.norm())


def pieces(make: Callable[[], EquationProblem], s: PinnSettings) -> tuple[Piece, ...]:
    """One per method."""
    return tuple(Piece(method, method, partial(solve, make, method)) for method in METHODS)


def make_study(name: str, make: Callable[[], EquationProblem], summary: str) -> Study:
    """The study of one problem."""

    def tell(findings: Findings) -> Any:
        return pinn_page.tell(findings, summary, make().axes, make().coefficient, tuple(METHODS))

    return Study(name=name, summary=summary, settings=PinnSettings, pieces=partial(pieces, make), tell=tell, seeds=3)


POISSON = make_study("pinn_poisson", poisson, "Poisson's equation on a square by a network: ng.residuals beside Adam")
HEAT = make_study("pinn_heat", heat, "the heat equation in one dimension and time: ng.residuals beside Adam")
INVERSE = make_study("pinn_inverse", inverse, "the heat equation's diffusion found from data: ng.residuals beside Adam")
