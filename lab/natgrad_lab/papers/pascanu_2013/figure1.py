"""Four methods on the error surface of an autoencoder of one unit: Pascanu & Bengio 2013, Fig. 1.

The rates and dampings are the paper's. Data and starting points are not given there: these are settings, and both
readings of the ambiguous sign are worked out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import natgrad as ng
from natgrad.ground.linalg import eigh, solve_or_nan
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive
from natgrad_lab.figures import DASHES, INK, PALETTE, fill_axes, put_legend_below
from natgrad_lab.words import short

Params = dict[str, Tensor]
FAMILY = ng.Gaussian(std=0.5**0.5)  # -log p is the squared error itself, up to a constant
RATES = {"gradient descent": 0.1, "natural gradient": 0.5, "covariance": 1.0, "Newton": 1.0}
DAMPINGS = {"natural gradient": 0.01, "covariance": 1.0, "Newton": 1.0}
METHODS = tuple(RATES)
FAR = 50.0  # a path that leaves this distance has diverged
SIGNS = {"printed": -1.0, "other": 1.0}


@dataclass(frozen=True)
class AutoencoderUnitSettings(StudySettings):
    """What `--set` can change."""

    points: int = 20  # inputs, at equal quantiles of a normal distribution; not given in the paper
    mean: float = 1.0  # of the inputs; not given in the paper, chosen so that observation one shows at [3]
    std: float = 0.2  # of the inputs; not given in the paper, chosen with the mean
    steps: int = 100  # of each method
    b1: float = 1.0  # the starting point [1]; not given in the paper
    w1: float = 4.0  # its weight
    b3: float = 3.5  # the starting point [3]; not given in the paper
    w3: float = -5.0  # its weight
    later: int = 3  # steps of the natural gradient from [1] to [2] and from [3] to [4]; not given in the paper
    continued: int = 10_000  # more steps of gradient descent, to see where it was going
    window: float = 6.0  # b and w from -window to window
    lattice: int = 25  # starting points per axis for the counts

    def __post_init__(self) -> None:
        check_counts(self, "points", "steps", "continued", "lattice", least=2)
        check_positive(self, "std", "window")
        check_counts(self, "later", most=self.steps)

    @property
    def starts(self) -> dict[str, tuple[float, float]]:
        """The starting points (b, w), by the paper's numbers."""
        return {"1": (self.b1, self.w1), "3": (self.b3, self.w3)}

    def unit(self, reading: str) -> Unit:
        """The autoencoder on the data, in float64."""
        ranks = (torch.arange(self.points, dtype=torch.float64) + 0.5) / self.points
        x = self.mean + self.std * torch.special.ndtri(ranks)
        return Unit(x[:, None].to(self.device), SIGNS[reading])


def paths(run: PieceRun, reading: str) -> Numbers:
    """Every method's path from both starting points: {"1": {method: {...}}, "3": ...}."""
    s: AutoencoderUnitSettings = run.settings
    unit, methods = s.unit(reading), (*METHODS, "Newton, |H|")
    numbers: Numbers = {}
    for number, (name, start) in enumerate(s.starts.items()):
        numbers[name] = {}
        for place, method in enumerate(methods):
            run.advance((number * len(methods) + place) / (4 * len(methods)))
            numbers[name][method] = path(unit, start, method, s.steps)
    descents = [ways["gradient descent"] for ways in numbers.values()]
    for descent, goal in zip(descents, goals(run, unit, [ways["points"][-1] for ways in descents]), strict=True):
        descent["goal"] = goal
    return numbers


def goals(run: PieceRun, unit: Unit, ends: list[list[float]]) -> list[Numbers]:
    """Where gradient descent comes from these points (b, w) with many more steps."""
    at = torch.tensor(ends, dtype=torch.float64, device=unit.x.device)
    for number in range(run.settings.continued):
        if number % 100 == 0:
            run.advance(0.5 + 0.5 * number / run.settings.continued)
        at = at - at_many(unit, at, "gradient descent")
    return [{"point": a.tolist(), "error": unit.error(point(a)).item(), "end": ending(unit, a)} for a in at]


def path(unit: Unit, start: tuple[float, float], method: str, steps: int) -> Numbers:
    """Points (b, w), errors, length in KL (sum of sqrt(2 KL) from step to step), and what lies at the end."""
    at = torch.tensor(start, dtype=torch.float64, device=unit.x.device)
    points, errors, length = [at.tolist()], [unit.error(point(at)).item()], 0.0
    for _ in range(steps):
        new = at - step(unit, at, method)
        if not bool(torch.isfinite(new).all()) or float(new.abs().max()) > FAR:
            return {"points": points, "errors": errors, "length": length, "end": "diverged"}
        length += math.sqrt(2 * unit.divergence(point(at), point(new)).item())
        at = new
        points.append(at.tolist())
        errors.append(unit.error(point(at)).item())
    return {"points": points, "errors": errors, "length": length, "end": ending(unit, at)}


def ending(unit: Unit, at: Tensor) -> str:
    """minimum, saddle or maximum where the gradient has vanished; else still moving."""
    if float(gradient(unit, at).norm()) > 1e-3:
        return "still moving"
    low, high = eigh(hessian(unit, at))[0].tolist()
    return "minimum" if low >= 0 else "saddle" if high > 0 else "maximum"


def surfaces(run: PieceRun, reading: str) -> Numbers:
    """The error over the window, and at [1] to [4] the KL with the four steps from there."""
    s: AutoencoderUnitSettings = run.settings
    unit, ticks = s.unit(reading), torch.linspace(-s.window, s.window, 81, dtype=torch.float64)
    error = over(lambda at: unit.error(point(at)), ticks, ticks)
    travelled = {name: ways["natural gradient"]["points"] for name, ways in run.earlier[f"paths-{reading}"].items()}
    where = {}
    for name, points in travelled.items():
        where[name] = points[0]
        where[str(int(name) + 1)] = points[min(s.later, len(points) - 1)]
    return {
        "ticks": ticks.tolist(),
        "error": round_numbers(error),
        "around": {name: around(unit, torch.tensor(at, dtype=torch.float64)) for name, at in where.items()},
    }


def around(unit: Unit, at: Tensor) -> Numbers:
    """The four steps from theta = (b, w), and KL(p_theta, p_theta+delta) in a window that holds three of them."""
    steps = {method: (-step(unit, at, method)).tolist() for method in METHODS}
    reach = 1.3 * sorted(max(abs(c) for c in taken) for taken in steps.values())[-2]
    ticks = torch.linspace(-reach, reach, 41, dtype=torch.float64)
    kl = over(lambda delta: unit.divergence(point(at), point(at + delta)), ticks, ticks)
    return {"at": at.tolist(), "ticks": ticks.tolist(), "kl": round_numbers(kl), "steps": steps}


def over(function: Callable[[Tensor], Tensor], b: Tensor, w: Tensor) -> Tensor:
    """function((b, w)) on a lattice: rows for w, columns for b."""
    grid = torch.stack(torch.meshgrid(b, w, indexing="xy"), -1)
    return torch.func.vmap(torch.func.vmap(function))(grid)


def round_numbers(values: Tensor) -> list[list[float]]:
    """Five digits, which is plenty for a picture."""
    return [[float(f"{value:.5g}") for value in row] for row in values.tolist()]


def starts(run: PieceRun, reading: str) -> Numbers:
    """How often the paper's two observations hold over a lattice of starting points, and where the paths end."""
    s: AutoencoderUnitSettings = run.settings
    unit, ticks = s.unit(reading), torch.linspace(-s.window, s.window, s.lattice, dtype=torch.float64)
    at = torch.cartesian_prod(ticks, ticks)
    length = {method: at_many(unit, at, method).norm(dim=1) for method in METHODS}
    gd = length["gradient descent"]
    shorter = (length["natural gradient"] < gd) & (length["Newton"] > gd)
    ends = {method: travel(run, unit, at, method, n / len(METHODS)) for n, method in enumerate(METHODS)}
    error = {method: torch.func.vmap(lambda a: unit.error(point(a)))(end) for method, end in ends.items()}
    best = torch.stack(list(error.values())).nan_to_num(torch.inf).amin(0)
    ours, theirs = error["natural gradient"], error["gradient descent"]
    separate = (ends["natural gradient"] - ends["gradient descent"]).norm(dim=1) > 1
    other = separate & ((ours / theirs).log().abs() > math.log(1.2))
    return {
        "starts": len(at),
        "shorter": shorter.double().mean().item(),
        "apart": separate.double().mean().item(),
        "other error": other.double().mean().item(),
        "both": (shorter & other).double().mean().item(),
        "methods": {
            method: {
                "error": error[method].nan_to_num(torch.inf).median().item(),
                "best": (error[method] <= 1.01 * best).double().mean().item(),
                "diverged": (~torch.isfinite(ends[method]).all(1)).double().mean().item(),
                "saddle": saddles(unit, ends[method]),
            }
            for method in METHODS
        },
    }


def travel(run: PieceRun, unit: Unit, at: Tensor, method: str, begun: float) -> Tensor:
    """Where the paths from all points end; NaN where they diverge."""
    for number in range(run.settings.steps):
        run.advance(begun + number / run.settings.steps / len(METHODS))
        at = at - at_many(unit, at, method)
        at = torch.where((at.abs() > FAR).any(1, keepdim=True), torch.nan, at)
    return at


def saddles(unit: Unit, at: Tensor) -> float:
    """The share of points without gradient at which the Hessian is indefinite."""
    at = at[torch.isfinite(at).all(1)]
    if not len(at):
        return 0.0
    still = torch.func.vmap(lambda a: gradient(unit, a))(at).norm(dim=1) < 1e-3
    curved = torch.func.vmap(torch.func.hessian(lambda a: unit.error(point(a))))(at)
    low, high = eigh(curved)[0].unbind(1)
    return (still & (low < 0) & (high > 0)).double().mean().item()


# The unit: its error, its steps by four methods through the metrics; `at_many` has them in closed form, for whole maps


@dataclass(frozen=True)
class Unit:
    """y = w sigmoid(w x + b) + sign b for inputs x (n, 1); the error is the mean of (x - y)^2.

    sign: -1 is the paper's (x - w sigmoid(w x + b) + b)^2 as printed, 1 the other reading, with x - (w sigmoid + b).
    The two are mirror images: the one at (b, w) with data x is the other at (b, -w) with data -x.
    """

    x: Tensor
    sign: float

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return params["w"] * torch.sigmoid(params["w"] * x + params["b"]) + self.sign * params["b"]

    def error(self, params: Params) -> Tensor:
        """The mean squared error, a scalar."""
        return (self.x - self(params, self.x)).square().mean()

    def divergence(self, params: Params, other: Params) -> Tensor:
        """KL(p_theta, p_other), a mean over the data in nats."""
        return FAMILY.kl(self(params, self.x), self(other, self.x)).mean()


def point(at: Tensor) -> Params:
    """(b, w) as named parameters."""
    return {"b": at[0], "w": at[1]}


def gradient(unit: Unit, at: Tensor) -> Tensor:
    """d error / d (b, w), shape (2,)."""
    return torch.func.grad(lambda a: unit.error(point(a)))(at)


def hessian(unit: Unit, at: Tensor) -> Tensor:
    """The Hessian of the error, (2, 2)."""
    return ng.hessian(unit, FAMILY).at(point(at), (unit.x, unit.x)).dense()


def _operator(unit: Unit, at: Tensor, method: str) -> ng.Operator:
    if method == "natural gradient":
        return ng.fisher(unit, FAMILY).at(point(at), unit.x)
    metric = ng.covariance(unit, FAMILY, centred=True) if method == "covariance" else ng.hessian(unit, FAMILY)
    return metric.at(point(at), (unit.x, unit.x))


def step(unit: Unit, at: Tensor, method: str) -> Tensor:
    """What a method takes off (b, w), with the paper's rates and dampings (section 8.4); the 2 x 2 system is exact.

    "Newton, |H|" takes the absolute values of the Hessian's eigenvalues, so that saddles do not attract it.
    """
    g = gradient(unit, at)
    if method == "gradient descent":
        return RATES[method] * g
    plain = method.removesuffix(", |H|")
    solver = ng.Direct(absolute=plain != method)
    operator = _operator(unit, at, plain)
    return RATES[plain] * ng.natural_gradient(operator, g, solver=solver, damping=DAMPINGS[plain]).value


def at_many(unit: Unit, at: Tensor, method: str) -> Tensor:
    """`step` at many points (k, 2) at once, from the definitions."""
    return torch.func.vmap(lambda a: _take_closed_step(unit, a, method))(at)


def _take_closed_step(unit: Unit, at: Tensor, method: str) -> Tensor:
    g = gradient(unit, at)
    if method == "gradient descent":
        return RATES[method] * g
    matrix = CLOSED[method](unit, at) + DAMPINGS[method] * torch.eye(2, dtype=at.dtype)
    return RATES[method] * solve_or_nan(matrix, g)


def _fisher(unit: Unit, at: Tensor) -> Tensor:
    slopes = torch.func.jacfwd(lambda a: unit(point(a), unit.x)[:, 0])(at)  # J (n, 2)
    return slopes.T @ slopes / (len(unit.x) * FAMILY.std**2)


def _covariance(unit: Unit, at: Tensor) -> Tensor:
    each = torch.func.jacfwd(lambda a: (unit.x - unit(point(a), unit.x))[:, 0].square())(at)  # g_i (n, 2)
    centred = each - each.mean(0)
    return centred.T @ centred / len(unit.x)


CLOSED: dict[str, Callable[[Unit, Tensor], Tensor]] = {
    "natural gradient": _fisher,
    "covariance": _covariance,
    "Newton": lambda unit, at: torch.func.hessian(lambda a: unit.error(point(a)))(at),
}


def pieces(settings: AutoencoderUnitSettings) -> tuple[Piece, ...]:
    """Paths, surfaces and counts, for both readings."""
    return tuple(
        Piece(f"{name}-{reading}", f"{title}, {reading} sign", lambda run, w=work, r=reading: w(run, r), False)
        for reading in SIGNS
        for name, title, work in (
            ("paths", "Paths", paths),
            ("surfaces", "Surfaces", surfaces),
            ("starts", "Many starting points", starts),
        )
    )


# The page: surfaces and paths as the paper draws them, and what shows of its claims

# as in the paper: purple, gray, orange, blue
MARKS = {"gradient descent": "o", "natural gradient": "s", "covariance": "^", "Newton": "D"}
COLOURS = {"gradient descent": PALETTE[3], "natural gradient": INK, "covariance": PALETTE[0], "Newton": PALETTE[1]}
LEVELS = "#8a939d"  # of contours: seen on white and in the dark, paler than any path
LABEL_DISTANCE = 1.1  # from a point to the middle of its label, in units of (b, w)
TITLES = {
    "printed": "As printed: (x - w sigmoid(w x + b) + b)²",
    "other": "The other reading: (x - (w sigmoid(w x + b) + b))²",
}
DATA = (  # the search: means -4 to 4, deviations .1 to 2, 441 starting points each
    "Data and starting points are not given in the paper. Ours come from a search over 136 normal distributions for a "
    "point [3] at which its first observation shows and the two paths end apart: "
)


def tell(findings: Findings) -> Story:
    """Sections for the readings of the sign that are finished."""
    read = {r: findings.by_seed(*(f"{piece}-{r}" for piece in ("paths", "surfaces", "starts"))) for r in TITLES}
    finished = {reading: numbers[0] for reading, numbers in read.items() if numbers}
    s = findings.settings
    x = f"{s.points} inputs at equal quantiles of a normal distribution of mean {s.mean:g} and deviation {s.std:g}"
    method = (
        f"{s.steps} steps of every method from two starting points, [1] = ({s.b1:g}, {s.w1:g}) and [3] = ({s.b3:g}, "
        f"{s.w3:g}) in (b, w), with the paper's rates (gradient descent 0.1, natural gradient 0.5, covariance 1, "
        "Newton none) and dampings (0.01 for the natural gradient, 1 for the others), the 2 x 2 systems solved "
        f"exactly. {DATA}{x}. The likelihood is a Gaussian whose -log p is the squared error. The two readings of the "
        "sign are mirror images: the one at (b, w) with data x is the other at (b, -w) with data -x. They are "
        "shown on the same data and from the same points."
    )
    sections = tuple(_section(reading, *numbers, settings=s) for reading, numbers in finished.items())
    return Story("Four paths on one error surface (Fig. 1)", _lead(finished), method, sections)


def _lead(finished: dict[str, Any]) -> str:
    first = sum(observed_shorter(surfaces) for _, surfaces, _ in finished.values())
    second = sum(observed_elsewhere(paths["3"]) for paths, _, _ in finished.values())
    return (
        f"At [3] the natural gradient's step is shorter than gradient descent's while Newton's is longer in {first} of "
        f"{len(finished)} readings; from [3] it ends elsewhere than gradient descent in {second} of {len(finished)}."
    )


def length(vector: list[float]) -> float:
    """Of a step in (b, w)."""
    return math.hypot(*vector)


def observed_shorter(surfaces: Numbers) -> bool:
    """The paper's first observation: at [3] natural < gradient descent < Newton in length."""
    taken = surfaces["around"]["3"]["steps"]
    return length(taken["natural gradient"]) < length(taken["gradient descent"]) < length(taken["Newton"])


def observed_elsewhere(paths: Numbers) -> bool:
    """The paper's second observation: the two paths end more than 1 apart, with errors more than a fifth apart."""
    ours, theirs = paths["natural gradient"], paths["gradient descent"]
    distance = math.dist(ours["points"][-1], theirs["points"][-1])
    return distance > 1 and abs(math.log(ours["errors"][-1] / theirs["errors"][-1])) > math.log(1.2)


def steps_to_best(paths: Numbers) -> dict[str, int | None]:
    """Steps until the error is within 1 % of the lowest that any method ends with; None where it never is."""
    best = min(way["errors"][-1] for way in paths.values())
    reached = {m: [n for n, e in enumerate(way["errors"]) if e <= 1.01 * best] for m, way in paths.items()}
    return {method: steps[0] if steps else None for method, steps in reached.items()}


def _section(reading: str, paths: Numbers, surfaces: Numbers, starts: Numbers, settings: Any) -> Section:
    pictures = [Picture(f"figure1-{reading}", "Paths, and KL around four points", _map(paths, surfaces), (10.0, 5.3))]
    pictures += [
        Picture(f"error-{reading}-{name}", f"Error from [{name}]", _errors(ways)) for name, ways in paths.items()
    ]
    rows = tuple(
        (method, short(counts["error"]), *(f"{100 * counts[key]:.1f} %" for key in ("best", "diverged", "saddle")))
        for method, counts in starts["methods"].items()
    )
    heads = ("", "median error", "within 1 % of the best", "diverged", "ends in a saddle")
    tables = (
        *(_ends(name, ways) for name, ways in paths.items()),
        Table(f"From {starts['starts']} starting points on a lattice", heads, rows),
    )
    verdict = _verdict(paths, surfaces, starts, settings.continued)
    return Section(TITLES[reading], verdict, tables, tuple(pictures))


def _verdict(paths: Numbers, surfaces: Numbers, starts: Numbers, continued: int) -> str:
    taken = surfaces["around"]["3"]["steps"]
    said = ", ".join(f"{method} {length(step):.2g}" for method, step in taken.items())
    first = "shows" if observed_shorter(surfaces) else "does not show"
    turned = []
    for name in ("3", "4"):
        natural, plain = (surfaces["around"][name]["steps"][m] for m in ("natural gradient", "gradient descent"))
        cosine = float(np.dot(natural, plain)) / max(length(natural) * length(plain), 1e-300)
        turned.append(f"[{name}] {math.degrees(math.acos(max(-1.0, min(1.0, cosine)))):.0f}°")
    ours, theirs = (paths["3"][m] for m in ("natural gradient", "gradient descent"))
    second = "shows" if observed_elsewhere(paths["3"]) else "does not show"
    newton = " and ".join(f"[{name}]: {ways['Newton']['end']}" for name, ways in paths.items())
    many = starts["methods"]["Newton"]
    return (
        f"The first observation (at [3] the natural step is shorter than gradient descent's, Newton's longer) {first}: "
        f"lengths {said}. It holds at {starts['shorter']:.1%} of {starts['starts']} starting points. Natural and plain "
        f"direction differ by {' and '.join(turned)}. The second observation (another end than gradient descent from "
        f"[3]) {second}: error {short(ours['errors'][-1])} ({ours['end']}) against {short(theirs['errors'][-1])} "
        f"({theirs['end']}); the ends are apart from {starts['other error']:.0%} of the starting points, and both "
        f"observations hold for {starts['both']:.1%}. {_goal(ours, theirs['goal'], continued)} Newton's "
        f"method ends from {newton}; of all starting points {many['diverged']:.1%} diverge and {many['saddle']:.1%} "
        "end in a saddle."
    )


def _goal(ours: Numbers, goal: Numbers, steps: int) -> str:
    """Whether gradient descent was only late, or going elsewhere."""
    same = math.dist(ours["points"][-1], goal["point"]) < 0.1
    where = f"({goal['point'][0]:.2f}, {goal['point'][1]:.2f}), error {short(goal['error'])} ({goal['end']})"
    if same:
        return f"Continued, gradient descent comes to the natural gradient's end: {where}; it was only later."
    if goal["end"] == "still moving":
        return f"Continued for {steps:,} steps, gradient descent is still on its way, at {where}."
    return f"Continued, gradient descent comes to another end: {where}."


def _ends(name: str, paths: Numbers) -> Table:
    within = steps_to_best(paths)
    rows = tuple(
        (
            method,
            "({:.2f}, {:.2f})".format(*way["points"][-1]),
            short(way["errors"][-1]),
            "-" if within[method] is None else str(within[method]),
            short(way["length"]),
            way["end"],
        )
        for method, way in paths.items()
    )
    note = (
        "Length in KL: the sum of sqrt(2 KL) from step to step. Still moving: the gradient is above 1e-3. Newton, |H|: "
        "with the absolute values of the Hessian's eigenvalues, not in the paper."
    )
    heads = ("", "end (b, w)", "error", "steps to within 1 % of the best", "length in KL", "at the end")
    return Table(f"From [{name}]", heads, rows, note)


def _map(paths: Numbers, surfaces: Numbers) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        grid = figure.add_gridspec(2, 4)
        surface = figure.add_subplot(grid[:, :2])
        _surface(surface, paths, surfaces)
        put_legend_below(figure, surface, columns=len(MARKS))
        for place, name in enumerate(("1", "2", "3", "4")):
            _around(figure.add_subplot(grid[place // 2, 2 + place % 2]), name, surfaces["around"][name])

    return fill


def _surface(axes: Axes, paths: Numbers, surfaces: Numbers) -> None:
    ticks, error = np.array(surfaces["ticks"]), np.log10(np.array(surfaces["error"]) + 1e-6)
    low, high = np.percentile(error, 2), error.max()  # below, the lattice cuts the valley into beads
    axes.contour(
        ticks, ticks, error, np.linspace(low, high, 22), colors=LEVELS, linewidths=0.8, linestyles="solid", alpha=0.6
    )
    for ways in paths.values():
        for method, mark in MARKS.items():
            points = np.array(ways[method]["points"])
            colour = COLOURS[method]
            axes.plot(points[:, 0], points[:, 1], mark, color=colour, linestyle="none", markersize=3)
            for number in range(len(points) - 1):
                ends = points[number : number + 2]
                if np.abs(ends[1] - ends[0]).max() > 1e-3:
                    axes.plot(
                        ends[:, 0], ends[:, 1], "-", color=colour, linewidth=1.8, alpha=1.0 if number % 2 else 0.5
                    )
    drawn = np.concatenate([trace(ways[method]["points"]) for ways in paths.values() for method in MARKS])
    for name, place in surfaces["around"].items():
        # the place (b, w) around a point that is farthest from all paths and within the window, for a label
        angles = np.linspace(0.0, 2 * math.pi, 24, endpoint=False)
        around = np.array(place["at"]) + LABEL_DISTANCE * np.stack([np.cos(angles), np.sin(angles)], 1)
        around = around[(np.abs(around) < 0.95 * ticks[-1]).all(1)]
        gaps = np.linalg.norm(around[:, None] - drawn, axis=-1).min(1)
        b, w = around[gaps.argmax()].tolist()
        axes.annotate(
            f"[{name}]", place["at"], (b, w), color=INK, fontsize=11, ha="center",
            fontweight="bold", va="center", arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 0.8},
        )  # fmt: skip
    for method, mark in MARKS.items():
        axes.plot([], [], "-", marker=mark, markersize=4, color=COLOURS[method], linewidth=2, label=method)
    axes.set(xlim=(ticks[0], ticks[-1]), ylim=(ticks[0], ticks[-1]), xlabel="b", ylabel="w")
    axes.set_title("error, logarithmic", loc="left", fontsize=11)


def trace(points: list[list[float]]) -> np.ndarray:
    """Points along a path (b, w), fifty to a step, shape (k, 2)."""
    ends = np.array(points)
    shares = np.linspace(0.0, 1.0, 50)[:, None, None]
    return ((1 - shares) * ends[:-1] + shares * ends[1:]).reshape(-1, 2)


def _around(axes: Axes, name: str, place: Numbers) -> None:
    ticks, kl = np.array(place["ticks"]), np.sqrt(np.maximum(place["kl"], 0.0))  # the root is straight near 0
    levels = np.quantile(kl, (0.06, 0.12, 0.2, 0.3, 0.42, 0.55, 0.7, 0.85))  # below .06, beads
    axes.contour(ticks, ticks, kl, levels=np.unique(levels), colors=LEVELS, linewidths=0.9)
    for method, (b, w) in place["steps"].items():
        cut = min(1.0, 0.97 * ticks[-1] / max(abs(b), abs(w), 1e-300))  # the longest step may leave the window
        style = "->" if cut == 1.0 else "-"
        arrow = {"arrowstyle": style, "color": COLOURS[method], "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (cut * b, cut * w), (0, 0), arrowprops=arrow)
    axes.set_title(f"KL at [{name}]", loc="left", fontsize=10)
    axes.set(xlabel="Δb", ylabel="Δw")
    axes.locator_params(nbins=4)
    axes.tick_params(labelsize=9)


def _errors(paths: Numbers) -> Callable[[Figure], None]:
    def draw(axes: Axes) -> None:
        for (method, colour), dash in zip(COLOURS.items(), DASHES, strict=False):
            errors = np.maximum(paths[method]["errors"], 1e-12)
            axes.plot(errors, color=colour, linestyle=dash, linewidth=2, label=method)

    return fill_axes(draw, {"xlabel": "steps", "ylabel": "squared error", "yscale": "log"})


STUDY = Experiment(
    "pascanu_2013_figure1",
    "Four methods' paths on the error surface of a one-unit autoencoder (Fig. 1)",
    AutoencoderUnitSettings,
    pieces,
    tell,
    seeds=1,
    minutes=0.7,
)
