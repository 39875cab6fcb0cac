"""Physics-informed networks by Gauss-Newton beside Adam: equations with known solutions, a diffusion to be found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import functional_call, vmap

import natgrad as ng
from natgrad.residuals import draw_where_large
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
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import check_counts, check_positive
from natgrad_lab.figures import fill_lines
from natgrad_lab.words import span

GRID = 51
CANDIDATES = 6  # draws that are the pool of which points are taken where residuals are large
EVERY = {"ng.residuals": 20, "Adam": 200}  # steps between such points: about as often per second


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
        check_positive(self, "seconds", "adam")
        check_counts(self, "width", "depth")


@dataclass(frozen=True)
class LayerSettings(PinnSettings):
    """`PinnSettings` for thin layers, which take a deeper network and longer."""

    seconds: float = 20.0
    width: int = 20
    depth: int = 3


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
    fields = {"solution": found.view(GRID, GRID).tolist(), "error": (found - exact).view(GRID, GRID).tolist()}
    coefficient = {"k": float(unknowns["k"].detach())} if "k" in unknowns else {}
    return {"curve": curve, "steps": steps} | fields | coefficient


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


METHODS = {"ng.residuals": by_residuals, "Adam": by_adam}


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


def lay_grid(box: Box) -> Tensor:
    """Points of the rectangle, row by row, the first coordinate running fastest."""
    ticks = [torch.linspace(*side, GRID, dtype=torch.float64) for side in box]
    return torch.stack(torch.meshgrid(*ticks, indexing="xy"), -1).view(-1, 2)


def relative_error(unknowns: dict[str, Any], x: Tensor, exact: Tensor) -> float:
    """|u - exact| / |exact| at points x."""
    with torch.no_grad():
        return float((unknowns["u"](x).squeeze(1) - exact).norm() / exact.norm())


def tell(summary: str, make: Callable[[], EquationProblem], findings: Findings) -> Story:
    """One section, of the methods that are finished."""
    s, told, problem = findings.settings, findings.collect(METHODS), make()
    points = "points drawn anew where residuals are large" if problem.adaptive else "the same points"
    points = "the same points, drawn anew at every step" if s.redraw else points
    method = (
        f"A network {'-'.join(map(str, (2, *[s.width] * s.depth, 1)))} with tanh in double precision, {s.seconds:g} "
        f"CPU seconds of one thread for each method, {points}. The error is relative, in L2, on a grid. "
        f"ng.residuals has no setting; Adam's rate {s.adam:g} falls on a cosine to zero."
    )
    ends = {name: [one["curve"][-1][2] for one in found] for name, found in told.items()}
    lead = ", ".join(f"{name} {median(errors):.1e}" for name, errors in ends.items())
    return Story(
        summary, f"Relative error at the end: {lead}.", method, (_section(told, ends, problem),) if told else ()
    )


def _section(told: dict[str, list[Numbers]], ends: dict[str, list[float]], problem: EquationProblem) -> Section:
    known = problem.coefficient is not None
    rows = []
    for name, found in told.items():
        coefficient = (f"{median(one['k'] for one in found):.8f}",) if known else ()
        rows.append((name, span(ends[name], "{:.1e}"), f"{median(one['steps'] for one in found):,}", *coefficient))
    title = "At the end: median, least and largest over seeds"
    title += f"; the coefficient is {problem.coefficient}" if known else ""
    table = Table(title, ("", "relative error", "steps", *(("coefficient",) if known else ())), tuple(rows))
    lines = {name: [np.array(one["curve"])[:, [0, 2]].T for one in found] for name, found in told.items()}
    axis = {"xlabel": "CPU seconds", "ylabel": "relative error", "yscale": "log"}
    curves = Picture("error-seconds", "Error against CPU seconds, a line per seed", fill_lines(lines, axis))
    size = (8.0, 3.3 * max(1, len(told)))
    fields = Picture("fields", "The solution and its error, first seed", _fields(told, problem), size)
    return Section("Errors", "", (table,), (curves, fields))


def _fields(told: dict[str, list[Numbers]], problem: EquationProblem) -> Callable[[Figure], None]:
    names, (across, upward) = problem.axes, problem.box

    def fill(figure: Figure) -> None:
        grid = figure.subplots(len(told), 2, squeeze=False)
        for row, (method, found) in zip(grid, told.items(), strict=True):
            for axes, key, title in zip(row, ("solution", "error"), ("u", "u - exact"), strict=True):
                values = np.array(found[0][key])
                most = float(np.abs(values).max()) or 1.0
                shades = {"cmap": "viridis"} if key == "solution" else {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
                image = axes.imshow(values, origin="lower", extent=(*across, *upward), aspect="auto", **shades)
                bar = figure.colorbar(image, ax=axes, shrink=0.85)
                bar.ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
                axes.set(xlabel=names[0], ylabel=names[1], xticks=across, yticks=upward)
                axes.set_title(f"{method}: {title}", fontsize=10)

    return fill


def solve_by_both(name: str, make: Callable[[], EquationProblem], equation: str, thin: bool = False) -> Experiment:
    """The experiment of one problem. thin: whether it has thin layers."""
    summary = f"{equation}: ng.residuals beside Adam"
    pieces = tuple(Piece(method, method, partial(solve, make, method)) for method in METHODS)
    return Experiment(
        *(f"pinn_{name}", summary, LayerSettings if thin else PinnSettings, lambda settings: pieces),
        partial(tell, summary, make),
        minutes=2.5 if thin else 1,
        quick={"seeds": 1},
    )


POISSON = solve_by_both("poisson", poisson, "Poisson's equation on a square by a network")
HEAT = solve_by_both("heat", heat, "the heat equation in one dimension and time")
HELMHOLTZ = solve_by_both("helmholtz", helmholtz, "Helmholtz's equation on a square, k = 10")
BURGERS = solve_by_both("burgers", burgers, "Burgers' equation with a shock", thin=True)
ALLEN_CAHN = solve_by_both("allen_cahn", allen_cahn, "Allen and Cahn's equation, with thin layers", thin=True)
INVERSE = solve_by_both("inverse", inverse, "the heat equation's diffusion found from data")
