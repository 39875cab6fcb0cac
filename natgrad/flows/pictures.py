"""Pictures of flows in the plane: level lines, arrows, paths and basins, on matplotlib axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily, Ising, MultivariateNormal
from natgrad.flows.coordinates import FlowCoordinates, natural_coordinates, probability_coordinates
from natgrad.flows.expectation import Function, expected_value
from natgrad.flows.integrate import Field, flow, flow_field


def show_descent(
    f: Callable[[Tensor], Tensor],
    family: ExponentialFamily = MultivariateNormal(1),
    start: Sequence[float] | None = None,
    *,
    x: tuple[float, float] | None = None,
    y: tuple[float, float] | None = None,
    coordinates: FlowCoordinates | None = None,
) -> Any:
    """A picture of the descent of E[f(x)] by the gradient, left, and by the natural gradient, right.

    Both start at one point and run in the same coordinates, over the level lines of E[f].

    Args:
        f: Of a batch (m, d) -> (m,).
        family: Of two parameters: `MultivariateNormal(1)`, drawn in mu and log sigma, or `Ising` of two variables,
            drawn in their probabilities.
        start: Of the path drawn, in the coordinates; default a tenth inside of the upper left corner.
        x: First and last value along x; default -3 to 3, and 0 to 1 for probabilities.
        y: First and last value along y, in the same way; -2 to 1 for a log of a deviation.
        coordinates: Other ones.

    Returns:
        A matplotlib `Figure`; notebooks show it, `figure.savefig("descent.png")` keeps it.

    Raises:
        ImportError: Without matplotlib and scipy.
        ValueError: For another family, and for one that does not have two parameters.

    Example:
        >>> figure = ng.show_descent(lambda x: (x[:, 0] - 1) ** 2)
        >>> [axes.get_title() for axes in figure.axes]
        ['gradient', 'natural gradient']
    """
    if not isinstance(family, ExponentialFamily):
        raise TypeError(
            f"family is {type(family).__name__}, expected one such as MultivariateNormal(1): the picture is of E[f(x)] "
            "over a family, show_descent(lambda x: (x[:, 0] - 1) ** 2); where the path starts is start="
        )
    if family.size != 2:
        raise ValueError(f"family is {family!r} with {family.size} parameters, expected one with two, for a plane")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("show_descent draws with matplotlib: pip install 'natgrad[plots]'") from error
    chart = coordinates or choose_chart(family)
    names = LABELS.get(chart.name, (f"{chart.name}[0]", f"{chart.name}[1]"))
    usual = (0.02, 0.98) if chart.name == "mu" and coordinates is None else (-3.0, 3.0)
    x, y = x or usual, y or ((-2.0, 1.0) if chart.name in LABELS and usual[0] < 0 else usual)
    if not callable(f):
        raise TypeError(f"f is {type(f).__name__}, expected a function of rows: lambda x: (x[:, 0] - 1) ** 2")
    if start is not None and len(start) != 2:
        raise ValueError(f"start is {start}, expected two numbers, in the coordinates of the picture")
    point = torch.tensor(start or [0.9 * x[0] + 0.1 * x[1], 0.1 * y[0] + 0.9 * y[1]], dtype=torch.float64)
    value, times = expected_value(family, f), torch.logspace(-4, 1.5, 100).tolist()
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, natural in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        draw_levels(axes, lambda points: value(chart.theta(points)), x, y)
        draw_field(axes, flow_field(value, family, chart, natural=natural), x, y, length="same")
        path = flow(value, family, point, [0.0, *times], chart, natural=natural, rtol=1e-6, rest=1e-4)  # as eyes see
        draw_trajectory(axes, path.points, color="C3" if natural else "C0")
        axes.set(title="natural gradient" if natural else "gradient", xlabel=names[0], xlim=x, ylim=y)
    figure.axes[0].set_ylabel(names[1])
    return figure


LABELS = {"mean and log deviation": ("mean", "log of the standard deviation"), "mu": ("P(first)", "P(second)")}
"""What the axes are called, by the coordinates' name."""


def choose_chart(family: ExponentialFamily) -> FlowCoordinates:
    """The coordinates in which a family is drawn that was given without."""
    if isinstance(family, Ising) and all(len(clique) == 1 for clique in family.cliques):
        return probability_coordinates(family)
    if not isinstance(family, MultivariateNormal):
        return natural_coordinates(family)

    def theta(point: Tensor) -> Tensor:
        mean, variance = point[..., 0], (2 * point[..., 1]).exp()
        return torch.stack([mean / variance, -0.5 / variance], dim=-1)

    def jacobian(point: Tensor) -> Tensor:
        mean, precision = point[..., 0], (-2 * point[..., 1]).exp()
        rows = precision, -2 * mean * precision, torch.zeros_like(precision), precision
        return torch.stack(rows, dim=-1).view(*point.shape, 2)

    return FlowCoordinates("mean and log deviation", theta, jacobian, lambda point: torch.isfinite(point).all(-1))


def draw_levels(axes: Any, function: Function, x: tuple[float, float], y: tuple[float, float], **style: Any) -> None:
    """Level lines of a function of the plane.

    Args:
        axes: Of matplotlib.
        function: Of points (m, 2) -> (m,).
        x: First and last value along x.
        y: First and last value along y.
        **style: Of `axes.contour`; `levels` says how many, or which.
    """
    style = {"levels": 25, "linewidths": 0.7, "colors": "0.75", "linestyles": "solid", **style}
    a, b, points = _lattice(x, y, 121)
    axes.contour(a.numpy(), b.numpy(), function(points).detach().view(len(b), len(a)).numpy(), **style)


def draw_field(
    axes: Any,
    field: Field,
    x: tuple[float, float],
    y: tuple[float, float],
    count: int = 17,
    length: str = "root",
    **style: Any,
) -> None:
    """Arrows of a field at count x count points.

    Args:
        axes: Of matplotlib.
        field: Of points (m, 2) -> (m, 2).
        x: First and last value along x.
        y: First and last value along y.
        count: Arrows per axis.
        length: "true" lengths, their square "root", or all the "same".
        **style: Of `axes.quiver`.

    Raises:
        ValueError: If the length is another word, and if no arrow has one.
    """
    powers = {"true": 1.0, "root": 0.5, "same": 0.0}
    if length not in powers:
        raise ValueError(f"length is {length!r}, expected one of {', '.join(powers)}")
    a, _, points = _lattice(x, y, count)
    arrows = field(points)
    size = torch.stack([arrows[:, 0] / (x[1] - x[0]), arrows[:, 1] / (y[1] - y[0])], 1).norm(dim=1, keepdim=True)
    keep = (torch.isfinite(size) & (size > 0)).squeeze(1)
    if not keep.any():
        raise ValueError(f"field is 0 or not finite at all points of x {x} and y {y}, expected arrows: look elsewhere")
    arrows, size = arrows[keep] / size[keep], size[keep] ** powers[length]
    arrows = arrows * size / size.max() * 0.95 / (len(a) - 1)
    style = {"width": 0.0026, "color": "0.45", **style}
    axes.quiver(
        *points[keep].T.numpy(), *arrows.T.numpy(), angles="xy", scale_units="xy", scale=1.0, pivot="middle", **style
    )


def draw_trajectory(axes: Any, points: Tensor, arrow: bool = True, **style: Any) -> None:
    """A path as a line with a dot at its start and an arrow half-way along.

    Args:
        axes: Of matplotlib.
        points: Shape (T, 2); NaN is left out.
        arrow: False for none.
        **style: Of `axes.plot`.
    """
    points = points[torch.isfinite(points).all(1)]
    (line,) = axes.plot(*points.T.numpy(), **{"linestyle": "-", "linewidth": 1.6, **style})
    colour = line.get_color()
    axes.plot(*points[0].numpy(), "o", color=colour, markersize=3.5)
    steps = points.diff(dim=0).norm(dim=1)
    if arrow and len(steps) and float(steps.sum()) > 0:
        half = int((steps.cumsum(0) < 0.5 * steps.sum()).sum())
        head = {"arrowstyle": "-|>", "color": colour, "lw": 0, "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", points[half + 1].tolist(), points[half].tolist(), arrowprops=head)


def draw_basins(
    axes: Any, ends: Tensor, goals: Tensor, x: tuple[float, float], y: tuple[float, float], colours: Sequence[str]
) -> None:
    """Colour every point of a lattice by the goal nearest to where its flow ends.

    Args:
        axes: Of matplotlib.
        ends: Where the flows end, shape (count^2, 2), rows along x: `destinations` of a `lattice`.
        goals: Shape (k, 2).
        x: First and last value along x.
        y: First and last value along y.
        colours: One per goal.
    """
    nearest = torch.cdist(ends, goals).argmin(1)
    count = math.isqrt(len(ends))
    from matplotlib.colors import ListedColormap

    image = nearest.view(count, count).numpy()
    axes.imshow(
        image, origin="lower", extent=(*x, *y), cmap=ListedColormap(list(colours)), vmin=-0.5, vmax=len(goals) - 0.5,
        alpha=0.16, aspect="auto", interpolation="nearest", zorder=0,
    )  # fmt: skip


def lattice(x: tuple[float, float], y: tuple[float, float], count: int) -> Tensor:
    """The centres (count^2, 2) of a lattice over a rectangle, rows along x: the starts for `draw_basins`.

    Args:
        x: First and last value along x.
        y: First and last value along y.
        count: Points per axis.
    """
    ticks = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    b, a = torch.meshgrid(y[0] + (y[1] - y[0]) * ticks, x[0] + (x[1] - x[0]) * ticks, indexing="ij")
    return torch.stack([a.flatten(), b.flatten()], dim=1)


def _lattice(x: tuple[float, float], y: tuple[float, float], count: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b = (torch.linspace(*ends, count, dtype=torch.float64) for ends in (x, y))
    rows, columns = torch.meshgrid(b, a, indexing="ij")
    return a, b, torch.stack([columns.flatten(), rows.flatten()], dim=1)
