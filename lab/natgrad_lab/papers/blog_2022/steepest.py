"""Steepest descent per nat beside steepest descent per Euclidean length, on logistic regression with two parameters.

`python -m natgrad_lab.papers.blog_2022.steepest docs/images` draws the pictures and prints the numbers of the page.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import natgrad as ng
from natgrad_lab.figures import DASHES, GRID, INK, PALETTE, put_legend_below, put_title, save_picture

START = (0.0, 1.0)  # slope and offset
NATS = (1e-1, 1e-2, 1e-3, 1e-4)
DRAWN = 0.02  # nats, of the ball in the picture
REACH = 0.2  # Euclidean, of the steps whose gain is drawn
ANGLES = 721  # directions that are tried
TITLE = (
    "Logistic regression with a slope and an offset, 40 inputs between 0 and 3: where the loss is least within reach"
)


@dataclass(frozen=True)
class TwoParameters:
    """A point of the parameters with all that the derivation takes: gradient, Fisher matrix, loss and KL."""

    model: nn.Module  # from inputs (b, 1) to one logit, of two parameters
    inputs: Tensor  # shape (b, 1)
    labels: Tensor  # zeros and ones, shape (b, 1)

    @property
    def point(self) -> Tensor:
        """The parameters, shape (2,)."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    @property
    def gradient(self) -> Tensor:
        """Of the mean loss, shape (2,)."""
        return torch.func.grad(self.loss)(self.point)

    @property
    def natural(self) -> Tensor:
        """F^-1 g, shape (2,)."""
        metric = ng.fisher(self.model, ng.Bernoulli()).at(ng.trainable(self.model), self.inputs)
        return ng.natural_gradient(metric, self.gradient).value

    def logits(self, point: Tensor) -> Tensor:
        """Of all inputs, shape (..., b)."""
        return point[..., :1] * self.inputs[:, 0] + point[..., 1:]

    def loss(self, point: Tensor) -> Tensor:
        """Mean over the examples in nats, shape (...)."""
        signs = 2 * self.labels[:, 0] - 1
        return -nn.functional.logsigmoid(signs * self.logits(point)).mean(-1)

    def kl(self, point: Tensor) -> Tensor:
        """Mean KL from the model here to the one there, shape (...)."""
        here = self.logits(self.point)
        softplus = nn.functional.softplus
        there = self.logits(point)
        return (softplus(there) - softplus(here) - here.sigmoid() * (there - here)).mean(-1)

    def on_ball(self, directions: Tensor, nats: float) -> Tensor:
        """The points on rays from here whose KL is `nats`, by bisection, shape (k, 2)."""
        low, high = torch.zeros(len(directions)).to(directions), torch.ones(len(directions)).to(directions)
        while bool((short := self.kl(self.point + high[:, None] * directions) < nats).any()):
            high = torch.where(short, 2 * high, high)
        for _ in range(60):
            middle = (low + high) / 2
            short = self.kl(self.point + middle[:, None] * directions) < nats
            low, high = torch.where(short, middle, low), torch.where(short, high, middle)
        return self.point + high[:, None] * directions


def make_place() -> TwoParameters:
    """The problem of the picture, without chance: inputs and labels at equal distances, from `START`."""
    model = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(START[0])
        model.bias.fill_(START[1])
    inputs = torch.linspace(0, 3, 40, dtype=torch.float64)[:, None]
    flipped = torch.arange(40)[:, None] % 8 == 3
    return TwoParameters(model, inputs, ((inputs > 1.5) ^ flipped).double())


def circle(count: int = ANGLES) -> Tensor:
    """Unit vectors all round, shape (count, 2)."""
    angles = torch.linspace(-math.pi, math.pi, count, dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], -1)


def measure_angle(a: Tensor, b: Tensor) -> float:
    """Between two vectors, in degrees."""
    return abs(math.degrees(torch.atan2(a[0] * b[1] - a[1] * b[0], a @ b).item()))


def find_lowest(place: TwoParameters, nats: float) -> Tensor:
    """The point with the least loss on the ball of that KL, found by trying directions, shape (2,)."""
    way = torch.tensor([1.0, 0.0], dtype=torch.float64)  # any way: the first fan goes all round
    for width in (1.0, 1e-2, 1e-4):  # of the fan of directions around the best so far
        axis = -way / way.norm()
        turned = torch.stack([-axis[1], axis[0]])
        angles = width * torch.linspace(-math.pi, math.pi, ANGLES, dtype=torch.float64)
        directions = angles.cos()[:, None] * axis + angles.sin()[:, None] * turned
        points = place.on_ball(directions, nats)
        way = place.point - points[place.loss(points).argmin()]
    return place.point - way


def list_angles(place: TwoParameters) -> dict[float, tuple[float, float]]:
    """Nats of a ball -> degrees from its lowest point to the natural gradient's way and to the gradient's."""
    steps = {nats: find_lowest(place, nats) - place.point for nats in NATS}
    ways = -place.natural, -place.gradient
    return {nats: (measure_angle(step, ways[0]), measure_angle(step, ways[1])) for nats, step in steps.items()}


def compare_formulas(place: TwoParameters) -> dict[float, dict[str, tuple[float, float]]]:
    """Nats of a ball -> quantity -> what the page's formula gives, and what it is; d = -(1 / lambda) F^-1 g."""
    pairs = {}
    slope = float(place.gradient @ place.natural)  # g^T F^-1 g
    here = place.loss(place.point)
    for nats in NATS:
        multiplier = math.sqrt(slope / (2 * nats))
        step = -place.natural / multiplier
        less, more = (place.loss(find_lowest(place, share * nats)) for share in (0.99, 1.01))
        pairs[nats] = {
            "nats": (slope / (2 * multiplier**2), float(place.kl(place.point + step))),  # 1/2 d^T F d
            "multiplier": (multiplier, float((less - more) / (0.02 * nats))),  # lambda, loss saved by one more nat
            "loss": (-float(place.gradient @ step), float(here - place.loss(find_lowest(place, nats)))),
        }
    return pairs


FORMULAS = {  # quantity -> what the page says, what it stands for
    "nats": "Nats of the step: ½ dᵀ F d, and the KL itself",
    "multiplier": "Multiplier: √(∇Lᵀ F⁻¹ ∇L / 2ε), and loss saved by one more nat",
    "loss": "Loss saved: -∇Lᵀ d, and the most on the ball, by search",
}


def fill_formulas(place: TwoParameters, figure: Figure) -> None:
    """A row for each quantity: the page's formula on the left, what it stands for on the right, one scale."""
    pairs = compare_formulas(place)
    grid = figure.subplots(len(FORMULAS), 2, sharex="row")
    for row, (name, title) in zip(grid, FORMULAS.items(), strict=True):
        row[0].set_title(title, loc="left", fontsize=10)
        for side, axes in enumerate(row):
            for height, nats in enumerate(NATS):
                value = pairs[nats][name][side]
                axes.plot(value, height, "o", color=PALETTE[1 - side])
                axes.annotate(
                    f"{value:.3g}", (value, height), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8
                )
            axes.set(xscale="log", ylim=(len(NATS) - 0.5, -0.9))
            axes.margins(x=0.2)
            axes.set_yticks(range(len(NATS)), [f"ε = {n:g}" for n in NATS] if side == 0 else [""] * len(NATS))
            axes.grid(axis="x")
    grid[-1][0].set_xlabel("the page's formula")
    grid[-1][1].set_xlabel("ours, by the KL and by search")
    put_title(
        figure, "Natural gradient descent, 2022: its three approximations on logistic regression, balls of ε nats"
    )


def fill(place: TwoParameters, figure: Figure) -> None:
    """Both balls over the level lines of the loss, and what a way gains per length and per nat."""
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1))
    ways = {"natural gradient": -place.natural, "gradient": -place.gradient}
    draw_map(figure.add_subplot(grid[:, 0]), place, ways)
    by_length, by_nats = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    shares = torch.linspace(0, 1, 60, dtype=torch.float64)[:, None]
    for number, (name, way) in enumerate(ways.items()):
        look = {"color": PALETTE[number], "linestyle": DASHES[number], "label": name}
        straight = place.point + REACH * shares * way / way.norm()
        by_length.plot(REACH * shares[:, 0], place.loss(place.point) - place.loss(straight), **look)
        ball = place.point + shares * (place.on_ball(way[None], DRAWN) - place.point)
        by_nats.plot(place.kl(ball), place.loss(place.point) - place.loss(ball), **look)
    by_length.set(xlabel="Euclidean length of the step", ylabel="loss saved")
    by_nats.set(xlabel="nats moved", ylabel="loss saved")
    put_legend_below(figure, by_nats)
    put_title(figure, TITLE)


def draw_map(axes: Axes, place: TwoParameters, ways: dict[str, Tensor]) -> None:
    """The loss, the two balls around the start and the lowest point of each."""
    ball = place.on_ball(circle(361), DRAWN)
    sides = torch.linspace(-1, 1, 81, dtype=torch.float64)
    reach = 1.25 * (ball - place.point).abs().max()
    x, y = place.point[0] + reach * sides, place.point[1] + reach * sides
    lattice = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
    axes.contour(x, y, np.asarray(place.loss(lattice)), levels=16, colors=GRID, linewidths=0.9)
    radius = (place.on_ball(-place.gradient[None], DRAWN) - place.point).norm()
    balls = {"natural gradient": ball, "gradient": place.point + radius * circle(361)}
    for number, (name, points) in enumerate(balls.items()):
        axes.plot(*points.mT, color=PALETTE[number], linestyle=DASHES[number])
        axes.plot(*points[place.loss(points).argmin()], "o", color=PALETTE[number], markersize=6)
        way = ways[name] / ways[name].norm() * (0.8 * reach if number == 0 else radius)
        axes.annotate(
            "",
            tuple((place.point + way).tolist()),
            tuple(place.point.tolist()),
            arrowprops={"arrowstyle": "->", "color": PALETTE[number]},
        )
    axes.plot(*place.point, "+", color=INK, markersize=9)
    axes.set(xlabel="slope", ylabel="offset", aspect="equal")
    axes.set_title(f"A ball of {DRAWN:g} nats and a circle; dots: least loss on each", loc="left", fontsize=9)


def draw_all(folder: Path) -> None:
    """Write the pictures as PNGs."""
    for name, paint, height in (("blog_steepest", fill, 4.6), ("blog_formulas", fill_formulas, 5.4)):
        save_picture(partial(paint, make_place()), (8.4, height), folder / name)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
    for nats, (natural, plain) in list_angles(make_place()).items():
        sys.stdout.write(
            f"{nats:g} nats: {natural:.3g} degrees from the natural gradient, {plain:.3g} from the gradient\n"
        )
    for nats, named in compare_formulas(make_place()).items():
        said = "; ".join(f"{name} {given:.4g} and {true:.4g}" for name, (given, true) in named.items())
        sys.stdout.write(f"{nats:g} nats: {said}\n")
