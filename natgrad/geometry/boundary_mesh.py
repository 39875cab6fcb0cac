"""Ways to a given point: x'' = f(x, x') on a mesh, by sweeps, and by Newton's method for long ways."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.polynomial import legendre
from torch import Tensor

from natgrad.families import ExponentialFamily
from natgrad.geometry.base import Manifold
from natgrad.geometry.ode import integrate_wide
from natgrad.ground.derivatives import exact_derivatives
from natgrad.ground.linalg import (
    factor_or_nan,
    fit_or_nan,
    has_derivatives,
    invert_or_nan,
    require_solution,
    solve_or_nan,
)
from natgrad.ground.pure import compute_exactly

DEGREE = 8
"""Nodes of an element, those of Gauss."""
MESHES = (4, 8, 16, 32, 64)
"""Elements of the meshes; the first is that of the search, the next ones are refinements."""
DRIFT = 1e-7
"""Relative change of |x'|^2 along a way that is believed: the velocity is then known to its square."""
SWEEPS, MEMORY, SWEPT = 80, 10, 1e-12
"""Sweeps at most, past ones that the next is made of, and the misfit at which they end."""
STEPS, HALVINGS = 15, 8
"""Of Newton's method at most, and of one step."""
GRID, PASSES = 128, 4
"""Chords of a first path, and how often its parts are moved to even distances."""
UNKNOWNS = 3000
"""Largest linear system."""
ENTRIES = 2e7
"""Entries of the matrices of a batch that are held at once."""
ENOUGH, SETTLED = 1e-11, 1e-7
"""Misfits of the equation over |x'|^2 at which Newton's method ends, and that are believed where round-off stops it."""
WIDTH = 1e-4
"""Of differences, in units of the metric."""
FEW = 16
"""Statistics of a family whose matrix of second derivatives is taken column by column: 85 to 120 ms for 146 to 254."""


@dataclass(frozen=True)
class Mesh:
    """Linear maps of x'' at the nodes (N,), polynomials of degree 7 on elements of one length."""

    nodes: Tensor  # times in [0, 1]
    place: Tensor  # to x - line at the nodes; line is the straight way
    speed: Tensor  # to x' - away at the nodes; away is its velocity
    first: Tensor  # to x'(0) - away
    refined: Tensor  # to x'' at the nodes of a mesh twice as fine


def connect(equation: Callable[[Tensor], Geodesics], start: Tensor, end: Tensor) -> Tensor:
    """x'(0) (b, n) of solutions from start at time 0 to end at time 1; NaN in rows where none was found."""
    # near points by sweeps on a coarse mesh; where these do not settle, by Newton's method from the equation's first
    # path, gone at an even pace; then the mesh is refined until |x'| is constant along the way
    velocity, everyone = torch.full_like(start, torch.nan), torch.arange(len(start), device=start.device)
    mesh = build_mesh(MESHES[0], start)
    u = Path(equation(everyone), mesh, start, end - start).sweep(start.new_zeros(len(start), len(mesh.nodes), 1))
    far = torch.isnan(u).flatten(1).any(1).nonzero().squeeze(1)
    if len(far) and u[0].numel() <= UNKNOWNS:
        path = Path(equation(far), mesh, start[far], (end - start)[far])
        u[far] = path.solve(path.through(path.equation.path(space_evenly(path.equation, start[far], mesh.nodes))))
    rows = everyone
    for elements in MESHES:
        known = ~torch.isnan(u).flatten(1).any(1)
        u, rows = u[known], rows[known]
        if not len(rows):
            break
        path = Path(equation(rows), build_mesh(elements, start), start[rows], end[rows] - start[rows])
        fine = path.keeps_speed(u)
        velocity[rows[fine]] = path.velocity(u)[fine]
        if elements == MESHES[-1]:
            break
        u, rows = path.mesh.refined @ u[~fine], rows[~fine]
        path = Path(equation(rows), build_mesh(2 * elements, start), start[rows], end[rows] - start[rows])
        u = path.solve(u)
    return velocity


def descend(
    measure: Callable[[Tensor], tuple[Tensor, Tensor]],
    find_step: Callable[[Tensor, Tensor], Tensor],
    u: Tensor,
    enough: float,
    believed: float,
) -> Tensor:
    """Newton's method from u (k, ...), each step halved where a whole one is worse; NaN in rows that do not arrive."""
    residual, left = measure(u)
    moving = left > enough  # false for a row that is lost
    for _ in range(STEPS):
        if not bool(moving.any()):
            break
        step = torch.where(_widen(moving, u), find_step(u, residual), 0.0)
        rate, tried, size = torch.ones_like(left), u, left
        for _ in range(HALVINGS):
            tried = u + _widen(rate, u) * step
            residual, size = measure(tried)
            worse = ~(size < left) & moving
            if not bool(worse.any()):
                break
            rate = torch.where(worse, rate / 2, rate)
        better = size < left
        u = torch.where(_widen(better | ~moving, u), tried, u)
        left = torch.where(better, size, left)
        moving = moving & better & (left > enough)
    return torch.where(_widen(left <= believed, u), u, torch.nan)


def _widen(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1, *(1,) * (like.dim() - 1))


def space_evenly(equation: Geodesics, start: Tensor, time: Tensor) -> Tensor:
    """The parts (k, N) of an equation's first path where times (N,) lie, 0 < t < 1, if it is gone at an even pace."""
    even = torch.linspace(0, 1, GRID + 1, dtype=start.dtype, device=start.device).expand(len(start), -1)
    grid = even
    for _ in range(PASSES):  # moved to where the lengths of chords say
        at = equation.path(grid)
        chord, metric = at.diff(dim=1), equation.metric(at)
        middle = (metric[:, 1:] + metric[:, :-1]) / 2
        length = measure_square(middle, chord).clamp(min=0).sqrt()
        total = torch.nn.functional.pad(length.cumsum(1), (1, 0))
        grid = interpolate(even, total / total[:, -1:], grid)
    grid = torch.where(torch.isfinite(grid).all(1, keepdim=True), grid, even)
    left = (time * GRID).long().expand(len(start), -1)
    t = time * GRID - left
    slope = torch.cat([grid[:, 1:2] - grid[:, :1], (grid[:, 2:] - grid[:, :-2]) / 2, grid[:, -1:] - grid[:, -2:-1]], 1)
    (a, b), (c, d) = ((each.gather(1, left), each.gather(1, left + 1)) for each in (grid, slope))
    return (a + t * (c + t * (3 * (b - a) - 2 * c - d + t * (2 * (a - b) + c + d)))).clamp(0, 1)  # cubic: a way bends


def measure_square(metric: Tensor, vector: Tensor) -> Tensor:
    """v^T G v, (..., n) -> (...)."""
    return ((metric @ vector.unsqueeze(-1)).squeeze(-1) * vector).sum(-1)


def interpolate(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Linear interpolation at x (k, N) of values at ascending places, (k, M) each."""
    right = torch.searchsorted(places.contiguous(), x.contiguous()).clamp(1, places.shape[1] - 1)
    (a, b), (u, v) = ((each.gather(1, right - 1), each.gather(1, right)) for each in (places, values))
    return u + (x - a) / (b - a).clamp(min=1e-300) * (v - u)


class Path:
    """Ways from start (k, n) with the mean velocity away (k, n) as functions of x'' at the nodes, u (k, N, n)."""

    def __init__(self, equation: Geodesics, mesh: Mesh, start: Tensor, away: Tensor) -> None:
        self.equation, self.mesh, self.away = equation, mesh, away.unsqueeze(1)
        self.line = start.unsqueeze(1) + mesh.nodes.view(1, -1, 1) * self.away

    def through(self, at: Tensor) -> Tensor:
        """The x'' with which the way goes through points (k, N, n) at the nodes."""
        return solve_or_nan(self.mesh.place, at - self.line)

    def velocity(self, u: Tensor) -> Tensor:
        """x'(0), (k, n)."""
        return self.away.squeeze(1) + torch.einsum("k,bkn->bn", self.mesh.first, u)

    def keeps_speed(self, u: Tensor) -> Tensor:
        """True where |x'|^2 changes by `DRIFT` of itself at most along the way, (k,); false for NaN."""
        at, speed = self._way(u)
        squares = measure_square(self.equation.metric(at), speed)
        return squares.amax(1) - squares.amin(1) <= DRIFT * squares.amax(1)

    def sweep(self, u: Tensor) -> Tensor:
        """The fixed point of x'' <- f(x, x') from u, accelerated (Anderson 1965); NaN in rows that do not settle."""
        u = u.expand(self.line.shape)
        pasts: list[Tensor] = []  # u and its residual, for the last few sweeps
        residuals: list[Tensor] = []
        settled = torch.zeros(len(u), dtype=torch.bool, device=u.device)
        for _ in range(SWEEPS):
            residual = self.equation.bend(*self._way(u)) - u
            size = residual.abs().amax((1, 2))
            settled = size <= SWEPT * (1 + u.abs().amax((1, 2)))
            ended = settled | ~torch.isfinite(size)
            if bool(ended.all()):
                break
            pasts, residuals = [*pasts, u][-MEMORY:], [*residuals, residual][-MEMORY:]
            u = torch.where(_widen(ended, u), u, _mix_pasts(pasts, residuals))
        return torch.where(_widen(settled, u), u, torch.nan)

    def solve(self, u: Tensor) -> Tensor:
        """Newton's method from u, sweeps where its systems are too large; NaN in rows that do not arrive."""
        if self.line[:1].numel() > UNKNOWNS:
            return self.sweep(u)
        return descend(self._misfit, self._find_step, u, ENOUGH, SETTLED)

    def _way(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.line + self.mesh.place @ u, self.away + self.mesh.speed @ u

    def _misfit(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """u - f at the nodes, and its length over |x'|^2: neither has a unit."""
        at, speed = self._way(u)
        residual, metric = u - self.equation.bend(at, speed), self.equation.metric(at)
        misfit, pace = (measure_square(metric, v).mean(1) for v in (residual, speed))
        return residual, misfit.sqrt() / pace

    def _find_step(self, u: Tensor, residual: Tensor) -> Tensor:
        """The steps s with s - f_x (place s) - f_v (speed s) = -residual, of a few ways at a time."""
        size, steps = u[0].numel(), []
        chunk = max(1, int(ENTRIES / size**2))
        for by_place, by_speed, left in zip(*(each.split(chunk) for each in (*self._slopes(u), residual)), strict=True):
            matrix = torch.einsum("kiab,ij->kiajb", by_place, self.mesh.place)
            matrix = matrix + torch.einsum("kiab,ij->kiajb", by_speed, self.mesh.speed)
            matrix = torch.eye(size, dtype=u.dtype, device=u.device) - matrix.reshape(-1, size, size)
            steps.append(-solve_or_nan(matrix, left.reshape(-1, size, 1)).view_as(left))
        return torch.cat(steps)

    def _slopes(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """f_x and f_v at the nodes, (k, N, n, n) each, by central differences along directions of length one."""
        at, speed = self._way(u)
        metric = self.equation.metric(at)
        factor = factor_or_nan(metric)
        basis = invert_or_nan(factor).movedim(-2, 0)  # rows of L^-1 are columns of L^-T: (n, k, N, n)
        length = measure_square(metric, speed).unsqueeze(-1).sqrt()
        places = self.equation.bend(
            torch.cat([at + WIDTH * basis, at - WIDTH * basis]), speed.expand(2 * len(basis), *speed.shape)
        )
        speeds = self.equation.bend(
            at.expand(2 * len(basis), *at.shape), torch.cat([speed + length * basis, speed - length * basis])
        )
        rises = [(ends[: len(basis)] - ends[len(basis) :]).movedim(0, -1) for ends in (places, speeds)]
        back = factor.mT
        return rises[0] / (2 * WIDTH) @ back, rises[1] / (2 * length.unsqueeze(-1)) @ back


def _mix_pasts(pasts: list[Tensor], residuals: list[Tensor]) -> Tensor:
    """The affine combination of the past points whose residuals nearly cancel, moved by what is left."""
    last, residual = pasts[-1], residuals[-1]
    if len(pasts) == 1:
        return last + residual
    steps = torch.stack([(last - p).flatten(1) for p in pasts[:-1]], dim=2).nan_to_num()
    changes = torch.stack([(residual - r).flatten(1) for r in residuals[:-1]], dim=2).nan_to_num()
    gram = changes.mT @ changes
    ridge = 1e-14 * gram.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-300)
    gram = gram + torch.diag_embed(ridge.unsqueeze(1).expand(gram.shape[:2]))
    weights = fit_or_nan(gram, changes.mT @ residual.flatten(1).nan_to_num().unsqueeze(2))
    return last + residual - ((steps + changes) @ weights).view_as(last)


@cache
def _matrices(elements: int) -> tuple[Tensor, ...]:
    """`Mesh`'s tensors on the CPU."""
    roots, _ = legendre.leggauss(DEGREE)
    to_coefficients = invert_or_nan(torch.from_numpy(legendre.legvander(roots, DEGREE - 1)))
    ends, halves = np.append(roots, 1.0), np.concatenate([(roots - 1) / 2, (roots + 1) / 2])
    unit = np.eye(DEGREE)
    once = legendre.legint(unit, scl=0.5, lbnd=-1)  # d/dt = 2 d/ds on an element of length one
    twice = legendre.legint(once, scl=0.5, lbnd=-1)
    values = (legendre.legval(*each) for each in ((ends, once), (ends, twice), (halves, unit)))
    within, beneath, finer = (torch.from_numpy(each).mT @ to_coefficients for each in values)
    h, n = 1 / elements, elements * DEGREE
    inner = torch.from_numpy((roots + 1) / 2)
    nodes = ((torch.arange(elements, dtype=torch.float64).view(-1, 1) + inner) * h).flatten()
    gap = torch.arange(elements).view(-1, 1) - torch.arange(elements) - 1  # elements between, -1 for the same
    before = (gap >= 0).double()
    same = torch.eye(elements, dtype=torch.float64)
    before_ends, before_ways = (torch.kron(before, each[-1].expand(DEGREE, -1)) for each in (within, beneath))
    speed = h * (before_ends + torch.kron(same, within[:-1]))
    rest = gap.view(elements, 1, elements) + inner.view(1, -1, 1)  # from the end of f to the node, in elements
    place = torch.einsum("ef,eif,j->eifj", before, rest, within[-1]).reshape(n, n)
    place = h**2 * (place + before_ways + torch.kron(same, beneath[:-1]))
    left = (elements - 1 - torch.arange(elements, dtype=torch.float64)).view(-1, 1)
    total = h**2 * (beneath[-1] + left * within[-1]).flatten()  # x(1) - x(0) - x'(0)
    return nodes, place - nodes.view(-1, 1) * total, speed - total, -total, torch.kron(same, finer)


def build_mesh(elements: int, like: Tensor) -> Mesh:
    """That many elements, in the dtype and on the device of a tensor."""
    return Mesh(*(each.to(like) for each in _matrices(elements)))


# Manifolds whose geodesics are known from their start alone


@compute_exactly
class Shooting(Manifold):
    """`_arrive` gives a geodesic's end and velocity; `log` solves for the start. First derivatives are exact."""

    @abstractmethod
    def _arrive(self, point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        """The geodesic at time 1: where it is, and its velocity there."""

    @abstractmethod
    def _aim(self, point: Tensor, other: Tensor) -> Tensor:
        """`log`, for detached points (b, n), in float64 where there is one; NaN in rows without a way."""

    def exp(self, point: Tensor, tangent: Tensor) -> Tensor:
        return self._arrive(point, tangent)[0]

    def log(self, point: Tensor, other: Tensor) -> Tensor:
        """The velocity with which the geodesic from `point` reaches `other`, computed in float64.

        Returns:
            A tangent at `point`. NaN, and a warning, for pairs of a batch without a way.

        Raises:
            ValueError: Where no pair has a way: the points are too far apart for the work that is allowed.
        """
        point, other = torch.broadcast_tensors(self.check(point), self.check(other))
        flat, goal = (x.detach().reshape(-1, point.shape[-1]) for x in (point, other))
        if point.device.type != "mps":
            flat, goal = flat.double(), goal.double()
        velocity = self._aim(flat, goal)
        lost, many = int(torch.isnan(velocity).any(1).sum()), len(velocity)
        words = f"no geodesic of {self!r} was found between {lost} of {many} pairs of points within the work allowed"
        if lost and lost == many:
            raise ValueError(f"{words}: they are too far apart; go by a point between them")
        if lost:
            warnings.warn(f"{words}: NaN there; they are too far apart, go by points between them", stacklevel=3)
        velocity = velocity.to(point.dtype).view(point.shape)
        if not (has_derivatives(point) or has_derivatives(other)):
            return velocity
        at, units = point.detach(), torch.eye(point.shape[-1], dtype=point.dtype, device=point.device)
        arrive = partial(self.exp, at)
        columns = [torch.func.jvp(arrive, (velocity,), (u.expand_as(at).contiguous(),))[1] for u in units]
        gap = other - self.exp(point, velocity)  # zero, but for its derivatives: those of the root of exp(point, v) = q
        slope = torch.stack(columns, dim=-1).detach()
        return velocity + solve_or_nan(slope, (gap - gap.detach()).unsqueeze(-1)).squeeze(-1)

    def distance(self, point: Tensor, other: Tensor) -> Tensor:
        """With gradients by the first variation: -G v / d at the start, G v' / d at the end."""
        velocity = self.log(point.detach(), other.detach())
        length = self.norm(point.detach(), velocity)
        if not (has_derivatives(point) or has_derivatives(other)):
            return length
        end = self._arrive(point.detach(), velocity)[1].detach()
        moved = self.inner(other.detach(), end, other - other.detach())
        moved = moved - self.inner(point.detach(), velocity, point - point.detach())
        return length + moved / torch.where(length > 0, length, 1.0)

    def transport(self, point: Tensor, other: Tensor, vector: Tensor) -> Tensor:
        return self.carry(point, self.log(point, other), vector)[1]


@compute_exactly
class NaturalParameters(Shooting):
    """Any exponential family, points theta, by the equations of its geodesics.

    theta'' = -1/2 I^-1 (D_theta' I) theta': the Christoffel symbols are half the third derivatives of psi, raised.
    Integrated adaptively, to 1e-11; NaN where a geodesic leaves the domain; `log` on a mesh,
    coarse to fine.

    Args:
        family: The exponential family.
    """

    def __init__(self, family: ExponentialFamily) -> None:
        self.family, self.size = family, family.size
        self.domain = family.domain

    def inner(self, point: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (first * (self.family.covariance(point) @ second.unsqueeze(-1)).squeeze(-1)).sum(-1)

    def natural(self, point: Tensor, gradient: Tensor) -> Tensor:
        metric = self.family.covariance(point)
        return require_solution(metric, gradient.unsqueeze(-1), self.family.explain_singular()).squeeze(-1)

    def inside(self, point: Tensor) -> Tensor:
        return torch.isfinite(point).all(-1) & self.family.inside(point.nan_to_num())

    def _arrive(self, point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        return self._travel(point, tangent, tangent[..., :0])[:2]

    def carry(self, point: Tensor, tangent: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        end, _, carried = self._travel(point, tangent, vector)
        return end, carried

    def _aim(self, point: Tensor, other: Tensor) -> Tensor:
        return connect(lambda rows: Geodesics(self, point[rows], other[rows]), point, other)

    def curve(self, point: Tensor, tangent: Tensor) -> Tensor:
        """The straight line in theta, an e-geodesic: right to first order, shortened at the edge of the domain."""
        return point + tangent

    def _travel(self, point: Tensor, tangent: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, width = self.size, vector.shape[-1]
        batch = torch.broadcast_shapes(point.shape[:-1], tangent.shape[:-1], vector.shape[:-1])
        start = torch.cat([x.expand(*batch, x.shape[-1]) for x in (point, tangent, vector)], dim=-1)
        anchor = start[..., :n].reshape(-1, n)

        def field(state: Tensor) -> Tensor:
            at, speed, carried = state.split([n, n, width], dim=-1)
            inside = self.inside(at).unsqueeze(-1)
            safe = torch.where(inside, at, anchor.to(at))
            both = (speed, carried) if width else (speed,)
            bends = contract_christoffel(self.family, safe, speed, both)
            return torch.where(inside, torch.cat([speed, *bends], dim=-1), torch.nan)

        end = integrate_wide(field, start.reshape(-1, start.shape[-1])).view(start.shape)
        squares = []  # |theta'|^2, which no geodesic changes: a step over the edge, where it is infinite, ends anywhere
        for at, speed in (x.detach().split(n, -1)[:2] for x in (start, end)):
            inside = self.inside(at)
            squares.append(speed.new_full(inside.shape, torch.nan))
            squares[-1][inside] = self.inner(at[inside], speed[inside], speed[inside])
        same = (squares[1] - squares[0]).abs() <= 1e-6 * squares[0]
        end = torch.where(same.unsqueeze(-1), end, torch.nan)
        return end[..., :n], end[..., n : 2 * n], end[..., 2 * n :]

    def __repr__(self) -> str:
        return f"NaturalParameters({self.family!r})"


class Geodesics:
    """x'' = f(x, x') for k pairs of points (k, n), f quadratic in x', and the metric in which |x'| is constant."""

    def __init__(self, space: NaturalParameters, start: Tensor, end: Tensor) -> None:
        self.space, self.anchors, self.ends = space, start.unsqueeze(1), end.unsqueeze(1)

    def path(self, part: Tensor) -> Tensor:
        """A smooth way to begin with, at the parts (k, N) from 0 (the start) to 1 (the end): (k, N, n)."""
        # the mean of the straight lines in theta and in the expectations, which bends as a geodesic does
        family, part = self.space.family, part.unsqueeze(-1)
        straight = self.anchors + part * (self.ends - self.anchors)
        first, last = family.expectation(self.anchors), family.expectation(self.ends)
        try:
            mixed = family.natural(first + part * (last - first))
        except ValueError:  # means so near the edge that Newton's method does not know them
            return straight
        return torch.where(part * (1 - part) > 0, (straight + mixed) / 2, straight)

    def bend(self, at: Tensor, speed: Tensor) -> Tensor:
        """f, (..., k, N, n); NaN outside of the domain."""
        inside = self.space.inside(at).unsqueeze(-1)
        safe, n = torch.where(inside, at, self.anchors), at.shape[-1]
        flat = speed.reshape(-1, n)
        bend = contract_christoffel(self.space.family, safe.reshape(-1, n), flat, (flat,))[0]
        return torch.where(inside, bend.view(at.shape), torch.nan)

    def metric(self, at: Tensor) -> Tensor:
        """Shape (..., k, N, n, n); NaN outside of the domain."""
        inside = self.space.inside(at).unsqueeze(-1)
        metric = self.space.family.covariance(torch.where(inside, at, self.anchors))
        return torch.where(inside.unsqueeze(-1), metric, torch.nan)


def contract_christoffel(
    family: ExponentialFamily, point: Tensor, speed: Tensor, vectors: tuple[Tensor, ...]
) -> list[Tensor]:
    """-1/2 I^-1 (D_speed I) v for every v (b, n), at points (b, n)."""
    with exact_derivatives():  # of a psi with a determinant inside, torch's own are wrong
        metric, turned = turn_metric(family, point, speed, torch.stack(vectors, dim=-1))
    return list((-solve_or_nan(metric, turned) / 2).unbind(-1))


def turn_metric(family: ExponentialFamily, point: Tensor, speed: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """I, and (D_speed I) v for the columns v, from I where it is closed, else from derivatives of psi."""
    if type(family).covariance is not ExponentialFamily.covariance:
        metric, moved, *_ = torch.func.jvp(family.covariance, (point,), (speed,))
        return metric, moved @ vectors
    if family.size > FEW:
        return turn_large_metric(family, point, speed, vectors)
    metric, pull, *_ = torch.func.vjp(lambda theta: differentiate_twice(family, theta), point)
    turned = [pull(speed.unsqueeze(-1) * v.unsqueeze(-2))[0] for v in vectors.unbind(-1)]
    return metric, torch.stack(turned, dim=-1)


def differentiate_twice(family: ExponentialFamily, point: Tensor) -> Tensor:
    """I by a backward pass per column: for few statistics cheaper than batched transforms."""
    _, pull, *_ = torch.func.vjp(torch.func.grad(lambda theta: family.log_partition(theta).sum()), point)
    units = torch.eye(family.size, dtype=point.dtype, device=point.device)
    return torch.stack([pull(unit.expand_as(point))[0] for unit in units], dim=-1)


def turn_large_metric(
    family: ExponentialFamily, point: Tensor, speed: Tensor, vectors: Tensor
) -> tuple[Tensor, Tensor]:
    """As `turn_metric`: third derivatives of psi as the gradient of its second ones, with no matrix but I."""
    psi, jvp = family.log_partition, torch.func.jvp
    metric = family.covariance(point)  # first: a family may build its tables now, not inside a derivative

    def second(at: Tensor, v: Tensor) -> Tensor:
        return jvp(lambda t: jvp(psi, (t,), (v,))[1], (at,), (speed,))[1].sum()

    turned = [torch.func.grad(second)(point, v) for v in vectors.unbind(-1)]
    return metric, torch.stack(turned, dim=-1)
