"""Physics-informed networks by Gauss-Newton beside Adam: equations with known solutions, a diffusion to be found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, vmap

import natgrad as ng
from natgrad.residuals import HardConstraint, Periodic, draw_where_large
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive
from natgrad_lab.experiments.training import follow_clock
from natgrad_lab.figures import fill_lines, take_columns
from natgrad_lab.words import span

Points = dict[str, Any]
Box = tuple[tuple[float, float], tuple[float, float]]
SQUARE: Box = ((0.0, 1.0), (0.0, 1.0))
WIDE: Box = ((-1.0, 1.0), (0.0, 1.0))
VISCOSITY = 0.01 / math.pi
ROWS = 100  # intervals of time at whose ends the solution of Allen and Cahn's equation is kept
GRID = 51
CANDIDATES = 6  # draws that are the pool of which points are taken where residuals are large
EVERY = {"ng.residuals": 20, "Adam": 200}  # steps between such points: about as often per second


@dataclass(frozen=True)
class PinnSettings(StudySettings):
    """What `--set` can change."""

    seconds: float = 6.0  # of CPU time per method
    width: int = 32  # of each hidden layer
    depth: int = 1  # hidden layers
    adam: float = 0.01  # on a cosine to zero

    def __post_init__(self) -> None:
        check_positive(self, "seconds", "adam")
        check_counts(self, "width", "depth")


@dataclass(frozen=True)
class LayerSettings(PinnSettings):
    """`PinnSettings` for thin layers, which take a deeper network and longer."""

    seconds: float = 20.0
    width: int = 20
    depth: int = 3


@dataclass(frozen=True)
class EquationProblem:
    """An equation with its conditions."""

    terms: Mapping[str, Callable[..., Tensor]]  # for `ng.residuals`
    draw: Callable[[torch.Generator], Points]  # points of every term
    solution: Callable[[Tensor], Tensor]  # points (b, 2) -> values (b,)
    axes: tuple[str, str]  # names of the two coordinates
    coefficient: float | None = None  # the true value of a number to be found
    box: Box = SQUARE
    first: Callable[[], nn.Module] | None = None  # module of the network, and how many features it makes
    features: int = 2
    wrap: Callable[[nn.Module], nn.Module] | None = None  # what makes conditions hold by construction
    adaptive: str = ""  # the term whose points are drawn anew from time to time where its residual is large

    def unknowns(self, seed: int, width: int, depth: int = 1) -> dict[str, Any]:
        """A network with tanh, and the coefficient, from a wrong value, where there is one."""
        sizes = (self.features, *[width] * depth, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())][:-1]
            net: nn.Module = nn.Sequential(*([self.first()] if self.first else []), *layers).double()
        unknowns: dict[str, Any] = {"u": self.wrap(net) if self.wrap else net}
        if self.coefficient is not None:
            unknowns["k"] = nn.Parameter(torch.ones((), dtype=torch.float64))
        return unknowns


def solve(make: Callable[[], EquationProblem], method: str, run: PieceRun) -> Numbers:
    """Relative error against CPU seconds and steps; solution and error field on a grid at the end."""
    s: PinnSettings = run.settings
    problem, generator = make(), torch.Generator().manual_seed(run.seed)
    unknowns = problem.unknowns(run.seed, s.width, s.depth)
    points = draw_points(problem, unknowns, generator, EVERY[method])
    ticks = [torch.linspace(*side, GRID, dtype=torch.float64) for side in problem.box]
    x = torch.stack(torch.meshgrid(*ticks, indexing="xy"), -1).view(-1, 2)  # row by row
    exact = problem.solution(x)
    training = METHODS[method](problem, unknowns, s, points)
    look = lambda: (relative_error(unknowns, x, exact),)  # noqa: E731
    curve = follow_clock(run, s.seconds, 60, lambda share: next(training), look)
    with torch.no_grad():
        u = unknowns["u"](x).squeeze(1)
    fields = {"solution": u.view(GRID, GRID).tolist(), "error": (u - exact).view(GRID, GRID).tolist()}
    coefficient = {"k": float(unknowns["k"].detach())} if "k" in unknowns else {}
    return {"curve": curve, "steps": curve[-1][1]} | fields | coefficient


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
    terms = [evaluate_term(problem, unknowns, name, points[name]) for name in problem.terms]
    return torch.stack([term.square().sum(1).mean() for term in terms]).sum()


def evaluate_term(problem: EquationProblem, unknowns: dict[str, Any], name: str, points: Any) -> Tensor:
    """The residuals of a term, (b, m), by torch.func alone."""
    net, params, term = unknowns["u"], dict(unknowns["u"].named_parameters()), problem.terms[name]
    given = [unknowns["k"]] if "k" in unknowns else []

    def residual(*point: Tensor) -> Tensor:
        field = lambda y: functional_call(net, params, (y.unsqueeze(0),)).squeeze(0)  # noqa: E731
        return term(field, *given, *point).reshape(-1)

    return vmap(residual)(*(points if isinstance(points, tuple) else (points,)))


def draw_points(
    problem: EquationProblem, unknowns: dict[str, Any], generator: torch.Generator, every: int
) -> Iterator[Points]:
    """The points of step after step: the same; of an adaptive term others after so many steps."""
    points = problem.draw(generator)
    while True:
        for _ in range(every):
            yield points
        if problem.adaptive:
            name = problem.adaptive
            pool = torch.cat([problem.draw(generator)[name] for _ in range(CANDIDATES)])
            with torch.no_grad():
                residuals = evaluate_term(problem, unknowns, name, pool)
            points = points | {name: draw_where_large(pool, residuals, len(points[name]), generator=generator)}


def relative_error(unknowns: dict[str, Any], x: Tensor, exact: Tensor) -> float:
    """|u - exact| / |exact| at points x."""
    with torch.no_grad():
        return float((unknowns["u"](x).squeeze(1) - exact).norm() / exact.norm())


def tell(summary: str, make: Callable[[], EquationProblem], findings: Findings) -> Story:
    """One section, of the methods that are finished."""
    s, methods, problem = findings.settings, findings.collect(METHODS), make()
    points = "points drawn anew where residuals are large" if problem.adaptive else "the same points"
    method = (
        f"A network {'-'.join(map(str, (2, *[s.width] * s.depth, 1)))} with tanh in double precision, {s.seconds:g} "
        f"CPU seconds of one thread for each method, {points}. The error is relative, in L2, on a grid. "
        f"ng.residuals has no setting; Adam's rate {s.adam:g} falls on a cosine to zero."
    )
    ends = {name: [run["curve"][-1][2] for run in runs] for name, runs in methods.items()}
    lead = f"Relative error at the end: {', '.join(f'{name} {median(errors):.1e}' for name, errors in ends.items())}."
    if not methods:
        return Story(summary, lead, method, ())
    known = problem.coefficient is not None
    rows = []
    for name, runs in methods.items():
        coefficient = (f"{median(run['k'] for run in runs):.8f}",) if known else ()
        rows.append((name, span(ends[name], "{:.1e}"), f"{median(run['steps'] for run in runs):,}", *coefficient))
    title = "At the end: median, least and largest over seeds"
    title += f"; the coefficient is {problem.coefficient}" if known else ""
    table = Table(title, ("", "relative error", "steps", *(("coefficient",) if known else ())), tuple(rows))
    lines = take_columns(methods, 0, 2)
    axis = {"xlabel": "CPU seconds", "ylabel": "relative error", "yscale": "log"}
    curves = Picture("error-seconds", "Error against CPU seconds, a line per seed", fill_lines(lines, axis))
    size = (8.0, 3.3 * max(1, len(methods)))
    fields = Picture("fields", "The solution and its error, first seed", _fields(methods, problem), size)
    return Story(summary, lead, method, (Section("Errors", "", (table,), (curves, fields)),))


def _fields(methods: dict[str, list[Numbers]], problem: EquationProblem) -> Callable[[Figure], None]:
    names, (across, upward) = problem.axes, problem.box

    def fill(figure: Figure) -> None:
        grid = figure.subplots(len(methods), 2, squeeze=False)
        for row, (method, runs) in zip(grid, methods.items(), strict=True):
            for axes, key, title in zip(row, ("solution", "error"), ("u", "u - exact"), strict=True):
                values = np.array(runs[0][key])
                most = float(np.abs(values).max()) or 1.0
                shades = {"cmap": "viridis"} if key == "solution" else {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
                image = axes.imshow(values, origin="lower", extent=(*across, *upward), aspect="auto", **shades)
                bar = figure.colorbar(image, ax=axes, shrink=0.85)
                bar.ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
                axes.set(xlabel=names[0], ylabel=names[1], xticks=across, yticks=upward)
                axes.set_title(f"{method}: {title}", fontsize=10)

    return fill


# Differential equations on a rectangle with known solutions, as terms of `ng.residuals`


def solve_burgers(x: Tensor, nodes: int = 1001) -> Tensor:
    """u(x, t), (...,), from -sin(pi x) by Cole and Hopf's formula, by quadrature. x: (..., 2)."""
    s = torch.linspace(-12, 12, nodes, dtype=x.dtype, device=x.device)
    y = x[..., :1] - s * (4 * VISCOSITY * x[..., 1:]).sqrt()
    weights = torch.softmax(-torch.cos(math.pi * y) / (2 * math.pi * VISCOSITY) - s.square(), -1)
    return -(weights * torch.sin(math.pi * y)).sum(-1)


@lru_cache
def split_allen_cahn(modes: int = 512, steps: int = 4000) -> Tensor:
    """Fourier coefficients of u at the times 0, 1 / ROWS, ..., 1, by Strang's splitting: an error of O(1 / steps^2)."""
    x = -1 + 2 * torch.arange(modes, dtype=torch.float64) / modes
    dt, waves = 1 / steps, math.pi * torch.arange(modes // 2 + 1, dtype=torch.float64)
    diffuse, u = torch.exp(-1e-4 * waves**2 * dt / 2), x**2 * torch.cos(math.pi * x)
    rows = [torch.fft.rfft(u)]
    for step in range(1, steps + 1):
        u = torch.fft.irfft(diffuse * torch.fft.rfft(u), modes)
        u = u / torch.sqrt(u**2 + (1 - u**2) * math.exp(-10 * dt))  # u' = 5 u - 5 u^3
        u = torch.fft.irfft(diffuse * torch.fft.rfft(u), modes)
        if step % (steps // ROWS) == 0:
            rows.append(torch.fft.rfft(u))
    return torch.stack(rows) / modes


def solve_allen_cahn(x: Tensor) -> Tensor:
    """u(x, t), (b,), from x^2 cos(pi x), periodic. x: (b, 2), its times multiples of 1 / ROWS."""
    rows = split_allen_cahn()[(x[:, 1] * ROWS).round().long()]
    waves = math.pi * torch.arange(rows.shape[1], dtype=x.dtype)
    turned = torch.exp(1j * waves * (x[:, :1] + 1))
    twice = torch.full_like(waves, 2.0)
    twice[0] = twice[-1] = 1.0  # the others stand for two coefficients
    return (twice * rows * turned).real.sum(1)


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
