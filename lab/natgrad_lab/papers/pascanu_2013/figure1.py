"""Four methods on the error surface of an autoencoder of one unit: Pascanu & Bengio 2013, Fig. 1.

The rates and dampings are the paper's. Data and starting points are not given there: these are settings, and both
readings of the ambiguous sign are worked out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.ground.linalg import eigh
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Numbers, Piece, PieceRun
from natgrad_lab.papers.pascanu_2013 import figure1_page
from natgrad_lab.papers.pascanu_2013.autoencoder_unit import RATES, Unit, at_many, gradient, hessian, point, step

METHODS = tuple(RATES)
FAR = 50.0  # a path that leaves this distance has diverged
SIGNS = {"printed": -1.0, "other": 1.0}


@dataclass(frozen=True)
class AutoencoderUnitSettings:
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
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("points", "steps", "continued", "lattice"):
            if getattr(self, name) < 2:
                raise LabError(f"{name} is {getattr(self, name)}, expected at least 2")
        for name in ("std", "window"):
            if not getattr(self, name) > 0:
                raise LabError(f"{name} is {getattr(self, name)}, expected a positive number")
        if not 1 <= self.later <= self.steps:
            raise LabError(f"later is {self.later}, expected 1 to {self.steps}, a step of the path")

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
    found: Numbers = {}
    for number, (name, start) in enumerate(s.starts.items()):
        found[name] = {}
        for place, method in enumerate(methods):
            run.advance((number * len(methods) + place) / (4 * len(methods)))
            found[name][method] = path(unit, start, method, s.steps)
    descents = [one["gradient descent"] for one in found.values()]
    for descent, goal in zip(descents, goals(run, unit, [one["points"][-1] for one in descents]), strict=True):
        descent["goal"] = goal
    return found


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
    travelled = {name: one["natural gradient"]["points"] for name, one in run.earlier[f"paths-{reading}"].items()}
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
    apart = (ends["natural gradient"] - ends["gradient descent"]).norm(dim=1) > 1
    other = apart & ((ours / theirs).log().abs() > math.log(1.2))
    return {
        "starts": len(at),
        "shorter": shorter.double().mean().item(),
        "apart": apart.double().mean().item(),
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


STUDY = Experiment(
    "pascanu_2013_figure1",
    "Four methods' paths on the error surface of a one-unit autoencoder (Fig. 1)",
    AutoencoderUnitSettings,
    pieces,
    figure1_page.tell,
    seeds=1,
    minutes=0.7,
)
