"""Normals moved by four metrics, and how far the kernelised Wasserstein metric is from the exact one.

Error: a normal with independent entries, where the Wasserstein metric is the identity in (mean, deviations). Descent:
x = mean + B z, the squared Wasserstein distance to another normal as loss, in badly scaled coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

import natgrad as ng
from natgrad.ground.linalg import eigh, invert_or_nan, solve_or_nan
from natgrad.metrics import RBF
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive
from natgrad_lab.figures import DASHES, INK, PALETTE, draw_band, fill_axes, put_legend_below, put_title

METHODS = ("gradient", "Wasserstein, E[J^T J]", "Wasserstein, kernelised", "Fisher")
SHOWN = {"Wasserstein, E[J^T J]": r"Wasserstein, $\mathrm{E}[J^\top J]$"}
SIZE = (5.0, 3.9)  # of a picture, in inches
LOWEST = 1e-8  # of the drawn shares of the first loss

DIMENSIONS, SAMPLES = (1, 2, 5), (128, 512, 2048)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DAMPING = 1e-8


@dataclass(frozen=True)
class ArbelSettings(StudySettings):
    """What `--set` can change."""

    draws: int = 20  # of the gradient and of the samples, per point of the error's table
    bandwidth: float = 5.0  # of the error's kernel, in deviations; a descent has the median distance
    regularization: float = 1e-10  # of the estimator's linear systems
    d: int = 2  # of the descent
    samples: int = 300  # per step of the descent
    condition: float = 30.0  # of the coordinates of the descent
    steps: int = 60  # of the descent, at each rate
    level: float = 1e-3  # of the loss, as a share of that at the start

    def __post_init__(self) -> None:
        check_counts(self, "draws", "d", "steps", "condition")
        check_counts(self, "samples", least=10)
        check_positive(self, "bandwidth", "regularization", "level")


def independent(params: dict[str, Tensor], z: Tensor) -> Tensor:
    """mean + deviations * z: its motion is a gradient field, so that E[J^T J] is the Wasserstein metric: I."""
    return params["mean"] + params["deviations"] * z


def errors(run: PieceRun) -> Numbers:
    """|d - g| / |g| of the kernelised natural gradient d for random gradients g, in every dimension."""
    s: ArbelSettings = run.settings
    numbers: Numbers = {}
    generator = torch.Generator().manual_seed(run.seed)
    for place, d in enumerate(DIMENSIONS):
        run.advance(place / len(DIMENSIONS))
        numbers[str(d)] = {str(n): [relative_error(s, d, n, generator) for _ in range(s.draws)] for n in SAMPLES}
    return numbers


def relative_error(s: ArbelSettings, d: int, n: int, generator: torch.Generator) -> float:
    """One draw of samples, basis and gradient; as many functions as the paper takes, d floor(sqrt(n))."""
    params = {"mean": torch.zeros(d, dtype=torch.float64), "deviations": torch.ones(d, dtype=torch.float64)}
    z = torch.randn(n, d, generator=generator, dtype=torch.float64)
    g = torch.randn(2 * d, generator=generator, dtype=torch.float64)
    options = {"basis": d * math.isqrt(n), "regularization": s.regularization, "generator": generator}
    metric = ng.transport_metric(independent, kernel=RBF(s.bandwidth), **options)  # pyright: ignore[reportArgumentType]
    step = ng.natural_gradient(metric.at(params, z), g, damping=DAMPING).value
    return float((step - g).norm() / g.norm())


@dataclass(frozen=True)
class ToyProblem:
    """A start, a target N(goal, spread) and coordinates xi with (mean, B) = turn @ xi."""

    start: Tensor  # xi, (d + d^2,)
    turn: Tensor
    goal: Tensor
    spread: Tensor

    @property
    def d(self) -> int:
        """Of the samples."""
        return len(self.goal)

    def parts(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """The mean (d,) and B (d, d)."""
        both = self.turn @ xi
        return both[: self.d], both[self.d :].view(self.d, self.d)

    def model(self, params: dict[str, Tensor], z: Tensor) -> Tensor:
        """x = mean + B z."""
        mean, B = self.parts(params["xi"])
        return mean + z @ B.mT

    def loss(self, xi: Tensor) -> Tensor:
        """The squared Wasserstein distance from N(mean, B B^T) to the target: |mean gap|^2 + tr(S + T) - 2 |T^1/2 B|_1.

        The last norm is the sum of singular values, tr (T^1/2 S T^1/2)^1/2.
        """
        mean, B = self.parts(xi)
        values, vectors = eigh(self.spread)
        half = (vectors * values.sqrt()) @ vectors.mT
        product = half @ B
        crossed = eigh(product @ product.mT)[0].clamp(min=1e-12).sqrt().sum()
        return (mean - self.goal).square().sum() + B.square().sum() + self.spread.trace() - 2 * crossed


def problem(d: int, condition: float, seed: int) -> ToyProblem:
    """A narrow normal three away from a broad, slanted one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = d + d * d
    left, right = (torch.linalg.qr(draw(size, size))[0] for _ in range(2))
    turn = left * torch.logspace(0, -math.log10(condition), size, dtype=torch.float64) @ right
    away = draw(d)
    slant = draw(d, d)
    spread = slant @ slant.mT / d + 0.3 * torch.eye(d, dtype=torch.float64)
    first = torch.cat([3 * away / away.norm(), (0.2 * torch.eye(d, dtype=torch.float64)).flatten()])
    return ToyProblem(solve_or_nan(turn, first), turn, torch.zeros(d, dtype=torch.float64), spread)


Direction = Callable[[ToyProblem, Tensor, Tensor, Tensor], Tensor]


def directions(s: ArbelSettings, generator: torch.Generator) -> dict[str, Direction]:
    """direction(problem, xi, gradient, z) by name."""
    kernel = {"kernel": RBF(), "basis": s.d * math.isqrt(s.samples), "generator": generator}

    def transport(task: ToyProblem, xi: Tensor, g: Tensor, z: Tensor, **kernelised: object) -> Tensor:
        metric = ng.transport_metric(task.model, **kernelised)  # pyright: ignore[reportArgumentType]
        return ng.natural_gradient(metric.at({"xi": xi}, z), g, damping=DAMPING).value

    return {
        METHODS[0]: lambda task, xi, g, z: g,
        METHODS[1]: lambda task, xi, g, z: transport(task, xi, g, z),
        METHODS[2]: lambda task, xi, g, z: transport(task, xi, g, z, **kernel),
        METHODS[3]: lambda task, xi, g, z: fisher_direction(task, xi, g),
    }


def fisher_direction(task: ToyProblem, xi: Tensor, g: Tensor) -> Tensor:
    """The natural gradient of N(mean, B B^T) by Fisher's metric: the Hessian of the KL divergence from xi."""
    with torch.no_grad():
        mean, B = task.parts(xi)
        precision = invert_or_nan(B @ B.mT)

    def divergence(other: Tensor) -> Tensor:  # KL(N(xi), N(other)) up to third order, symmetric: 1/2 d^T F d
        moved, changed = task.parts(other)
        gap, drift = moved - mean, precision @ (changed @ changed.mT - B @ B.mT)
        return 0.5 * gap @ precision @ gap + 0.25 * (drift * drift.mT).sum()

    hessian = torch.func.hessian(divergence)(xi.detach())
    return ng.natural_gradient(ng.operators.DenseOperator(hessian), g, damping=DAMPING).value


def descents(run: PieceRun) -> Numbers:
    """For each method the losses at its best rate, and the path of the mean."""
    s: ArbelSettings = run.settings
    task = problem(s.d, s.condition, run.seed)
    numbers: Numbers = {"goal": task.goal.tolist(), "spread": task.spread.tolist()}
    for place, name in enumerate(METHODS):
        tried = {}
        for number, rate in enumerate(RATES):
            run.advance((place + number / len(RATES)) / len(METHODS))
            tried[rate] = descend(s, task, name, rate, run.seed)
        best = min(tried, key=lambda rate: rank(tried[rate]["losses"], s))
        numbers[name] = tried[best] | {"rate": best, "reached": count_steps_to_level(tried[best]["losses"], s)}
    return numbers


def descend(s: ArbelSettings, task: ToyProblem, name: str, rate: float, seed: int) -> Numbers:
    """Losses and means of one run; it ends where the loss is not finite or far above the first."""
    generator = torch.Generator().manual_seed(seed)
    direction, xi = directions(s, generator)[name], task.start
    losses, means = [], []
    for _ in range(s.steps + 1):
        leaf = xi.clone().requires_grad_()
        loss = task.loss(leaf)
        losses.append(loss.item())
        means.append(task.parts(xi)[0].tolist())
        if not math.isfinite(losses[-1]) or losses[-1] > 10 * losses[0]:
            break
        (g,) = torch.autograd.grad(loss, leaf)
        z = torch.randn(s.samples, s.d, generator=generator, dtype=torch.float64)
        xi = xi - rate * direction(task, xi, g, z)
    return {"losses": losses, "means": means}


def count_steps_to_level(losses: list[float], s: ArbelSettings) -> int | None:
    """Steps until the loss is below its level, and stays finite."""
    below = [step for step, loss in enumerate(losses) if loss < s.level * losses[0]]
    return below[0] if below and len(losses) == s.steps + 1 else None


def rank(losses: list[float], s: ArbelSettings) -> tuple[float, float]:
    """Steps to the level, then the last loss; runs that broke off come last."""
    count = count_steps_to_level(losses, s)
    ended = len(losses) == s.steps + 1 and math.isfinite(losses[-1])
    return (math.inf if count is None else count, losses[-1] if ended else math.inf)


def tell(findings: Findings) -> Story:
    """A section per part that is finished."""
    s = findings.settings
    method = (
        f"Error: normals with independent entries, a kernel of bandwidth {s.bandwidth:g} deviations, d floor(sqrt(n)) "
        f"functions, regularization {s.regularization:g}, medians over {s.draws} draws of samples and gradient. "
        f"Descent: x = mean + B z in {s.d} dimensions, from a narrow normal three away from a broad and slanted one; "
        f"the loss is the squared Wasserstein distance, exact; the coordinates have condition {s.condition:g}; "
        f"{s.samples} new samples per step estimate the metric; the best of six rates each, {s.steps} steps."
    )
    sections = []
    if errors := findings.of("errors"):
        dimensions = errors[0]
        counts = list(next(iter(dimensions.values())))
        rows = tuple((f"d = {d}", *(f"{median(cells[n]):.3g}" for n in counts)) for d, cells in dimensions.items())
        table = Table("Relative error of the natural gradient", ("", *(f"{n} samples" for n in counts)), rows)
        first, last = (max(median(cells[n]) for cells in dimensions.values()) for n in (counts[0], counts[-1]))
        verdict = f"The largest error over the dimensions falls from {first:.2g} to {last:.2g}."
        sections.append(Section("Error", verdict, (table,), (_draw_errors(dimensions, counts),)))
    if runs := findings.of("descents"):
        sections.append(_descents(runs, s.level))
    lead = sections[-1].verdict if sections else "Nothing is finished yet."
    return Story("The kernelised Wasserstein metric on normals", lead, method, tuple(sections))


def _draw_errors(dimensions: Numbers, counts: list[str]) -> Picture:
    many = len(next(iter(dimensions.values()))[counts[0]])
    title = f"Kernelised metric on normals with d independent entries: medians and quartiles of {many} draws"

    def draw(axes: Axes) -> None:
        for place, (d, cells) in enumerate(dimensions.items()):
            low, middle, high = np.percentile([cells[n] for n in counts], [25, 50, 75], axis=1)
            look = {"color": PALETTE[place], "linestyle": DASHES[place], "marker": "os^"[place], "capsize": 3}
            x = [int(n) * 1.04 ** (place - 1) for n in counts]  # beside one another
            axes.errorbar(x, middle, yerr=(middle - low, high - middle), label=f"d = {d}", **look)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([int(n) for n in counts], counts)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()

    fill = fill_axes(draw, {"xlabel": "samples", "ylabel": "relative error"}, title, 3)
    return Picture("errors", "Error against samples", fill, SIZE)


def _descents(runs: list[Numbers], level: float) -> Section:
    rows = []
    for name in METHODS:
        steps = sorted(run[name]["reached"] for run in runs if run[name]["reached"] is not None)
        span = f"{median(steps):g} ({steps[0]} to {steps[-1]})" if steps else "never"
        if steps and len(steps) < len(runs):
            span += f", {len(steps)} of {len(runs)}"
        ends = [run[name]["losses"][-1] / run[name]["losses"][0] for run in runs]
        rates = sorted({run[name]["rate"] for run in runs})
        rows.append((name, span, f"{median(ends):.2g}", ", ".join(f"{rate:g}" for rate in rates)))
    heads = ("", f"steps to {level:g} of the first loss", "loss at the end, of the first", "rates")
    table = Table("At the best rate of each", heads, tuple(rows), f"Medians over {len(runs)} seeds, and ranges.")
    said = ", ".join(f"{name} {row[0]}" for name, *row in rows)
    return Section("Descent", f"Steps to the level: {said}.", (table,), (_curves(runs), _paths(runs[0])))


def _curves(runs: list[Numbers]) -> Picture:
    def draw(axes: Axes) -> None:
        for colour, dash, name in zip(PALETTE, DASHES, METHODS, strict=False):
            length = min(len(run[name]["losses"]) for run in runs)
            shares = [np.array(run[name]["losses"][:length]) / run[name]["losses"][0] for run in runs]
            style = {"color": colour, "linestyle": dash, "linewidth": 2}
            draw_band(axes, range(length), np.maximum(shares, LOWEST), SHOWN.get(name, name), style)

    title = f"Squared Wasserstein distance between normals, four metrics: median and range of {len(runs)} seeds"
    axis = {"xlabel": "steps", "ylabel": "loss, share of the first", "yscale": "log"}
    fill = fill_axes(draw, axis, f"{title} (drawn down to {LOWEST:g})")
    return Picture("losses", "Loss against steps", fill, SIZE)


def _paths(run: Numbers) -> Picture:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, dash, name in zip(PALETTE, DASHES, METHODS, strict=False):
            means = np.array(run[name]["means"])[:, :2]
            across, up = means[:, 0], means[:, 1] if means.shape[1] > 1 else np.zeros(len(means))
            look = {"color": colour, "linestyle": dash, "linewidth": 1.2, "marker": ".", "markersize": 3}
            axes.plot(across, up, label=SHOWN.get(name, name), **look)
        goal = [[value] for value in [*run["goal"], 0.0][:2]]
        axes.plot(*goal, marker="*", color=INK, linestyle="none", markersize=10, label="target")
        axes.set(xlabel="mean, first entry", ylabel="mean, second entry")
        put_title(figure, "Paths of the mean of a normal to its target under four metrics, a dot a step: first seed")
        put_legend_below(figure, axes)

    return Picture("paths", "Paths of the mean, first seed", fill, SIZE)


STUDY = Experiment(
    name="arbel_2020_toy",
    summary="the kernelised Wasserstein metric on normals: its error, and descents beside Fisher's metric",
    settings=ArbelSettings,
    pieces=lambda settings: (
        Piece("errors", "Error of the natural gradient", errors, repeated=False),
        Piece("descents", "Descents by four metrics", descents),
    ),
    tell=tell,
    seeds=5,
    minutes=2,
    quick={"seeds": 1, "draws": 5},
)
