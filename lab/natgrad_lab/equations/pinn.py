"""Physics-informed networks by Gauss-Newton beside Adam: equations with known solutions, a diffusion to be found."""

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
from natgrad.applications.residuals import draw_where_large
from natgrad_lab.equations import pinn_page
from natgrad_lab.equations.problems import (
    Box,
    EquationProblem,
    Points,
    allen_cahn,
    burgers,
    heat,
    helmholtz,
    inverse,
    poisson,
)
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun

GRID = 51
CANDIDATES = 6
"""How many draws are the pool of which points are taken where residuals are large."""
EVERY = {"ng.residuals": 20, "Adam": 200}
"""Steps between such points: about as often per second."""


@dataclass(frozen=True)
class PinnSettings:
    """What `--set` can change."""

    seconds: float = 6.0  # of CPU time per method
    width: int = 32  # of each hidden layer
    depth: int = 1  # hidden layers
    redraw: bool = False  # other points at every step
    adam: float = 0.01  # on a cosine to zero
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("seconds", "adam"):
            if not getattr(self, name) > 0:
                raise LabError(f"{name} is {getattr(self, name)}, expected a positive number")
        for name in ("width", "depth"):
            if getattr(self, name) < 1:
                raise LabError(f"{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True)
class LayerSettings(PinnSettings):
    """`PinnSettings` for thin layers, which take a deeper network and longer."""

    seconds: float = 20.0
    width: int = 20
    depth: int = 3


def by_residuals(
    problem: EquationProblem, unknowns: dict[str, Any], s: PinnSettings, points: Iterator[Points]
) -> Iterator[None]:
    """`ng.residuals` as it comes."""
    opt = ng.residuals(unknowns, problem.terms)
    for some in points:
        opt.step(**some)
        yield


def by_adam(
    problem: EquationProblem, unknowns: dict[str, Any], s: PinnSettings, points: Iterator[Points]
) -> Iterator[None]:
    """Adam on the same loss, its rate on a cosine to zero over the seconds."""
    net = unknowns["u"]
    parameters = [*net.parameters(), *([unknowns["k"]] if "k" in unknowns else [])]
    opt, began = torch.optim.Adam(parameters, s.adam), time.process_time()
    for some in points:
        share = min(1.0, (time.process_time() - began) / s.seconds)
        opt.param_groups[0]["lr"] = s.adam * (1 + math.cos(math.pi * share)) / 2
        opt.zero_grad()
        mean_squares(problem, unknowns, some).backward()
        opt.step()
        yield


def mean_squares(problem: EquationProblem, unknowns: dict[str, Any], points: Any) -> Tensor:
    """The loss by torch.func alone: the sum of the terms' mean squares."""
    total = torch.zeros((), dtype=torch.float64)
    for name in problem.terms:
        total = total + evaluate_term(problem, unknowns, name, points[name]).square().sum(1).mean()
    return total


def evaluate_term(problem: EquationProblem, unknowns: dict[str, Any], name: str, points: Any) -> Tensor:
    """The residuals of a term, (b, m), by torch.func alone."""
    net, params, term = unknowns["u"], dict(unknowns["u"].named_parameters()), problem.terms[name]
    given = [unknowns["k"]] if "k" in unknowns else []

    def one(*point: Tensor) -> Tensor:
        field = lambda y: functional_call(net, params, (y.unsqueeze(0),)).squeeze(0)  # noqa: E731
        return term(field, *given, *point).reshape(-1)

    return vmap(one)(*(points if isinstance(points, tuple) else (points,)))


def draw_points(
    problem: EquationProblem, unknowns: dict[str, Any], s: PinnSettings, generator: torch.Generator, every: int
) -> Iterator[Points]:
    """The points of step after step: the same, or others; of an adaptive term others after so many steps."""
    points = problem.draw(generator)
    while True:
        for _ in range(every):
            yield points
            if s.redraw:
                points = problem.draw(generator)
        if problem.adaptive and not s.redraw:
            name = problem.adaptive
            pool = torch.cat([problem.draw(generator)[name] for _ in range(CANDIDATES)])
            with torch.no_grad():
                residuals = evaluate_term(problem, unknowns, name, pool)
            points = points | {name: draw_where_large(pool, residuals, len(points[name]), generator=generator)}


METHODS = {"ng.residuals": by_residuals, "Adam": by_adam}


def solve(make: Callable[[], EquationProblem], method: str, run: PieceRun) -> Numbers:
    """Relative error against CPU seconds and steps; solution and error field on a grid at the end."""
    s: PinnSettings = run.settings
    problem, generator = make(), torch.Generator().manual_seed(run.seed)
    unknowns = problem.unknowns(run.seed, s.width, s.depth)
    points = draw_points(problem, unknowns, s, generator, EVERY[method])
    x = lay_grid(problem.box)
    exact = problem.solution(x)
    spent, steps, looks = 0.0, 0, 1
    curve = [(0.0, 0, relative_error(unknowns, x, exact))]
    training = METHODS[method](problem, unknowns, s, points)
    while spent < s.seconds:
        run.advance(spent / s.seconds)
        began = time.process_time()
        next(training)
        spent, steps = spent + time.process_time() - began, steps + 1
        if spent >= s.seconds * (looks / 60) or spent >= s.seconds:
            looks += 1
            curve.append((spent, steps, relative_error(unknowns, x, exact)))
    with torch.no_grad():
        found = unknowns["u"](x).squeeze(1)
    numbers: Numbers = {
        "curve": curve,
        "steps": steps,
        "solution": found.view(GRID, GRID).tolist(),
        "error": (found - exact).view(GRID, GRID).tolist(),
    }
    return numbers | ({"k": float(unknowns["k"].detach())} if "k" in unknowns else {})


def lay_grid(box: Box) -> Tensor:
    """Points of the rectangle, row by row, the first coordinate running fastest."""
    ticks = [torch.linspace(*side, GRID, dtype=torch.float64) for side in box]
    return torch.stack(torch.meshgrid(*ticks, indexing="xy"), -1).view(-1, 2)


def relative_error(unknowns: dict[str, Any], x: Tensor, exact: Tensor) -> float:
    """|u - exact| / |exact| at points x."""
    with torch.no_grad():
        return float((unknowns["u"](x).squeeze(1) - exact).norm() / exact.norm())


def pieces(make: Callable[[], EquationProblem], s: PinnSettings) -> tuple[Piece, ...]:
    """One per method."""
    return tuple(Piece(method, method, partial(solve, make, method)) for method in METHODS)


def make_study(
    name: str,
    make: Callable[[], EquationProblem],
    equation: str,
    settings: type[PinnSettings] = PinnSettings,
    minutes: float = 1,
) -> Experiment:
    """The study of one problem."""
    summary = f"{equation}: ng.residuals beside Adam"

    def tell(findings: Findings) -> Any:
        return pinn_page.tell(findings, summary, make(), tuple(METHODS))

    return Experiment(
        name=name,
        summary=summary,
        settings=settings,
        pieces=partial(pieces, make),
        tell=tell,
        minutes=minutes,
        quick={"seeds": 1},
    )


POISSON = make_study("pinn_poisson", poisson, "Poisson's equation on a square by a network")
HEAT = make_study("pinn_heat", heat, "the heat equation in one dimension and time")
HELMHOLTZ = make_study("pinn_helmholtz", helmholtz, "Helmholtz's equation on a square, k = 10")
BURGERS = make_study("pinn_burgers", burgers, "Burgers' equation with a shock", LayerSettings, 2.5)
ALLEN_CAHN = make_study(
    "pinn_allen_cahn", allen_cahn, "Allen and Cahn's equation, with thin layers", LayerSettings, 2.5
)
INVERSE = make_study("pinn_inverse", inverse, "the heat equation's diffusion found from data")
