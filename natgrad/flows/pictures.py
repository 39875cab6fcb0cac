"""Pictures of flows in the plane: level lines, arrows, paths and basins, on matplotlib axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.flows.expectation import Function
from natgrad.flows.integrate import Field


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
        ValueError: If the length is another word.
    """
    powers = {"true": 1.0, "root": 0.5, "same": 0.0}
    if length not in powers:
        raise ValueError(f"length is {length!r}, expected one of {', '.join(powers)}")
    a, _, points = _lattice(x, y, count)
    arrows = field(points)
    size = torch.stack([arrows[:, 0] / (x[1] - x[0]), arrows[:, 1] / (y[1] - y[0])], 1).norm(dim=1, keepdim=True)
    keep = (torch.isfinite(size) & (size > 0)).squeeze(1)
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
