"""Gradient flows over statistical models, Euclidean and natural, in any coordinates, and their pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.families import ExponentialFamily, Ising, MultivariateNormal
from natgrad.lapack import factor_or_nan, invert_or_nan, solve_or_nan

__all__ = [
    "Coordinates",
    "Trajectory",
    "destinations",
    "deviation_coordinates",
    "draw_basins",
    "draw_field",
    "draw_levels",
    "draw_trajectory",
    "expectation_coordinates",
    "expected",
    "flow",
    "flow_field",
    "lattice",
    "natural_coordinates",
    "paths",
    "probability_coordinates",
]

Function = Callable[[Tensor], Tensor]  # of points (..., n) -> (...)
Field = Callable[[Tensor], Tensor]  # of points (..., n) -> (..., n)


@dataclass(frozen=True)
class Coordinates:
    """Coordinates xi (..., n) of a family, by the map to its natural parameters.

    theta(xi): differentiable, with batches. jacobian(xi): d theta / d xi (..., n, n), where autograd cannot say.
    inside(xi): which points are of the domain, (...) of bool; None asks the family about theta.
    """

    name: str
    theta: Callable[[Tensor], Tensor]
    jacobian: Callable[[Tensor], Tensor] | None = None
    inside: Callable[[Tensor], Tensor] | None = None

    def slope(self, xi: Tensor) -> Tensor:
        """d theta / d xi, (..., n, n)."""
        if self.jacobian is not None:
            return self.jacobian(xi)
        flat = xi.reshape(-1, xi.shape[-1])
        return torch.func.vmap(torch.func.jacrev(self.theta))(flat).view(*xi.shape, xi.shape[-1])


def natural_coordinates(family: ExponentialFamily) -> Coordinates:
    """theta itself."""
    return Coordinates(
        "theta", lambda theta: theta, lambda theta: torch.eye(family.size).to(theta).expand(*theta.shape, -1)
    )


def expectation_coordinates(family: ExponentialFamily) -> Coordinates:
    """eta = E[T]; the natural flow in eta is the plain gradient in theta."""

    def inside(eta: Tensor) -> Tensor:
        try:
            family.natural(eta)
        except ValueError:
            return torch.zeros(eta.shape[:-1], dtype=torch.bool)
        return torch.ones(eta.shape[:-1], dtype=torch.bool)

    return Coordinates("eta", family.natural, lambda eta: invert_or_nan(family.covariance(family.natural(eta))), inside)


def probability_coordinates(family: Ising) -> Coordinates:
    """mu_i = P(x_i is the higher value), of an `Ising` of single variables, in their order."""
    if any(len(clique) != 1 for clique in family.cliques):
        raise ValueError(f"family is {family!r}, expected an independence model: cliques of one variable each")
    width = family.values[1] - family.values[0]

    def jacobian(mu: Tensor) -> Tensor:
        return torch.diag_embed(1 / (mu * (1 - mu)) / width)

    return Coordinates("mu", lambda mu: mu.logit() / width, jacobian, lambda mu: ((mu > 0) & (mu < 1)).all(-1))


def deviation_coordinates() -> Coordinates:
    """(mean, standard deviation) of `MultivariateNormal(1)`."""

    def theta(point: Tensor) -> Tensor:
        mean, deviation = point.unbind(-1)
        return torch.stack([mean / deviation.square(), -0.5 / deviation.square()], dim=-1)

    return Coordinates(
        "mean and deviation", theta, None, lambda point: torch.isfinite(point).all(-1) & (point[..., 1] > 0)
    )


def expected(family: ExponentialFamily, f: Callable[[Tensor], Tensor], nodes: int = 8) -> Function:
    """F(theta) = E[f(x)] with gradients, for f on a batch (m, d) -> (m,).

    Exact over the states of an `Ising`; by Gauss-Hermite quadrature with nodes^d points for a `MultivariateNormal`,
    exact for polynomials of degree up to 2 nodes - 1 in every variable.
    """
    if isinstance(family, Ising):
        states = family.states
        values = f(states)
        return lambda theta: family.probabilities(theta) @ values.to(theta)
    if isinstance(family, MultivariateNormal):
        z, weights = _hermite(family.d, nodes)
        return lambda theta: _quadrature(family, f, theta, z.to(theta), weights.to(theta))
    raise ValueError(f"expected() knows Ising and MultivariateNormal, not {family!r}: write F(theta) as a function")


def _hermite(d: int, nodes: int) -> tuple[Tensor, Tensor]:
    points, weights = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(nodes))
    grid = torch.cartesian_prod(*[points] * d).view(-1, d)
    product = torch.cartesian_prod(*[weights / weights.sum()] * d).view(-1, d).prod(1)
    return grid, product


def _quadrature(family: MultivariateNormal, f: Callable, theta: Tensor, z: Tensor, weights: Tensor) -> Tensor:
    covariance = invert_or_nan(family.precision(theta))
    mean = (covariance @ theta[..., : family.d].unsqueeze(-1)).squeeze(-1)
    x = mean.unsqueeze(-2) + z @ factor_or_nan(covariance).mT  # (..., m, d)
    return f(x.reshape(-1, family.d)).view(x.shape[:-1]) @ weights


def flow_field(
    function: Function,
    family: ExponentialFamily,
    coordinates: Coordinates | None = None,
    *,
    natural: bool = True,
    maximise: bool = False,
) -> Field:
    """dxi/dt (..., n) of the flow of F(theta): -G^-1 dF/dxi, G the Fisher matrix in these coordinates, or G = 1.

    function: F of natural parameters (..., n) -> (...), with gradients. coordinates: default the natural parameters.
    natural: the natural gradient; else the Euclidean one, which depends on the coordinates. maximise: ascend.
    """
    chart, sign = coordinates or natural_coordinates(family), 1.0 if maximise else -1.0

    def field(xi: Tensor) -> Tensor:
        theta = chart.theta(xi).detach().requires_grad_()
        with torch.enable_grad():
            gradient = torch.autograd.grad(function(theta).sum(), theta)[0].unsqueeze(-1)
        theta = theta.detach()
        slope = chart.slope(xi)
        if natural:  # J^-1 I^-1 g: what J^T I J and J^T g come to
            inner = solve_or_nan(family.covariance(theta), gradient)  # NaN for a distribution without spread
            found = solve_or_nan(slope, inner)
        else:
            found = slope.mT @ gradient
        return sign * found.squeeze(-1).detach()

    return field


@dataclass(frozen=True)
class Trajectory:
    """A flow's way: times (T,), points (T, n) in its coordinates, values of F (T,), and why it ended.

    status: "end" of the time; "rest", where the field had vanished; "edge" of the domain; "not finite", where field or
    F are not; "stuck", where the solver gave up. message: the same in a sentence.
    """

    times: Tensor
    points: Tensor
    values: Tensor
    status: str
    message: str


def flow(
    function: Function,
    family: ExponentialFamily,
    start: Tensor,
    span: float | Sequence[float] | Tensor,
    coordinates: Coordinates | None = None,
    *,
    natural: bool = True,
    maximise: bool = False,
    rtol: float = 1e-10,
    atol: float = 1e-12,
    method: str = "DOP853",
    rest: float = 1e-9,
) -> Trajectory:
    """The gradient flow of F(theta) from `start` (n,), in these coordinates, by an adaptive solver of SciPy.

    span: the last time, or all times (increasing, from 0) at which points are wanted. rest: the flow has come to rest
    where the field's largest entry is below this part of what it was at first. See `flow_field`. method: SciPy's, as
    "LSODA" for stiff flows. ImportError without SciPy.
    """
    chart = coordinates or natural_coordinates(family)
    if start.dim() != 1 or not bool(_inside(family, chart, start)):
        raise ValueError(f"start {start.tolist()} is not one point inside the domain of the coordinates {chart.name!r}")
    field = flow_field(function, family, chart, natural=natural, maximise=maximise)
    first = float(field(start).abs().max())
    wanted = None if isinstance(span, (int, float)) else torch.as_tensor(span, dtype=start.dtype)
    end = float(span) if isinstance(span, (int, float)) else float(torch.as_tensor(span)[-1])
    if not end > 0:
        raise ValueError(f"span is {span}, expected a positive last time")
    troubles: list[str] = []
    known: dict[bytes, np.ndarray] = {}  # the last field, which the event asks for again

    def right_hand_side(_: float, x: np.ndarray) -> np.ndarray:
        place = x.tobytes()
        if place not in known:
            found = evaluated(x)
            known.clear()
            known[place] = found
        return known[place]

    def evaluated(x: np.ndarray) -> np.ndarray:
        xi = torch.as_tensor(x.copy()).to(start)
        if not bool(_inside(family, chart, xi)):
            troubles.append("edge")
            return np.full_like(x, np.nan)
        found = field(xi)
        if not bool(torch.isfinite(found).all()):
            troubles.append("not finite")
            return np.full_like(x, np.nan)
        return found.numpy().astype(float)

    def at_rest(t: float, x: np.ndarray) -> float:
        found = right_hand_side(t, x)
        return float(np.abs(found).max() - rest * first) if np.isfinite(found).all() else 1.0

    at_rest.terminal = True  # type: ignore[attr-defined]
    solved = _solve(right_hand_side, end, start, wanted, at_rest, rtol, atol, method)
    points = torch.as_tensor(np.ascontiguousarray(solved.y.T)).to(start)
    values = function(chart.theta(points)).detach() if len(points) else start.new_zeros(0)
    status = {0: "end", 1: "rest"}.get(solved.status) or (troubles[-1] if troubles else "stuck")
    if bool((~torch.isfinite(values)).any()):
        status = "not finite"
    return Trajectory(torch.as_tensor(solved.t).to(start), points, values, status, _said(status, solved, end))


def _solve(
    field: Any, end: float, start: Tensor, wanted: Tensor | None, event: Any, rtol: float, atol: float, method: str
):
    try:
        from scipy.integrate import solve_ivp
    except ImportError as error:
        raise ImportError("flows are integrated by SciPy: pip install scipy") from error
    times = None if wanted is None else wanted.numpy()
    with np.errstate(all="ignore"):
        return solve_ivp(field, (0.0, end), start.numpy(), method, times, events=[event], rtol=rtol, atol=atol)


def _inside(family: ExponentialFamily, chart: Coordinates, xi: Tensor) -> Tensor:
    if not bool(torch.isfinite(xi).all()):
        return torch.zeros((), dtype=torch.bool)
    return chart.inside(xi) if chart.inside is not None else family.inside(chart.theta(xi))


def _said(status: str, solved: Any, end: float) -> str:
    last = float(solved.t[-1]) if len(solved.t) else 0.0
    return {
        "end": f"reached the last time, {end:g}",
        "rest": f"came to rest by t = {float(solved.t_events[0][-1]) if solved.t_events[0].size else last:g}",
        "edge": f"came to the edge of the domain after t = {last:g}",
        "not finite": f"the field or the function was not finite after t = {last:g}",
    }.get(status, f"the solver gave up after t = {last:g}: {solved.message}")


def paths(field: Field, starts: Tensor, times: Tensor, inside: Callable[[Tensor], Tensor], substeps: int = 5) -> Tensor:
    """The flow from many starts (m, n) at once, at all times (T,): (m, T, n), NaN after a row left the domain.

    By Runge and Kutta's rule of order 4 in `substeps` steps of one length between times: for pictures. `flow` is exact
    to a tolerance, and says why it ended.
    """
    now, moving = starts.clone(), inside(starts)
    kept = [now.clone()]
    for width in times.diff().tolist():
        for _ in range(substeps):
            _advance(field, now, moving, width / substeps, inside)
        kept.append(torch.where(moving.unsqueeze(1), now, torch.nan))
    return torch.stack(kept, dim=1)


def destinations(
    field: Field, starts: Tensor, span: float, inside: Callable[[Tensor], Tensor], steps: int = 400
) -> Tensor:
    """Where the flow from every start (m, n) is at the last time, or where it left the domain: for basins.

    As `paths`: no more exact than a picture needs.
    """
    now, moving = starts.clone(), inside(starts)
    for _ in range(steps):
        _advance(field, now, moving, span / steps, inside)
    return now


def _advance(field: Field, points: Tensor, moving: Tensor, h: float, inside: Callable[[Tensor], Tensor]) -> None:
    """One step in place of the rows that move; those that leave stay where they were, and move no more."""
    if not bool(moving.any()):
        return
    now = points[moving]
    stages, valid = [field(now)], torch.ones(len(now), dtype=torch.bool)
    for part in (h / 2, h / 2, h):
        at = now + part * stages[-1]
        good = inside(at) & torch.isfinite(at).all(1)
        valid &= good
        stages.append(field(torch.where(good.unsqueeze(1), at, now)))
    new = now + h / 6 * (stages[0] + 2 * stages[1] + 2 * stages[2] + stages[3])
    valid &= torch.isfinite(new).all(1) & inside(new)
    points[moving] = torch.where(valid.unsqueeze(1), new, now)
    moving[moving.clone()] = valid


def draw_levels(axes: Any, function: Function, x: tuple[float, float], y: tuple[float, float], **style: Any) -> None:
    """Level lines of a function of the plane's points (m, 2) -> (m,) on matplotlib axes. levels: how many, or which."""
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
    """Arrows of a field at count x count points. length: "true" lengths, their "root", or all the "same"."""
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
    """A way (T, 2) as a line with a dot at its start and an arrow half-way along."""
    points = points[torch.isfinite(points).all(1)]
    (line,) = axes.plot(*points.T.numpy(), **{"linewidth": 1.6, **style})
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
    """Colour every point of a lattice by the goal (k, 2) nearest to where it ends; ends (count^2, 2), rows along x."""
    nearest = torch.cdist(ends, goals).argmin(1)
    count = math.isqrt(len(ends))
    from matplotlib.colors import ListedColormap

    image = nearest.view(count, count).numpy()
    axes.imshow(
        image, origin="lower", extent=(*x, *y), cmap=ListedColormap(list(colours)), vmin=-0.5, vmax=len(goals) - 0.5,
        alpha=0.16, aspect="auto", interpolation="nearest", zorder=0,
    )  # fmt: skip


def lattice(x: tuple[float, float], y: tuple[float, float], count: int) -> Tensor:
    """The centres (count^2, 2) of a lattice over a rectangle, rows along x: the starts for `draw_basins`."""
    ticks = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    b, a = torch.meshgrid(y[0] + (y[1] - y[0]) * ticks, x[0] + (x[1] - x[0]) * ticks, indexing="ij")
    return torch.stack([a.flatten(), b.flatten()], dim=1)


def _lattice(x: tuple[float, float], y: tuple[float, float], count: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b = (torch.linspace(*ends, count, dtype=torch.float64) for ends in (x, y))
    rows, columns = torch.meshgrid(b, a, indexing="ij")
    return a, b, torch.stack([columns.flatten(), rows.flatten()], dim=1)
