"""An energy network by denoising score matching: rings, a spiral and digits, with Kronecker factors beside Adam.

The score of the network is a module (`ng.Score`), so that denoising is a regression; samples are drawn by Langevin
dynamics down a ladder of noise levels that the network is not told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.densities import Energy
from natgrad.ground.linalg import eigh
from natgrad.rules import NoiseAware, SpectralDescent
from natgrad_lab.data import digits, mnist
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive, split_words
from natgrad_lab.experiments.training import follow_clock
from natgrad_lab.figures import INK, draw_images, fill_lines, take_columns

METHODS = ("K-FAC", "Adam")
DATA = {"rings": "three rings", "spiral": "a spiral", "digits": "the embedded digits", "mnist": "MNIST"}
LOSS, DISTANCE = 2, 3  # places in a curve's points

TASKS = ("rings", "spiral", "digits", "mnist")
GRID, HELD_OUT, SHOWN = 60, 1000, 40
STEPS = {"flat": 300, "images": 200}  # of the dynamics that draw samples
LAST = 0.001  # the smallest share of K-FAC's first learning rate


@dataclass(frozen=True)
class ScoreEnergySettings(StudySettings):
    """What `--set` can change."""

    tasks: str = "rings,spiral,digits"  # and mnist, where its data are
    seconds: float = 30.0  # of CPU time per method and task
    batch: int = 1000  # better than 250 for both methods
    width: int = 64  # of both hidden layers in two dimensions; four times that on images
    noise: float = 0.1  # in two dimensions
    image_noise: float = 0.3  # on pixels in [0, 1]
    kfac: float = 1.5  # falls with a power of the time that is left; .375 to 6 were tried
    fall: float = 2.0  # that power: the steps of the end are spectral, and keep their length at any gradient
    move: float = 0.3  # of a layer in one natural step
    signal: float = 0.8  # share of signal below which steps become spectral: most of this loss is noise from the start
    whitening: float = 0.01  # damping of the spectral steps; .3 is the default
    adam: float = 0.01  # falls linearly to a twentieth; .0025 to .04 were tried, and .04 is better on the spiral

    def __post_init__(self) -> None:
        _ = self.names  # refuses unknown ones
        check_counts(self, "batch", "width")
        check_positive(self, "seconds", "noise", "image_noise", "kfac", "fall", "move", "whitening", "adam")
        if not 0 <= self.signal < 1:
            raise LabError(f"signal is {self.signal}, expected a share of at least 0 and below 1")

    @property
    def names(self) -> list[str]:
        """The tasks to do."""
        return split_words("tasks", self.tasks, TASKS)


def rings(count: int, generator: torch.Generator) -> Tensor:
    """Three rings of radius 1, 2 and 3, (count, 2)."""
    radius = torch.randint(1, 4, (count,), generator=generator) + 0.05 * torch.randn(count, generator=generator)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


def spiral(count: int, generator: torch.Generator) -> Tensor:
    """Two arms of one turn and a half each, (count, 2)."""
    turn = torch.rand(count, generator=generator).sqrt() * 3 * math.pi
    arm = math.pi * torch.randint(2, (count,), generator=generator)
    points = torch.stack([(turn + arm).cos(), (turn + arm).sin()], 1) * (turn / math.pi).unsqueeze(1)
    return points + 0.05 * torch.randn(count, 2, generator=generator)


Source = Callable[[int, torch.Generator], Tensor]


def source(name: str) -> tuple[Source, Tensor]:
    """How examples are drawn, and held-out ones."""
    if name in ("rings", "spiral"):
        draw = rings if name == "rings" else spiral
        return draw, draw(HELD_OUT, torch.Generator().manual_seed(12345))
    split = (digits if name == "digits" else mnist)().flat()
    train, test = split.train_x, split.test_x[:HELD_OUT]
    return lambda count, generator: train[torch.randint(len(train), (count,), generator=generator)], test


def network(name: str, variables: int, width: int, seed: int) -> nn.Module:
    """Two hidden layers with SiLU."""
    width = width if name in ("rings", "spiral") else 4 * width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [m for a, b in pairwise((variables, width, width)) for m in (nn.Linear(a, b), nn.SiLU())]
        return nn.Sequential(*layers, nn.Linear(width, 1))


def optimizers(s: ScoreEnergySettings) -> dict[str, Callable[[nn.Module], Any]]:
    """The methods by name: two lines apart."""
    rule = NoiseAware(
        kl_share=0.05, move=s.move, floor=0.5, noise=s.signal, spectral=SpectralDescent(damping=s.whitening)
    )
    return {
        "K-FAC": lambda score: ng.kfac(score, nn.MSELoss(), s.kfac, rule=rule),
        "Adam": lambda score: torch.optim.Adam(score.parameters(), s.adam),
    }


def training(run: PieceRun, task: str, method: str) -> Numbers:
    """Held-out loss against CPU seconds and steps; the energy's map or samples at the end.

    A curve's points are seconds, steps, loss, and the distance from the exact score where that is known.
    """
    s: ScoreEnergySettings = run.settings
    draw, test = source(task)
    noise = s.noise if task in ("rings", "spiral") else s.image_noise
    energy = network(task, test.shape[1], s.width, run.seed)
    score, generator = ng.Score(energy), torch.Generator().manual_seed(run.seed)
    opt, look = optimizers(s)[method](score), watch(task, test, noise)
    rate = opt.param_groups[0]["lr"]

    def move(share: float) -> None:
        for group in opt.param_groups:
            group["lr"] = rate * share_of_rate(s, method, 1 - share)
        step(opt, score, draw(s.batch, generator), noise, generator)

    curve = follow_clock(run, s.seconds, 20, move, lambda: look(score))
    drawn = round_numbers(samples(energy, test, noise, generator, task))
    return {"curve": curve, "steps": curve[-1][1], "samples": drawn, **picture(energy, task, test, noise)}


def share_of_rate(s: ScoreEnergySettings, method: str, left: float) -> float:
    """What part of its first learning rate a method has while this share of the time is left."""
    return max(left**s.fall, LAST) if method == "K-FAC" else 0.05 + 0.95 * left


def step(opt: Any, score: nn.Module, x: Tensor, noise: float, generator: torch.Generator) -> None:
    """One step on (x + noise z, -z / noise)."""
    z = torch.randn(x.shape, generator=generator)
    opt.zero_grad()
    scores, target = score(x + noise * z), -z / noise
    loss = nn.functional.mse_loss(scores, target) if isinstance(opt, torch.optim.Adam) else opt.loss(scores, target)
    loss.backward()
    opt.step()


def watch(task: str, test: Tensor, noise: float) -> Callable[[nn.Module], tuple[float, float | None]]:
    """What is looked at on the way: the held-out loss, and noise^2 |s - exact s|^2 per variable, None on images."""
    traced = trace(task)
    if traced is None:
        return lambda score: (held_out(score, test, noise), None)
    noisy = test + noise * held_out_noise(test)
    exact = exact_score(traced, noisy, noise)

    def look(score: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            distance = (noise**2 * (score(noisy) - exact).square()).mean().item()
        return held_out(score, test, noise), distance

    return look


def held_out(score: nn.Module, x: Tensor, noise: float) -> float:
    """noise^2 |s + z / noise|^2 per variable with always the same z: 1 for a network that says nothing."""
    z = held_out_noise(x)
    with torch.no_grad():
        return (noise**2 * (score(x + noise * z) + z / noise).square()).mean().item()


def held_out_noise(x: Tensor) -> Tensor:
    """Always the same draws, in the shape of x."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(54321))


def samples(energy: nn.Module, test: Tensor, noise: float, generator: torch.Generator, task: str) -> Tensor:
    """Langevin draws with Metropolis' correction, in two dimensions from a wide start, on images from noisy ones."""
    density, params = Energy(energy), ng.trainable(energy)
    flat = task in ("rings", "spiral")
    start = 6 * torch.rand(500, 2, generator=generator) - 3 if flat else test[:SHOWN].clone()
    if not flat:
        start = start + noise * torch.randn(start.shape, generator=generator)
    dynamics = ng.Langevin(steps=STEPS["flat" if flat else "images"], step=0.3 * noise**2)
    return dynamics.draw(density, params, start, generator)


def picture(energy: nn.Module, task: str, test: Tensor, noise: float) -> Numbers:
    """In two dimensions log p on a grid, its highest value 0; on images noisy ones and their means given the noise."""
    with torch.no_grad():
        if task in ("rings", "spiral"):
            ticks = torch.linspace(-3.8, 3.8, GRID)
            grid = torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), -1).view(-1, 2)
            height = -energy(grid).view(GRID, GRID)
            return {"map": round_numbers(height - height.max()), "data": round_numbers(test[:500])}
        noisy = test[:SHOWN] + noise * torch.randn(test[:SHOWN].shape, generator=torch.Generator().manual_seed(1))
        cleaned = noisy + noise**2 * ng.Score(energy)(noisy)  # Tweedie's formula
        return {"data": round_numbers(test[:SHOWN]), "noisy": round_numbers(noisy), "cleaned": round_numbers(cleaned)}


def round_numbers(tensor: Tensor) -> list[Any]:
    """Three digits behind the point."""
    return tensor.mul(1000).round().div(1000).tolist()


# The exact score of the rings and of the spiral under noise, by sums over a curve: the best that a network can do

SPREAD = 0.05  # standard deviation of a ring's radius, and of an arm's points around it


@dataclass(frozen=True)
class Curve:
    """Points (k, 2) with weights (k,) that sum to 1, and the variance that is around each of them besides the noise."""

    points: Tensor
    weights: Tensor
    variance: float


def trace(task: str, turns: int = 240) -> Curve | None:
    """Where the density of a task has its mass; None for a task that is known by its examples alone."""
    return {"rings": trace_rings, "spiral": trace_spiral}[task](turns) if task in ("rings", "spiral") else None


def trace_rings(turns: int) -> Curve:
    """Three rings, each at nine radii of Gauss and Hermite."""
    # E f(N(0, 1)) = sum w f(t): eigenvalues of Hermite's recurrence, and squares of first entries
    recurrence = torch.diag(torch.arange(1, 9, dtype=torch.float64).sqrt(), 1)
    places, vectors = eigh(recurrence + recurrence.T)
    radii = (torch.arange(1, 4).unsqueeze(1) + SPREAD * places).flatten()
    weights = (vectors[0].square() / (3 * turns)).repeat(3)
    angles = 2 * math.pi * torch.arange(turns, dtype=torch.float64) / turns
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    points = (radii.view(-1, 1, 1) * circle).flatten(0, 1)
    return Curve(points, weights.repeat_interleave(turns), 0.0)


def trace_spiral(turns: int) -> Curve:
    """Both arms, at the middle of as many equal parts of the draws that they are made of."""
    count = 5 * turns
    turn = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).sqrt() * 3 * math.pi
    arm = torch.stack([turn.cos(), turn.sin()], 1) * (turn / math.pi).unsqueeze(1)
    return Curve(torch.cat([arm, -arm]), torch.full((2 * count,), 1 / (2 * count), dtype=torch.float64), SPREAD**2)


def exact_score(traced: Curve, x: Tensor, noise: float) -> Tensor:
    """d log p / dx of the curve's mass under noise, (b, 2): (E[point | x] - x) / variance."""
    variance = traced.variance + noise**2
    parts = []
    for some in x.double().split(100):
        logits = traced.weights.log() - torch.cdist(some, traced.points).square() / (2 * variance)
        parts.append((logits.softmax(1) @ traced.points - some) / variance)
    return torch.cat(parts).to(x.dtype)


def tell(findings: Findings) -> Story:
    """A section per task that is finished."""
    s = findings.settings
    tasks = {task: methods for task in s.names if (methods := findings.collect(METHODS, f"{task} {{}}"))}
    method = (
        f"Energies with two hidden layers of {s.width} units ({4 * s.width} on images) and SiLU, denoising score "
        f"matching with noise {s.noise:g} ({s.image_noise:g} on pixels), batches of {s.batch}, {s.seconds:g} CPU s "
        f"each. ng.kfac has NoiseAware(move={s.move:g}, noise={s.signal:g}), spectral damping {s.whitening:g} and the "
        f"rate {s.kfac:g}, which falls with the power {s.fall:g} of the time that is left; Adam's rate of {s.adam:g} "
        "falls linearly to a twentieth. The loss is that of held-out examples with fixed noise, times noise^2 per "
        "variable: 1 for a network that says nothing. In two dimensions the exact score is known, and the distance is "
        "noise^2 times the mean square from it: what is left of the loss when it is 0 is noise. Samples: 300 steps of "
        "Langevin dynamics with Metropolis' correction from a uniform start in two dimensions, 200 from noisy digits."
    )
    sections = tuple(_section(task, methods) for task, methods in tasks.items())
    return Story("Energy networks by denoising", _lead(tasks), method, sections)


def ends(runs: list[Numbers], place: int | None = None) -> float:
    """What came out last, the median over seeds: by default the distance where it is known, the loss elsewhere."""
    shown = (DISTANCE if knows_distance(runs) else LOSS) if place is None else place
    return median(run["curve"][-1][shown] for run in runs)


def knows_distance(runs: list[Numbers]) -> bool:
    """Whether the exact score of the task is known."""
    return runs[0]["curve"][-1][DISTANCE] is not None


def _lead(tasks: dict[str, dict[str, list[Numbers]]]) -> str:
    both = {task: methods for task, methods in tasks.items() if len(methods) == len(METHODS)}
    lower = [task for task, methods in both.items() if ends(methods["K-FAC"]) < ends(methods["Adam"])]
    measure = "distance from the exact score, or held-out loss where that is not known,"
    return f"After the same CPU time K-FAC's {measure} is below Adam's on {len(lower)} of {len(both)} tasks."


def _section(task: str, methods: dict[str, list[Numbers]]) -> Section:
    known = knows_distance(next(iter(methods.values())))
    said = ", ".join(f"{name} {ends(runs, LOSS):.4f}" for name, runs in methods.items())
    if known:
        said += f". Distance from the exact score: {', '.join(f'{n} {ends(runs):.4f}' for n, runs in methods.items())}"
    rows = []
    for name, runs in methods.items():
        distance, steps = f"{ends(runs):.4f}" if known else "-", f"{median(run['steps'] for run in runs):,}"
        rows.append((name, f"{ends(runs, LOSS):.4f}", distance, steps))
    heads = ("", "held-out loss", "distance from the exact score", "steps")
    table = Table("At the end, medians over seeds", heads, tuple(rows))
    looks = _densities(task, methods) if "map" in next(iter(methods.values()))[0] else _digits(task, methods)
    place = DISTANCE if known else LOSS
    curves = tuple(_draw_curve(task, methods, axis, place) for axis in (0, 1))
    return Section(task, f"Held-out loss: {said}.", (table,), (*curves, looks))


def _draw_curve(task: str, methods: dict[str, list[Numbers]], axis: int, place: int) -> Picture:
    lines = take_columns(methods, axis, place)
    measure = {LOSS: "held-out loss per variable", DISTANCE: "distance from the exact score"}[place]
    label, name = (("CPU seconds", "seconds"), ("steps", "steps"))[axis]
    look = {"xlabel": label, "ylabel": measure, "yscale": "log" if place == DISTANCE else "linear"}
    title = f"Energy network on {DATA[task]}, {' and '.join(methods)}: a line per seed"
    return Picture(f"{task}-{name}", f"Against {name}", fill_lines(lines, look, title), (5.0, 3.9))


def _densities(task: str, methods: dict[str, list[Numbers]]) -> Picture:
    def fill(figure: Figure) -> None:
        grid = figure.subplots(2, len(methods) + 1)
        first = next(iter(methods.values()))[0]
        grid[1, 0].set_axis_off()
        _points(grid[0, 0], first["data"], "data")
        for (upper, lower), (method, runs) in zip(grid.T[1:], methods.items(), strict=True):
            height = np.array(runs[0]["map"])
            column, row = np.clip(
                ((np.array(first["data"]) + 3.8) / 7.6 * (len(height) - 1)).round().astype(int), 0, len(height) - 1
            ).T
            highest = height[row, column].max()  # where no data are, nothing holds the energy up
            density = np.exp(np.clip(height - highest, -12.0, 0.0))
            upper.imshow(density, origin="lower", extent=(-3.8, 3.8, -3.8, 3.8), cmap="magma")
            upper.set(xticks=[], yticks=[])
            upper.set_title(f"{method}: density", fontsize=10)
            _points(lower, runs[0]["samples"], f"{method}: samples")
        parts = "bright: as high as anywhere on the data; the square from -3.8 to 3.8"
        figure.suptitle(f"Energy network on {DATA[task]}, first seed:\ndensity, {parts}", fontsize=9)

    return Picture(f"{task}-density", "Densities and samples, first seed", fill, (5.4, 4.0))


def _points(axes, points: list[list[float]], title: str) -> None:
    where = np.array(points)
    axes.scatter(where[:, 0], where[:, 1], s=2, color=INK, linewidths=0)
    axes.set(xticks=[], yticks=[], xlim=(-3.8, 3.8), ylim=(-3.8, 3.8), aspect="equal")
    axes.set_title(title, fontsize=10)


def _digits(task: str, methods: dict[str, list[Numbers]]) -> Picture:
    def fill(figure: Figure) -> None:
        first = next(iter(methods.values()))[0]
        rows = {"digits": first["data"], "noisy": first["noisy"]}
        for method, runs in methods.items():
            rows |= {f"{method}: cleaned": runs[0]["cleaned"], f"{method}: samples": runs[0]["samples"]}
        grid = figure.subplots(len(rows), 1)
        for axes, (title, pixels) in zip(grid, rows.items(), strict=True):
            images = np.array(pixels)[:20]
            side = round(images.shape[1] ** 0.5)
            draw_images(axes, 1 - 2 * np.clip(images, 0, 1).reshape(-1, side, side), 20)
            axes.set_ylabel(title, rotation=0, ha="right", fontsize=9)

    title = "Digits, cleaned by the score, and drawn by Langevin from noisy ones"
    return Picture(f"{task}-digits", title, fill, (10.0, 4.2))


def pieces(s: ScoreEnergySettings) -> tuple[Piece, ...]:
    """One per task and method."""
    return tuple(
        Piece(f"{task} {method}", f"{task}, {method}", lambda run, t=task, m=method: training(run, t, m))
        for task in s.names
        for method in optimizers(s)
    )


STUDY = Experiment(
    name="score_energy_net",
    summary="energy networks by denoising score matching: rings, a spiral, digits; K-FAC beside Adam",
    settings=ScoreEnergySettings,
    pieces=pieces,
    tell=tell,
    seeds=1,
    minutes=3,
    quick={"seconds": 8.0},
)
