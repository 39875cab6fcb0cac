"""One gradient flow, Euclidean or natural, integrated to a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypedDict, Unpack, cast

import numpy as np
import torch
from torch import Tensor

from natgrad.families import ExponentialFamily
from natgrad.flows.coordinates import FlowCoordinates, natural_coordinates
from natgrad.flows.expectation import Function
from natgrad.ground.checks import Group, check_integer, check_positive, check_precision, read_groups
from natgrad.ground.linalg import is_positive_definite, solve_or_nan
from natgrad.ground.pure import set_modes_aside
from natgrad.ground.spaces import check_recorded
from natgrad.ground.typed_torch import as_tensor_like

Field = Callable[[Tensor], Tensor]  # of points (..., n) -> (..., n)


def flow_field(
    function: Function,
    family: ExponentialFamily,
    coordinates: FlowCoordinates | None = None,
    *,
    natural: bool = True,
    maximise: bool = False,
) -> Field:
    """dxi/dt of the flow of F(theta): -G^-1 dF/dxi, G the Fisher matrix in these coordinates, or G = 1.

    Args:
        function: F of natural parameters (..., n) -> (...), with gradients.
        family: The distributions.
        coordinates: xi; default the natural parameters.
        natural: True for the natural gradient; False for the Euclidean one, which depends on the coordinates.
        maximise: True to ascend.

    Returns:
        A function of points (..., n) -> (..., n).
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
            velocity = solve_or_nan(slope, inner)
        else:
            velocity = slope.mT @ gradient
        return sign * velocity.squeeze(-1).detach()

    return field


@dataclass(frozen=True)
class Trajectory:
    """A flow from its start to where it ended.

    Attributes:
        times: Shape (T,).
        points: In the flow's coordinates, shape (T, n).
        values: Of F, shape (T,).
        status: "end" of the time; "rest", if the field had vanished; "edge" of the domain; "not finite", if field or F
            are not; "stuck", if the solver gave up, or had asked for the field too often.
        message: The same in a sentence.
    """

    times: Tensor
    points: Tensor
    values: Tensor
    status: str
    message: str


@dataclass(frozen=True)
class Integrator:
    """SciPy's adaptive solver, and when a flow has come to rest.

    Args:
        rtol: Relative tolerance. None: 1e-10 in double precision, 1e-5 in single.
        atol: Absolute tolerance. None: a hundredth of that.
        method: Of `scipy.integrate.solve_ivp`; "LSODA" for stiff flows.
        rest: The flow has come to rest where the field's largest entry is below this part of what it was at first.
            None: 1e-9 in double precision, 1e-4 in single.
        evaluations: Of the field, at most. Near the edge of a family its Fisher matrix is nearly singular, and the
            natural field is not known to the tolerance: steps that reach it would have no end.
    """

    rtol: float | None = None
    atol: float | None = None
    method: str = "DOP853"
    rest: float | None = None
    evaluations: int = 5000

    def __post_init__(self) -> None:
        check_integer("evaluations", self.evaluations)

    def fit_to(self, dtype: torch.dtype) -> Integrator:
        """The same with numbers in place of None: a field in single precision is known to some 1e-6 of itself.

        Args:
            dtype: Of the points.
        """
        rtol, rest = (1e-10, 1e-9) if dtype == torch.float64 else (1e-5, 1e-4)
        return replace(
            self,
            rtol=rtol if self.rtol is None else self.rtol,
            atol=rtol / 100 if self.atol is None else self.atol,
            rest=rest if self.rest is None else self.rest,
        )

    def solve(self, field: Any, end: float, start: np.ndarray, wanted: np.ndarray | None, rest: Any) -> SolverPath:
        """SciPy's solution of dx/dt = field(t, x), as far as it comes: to the end, to rest, or until a step fails.

        Args:
            field: A function of the time and a point, in NumPy; NaN where a step must not go.
            end: The last time.
            start: Shape (n,).
            wanted: Times (T,) at which points are wanted; None for those of the solver.
            rest: A function of the time and a point that changes its sign where the flow has come to rest.

        Raises:
            ImportError: If SciPy is not installed.
            ValueError: If it has no such method.
        """
        try:
            from scipy.integrate import BDF, DOP853, LSODA, RK23, RK45, Radau
        except ImportError as error:
            raise ImportError("flows are integrated by SciPy: pip install scipy") from error
        methods = {each.__name__: each for each in (DOP853, RK45, RK23, LSODA, Radau, BDF)}
        if self.method not in methods:
            raise ValueError(f"method is {self.method!r}, expected one of {', '.join(methods)}")
        known: Any = self.fit_to(torch.float64)
        path = SolverPath([0.0], [start]) if wanted is None or 0.0 in wanted else SolverPath([], [])
        with np.errstate(all="ignore"):
            solver: Any = methods[self.method](field, 0.0, start, end, rtol=known.rtol, atol=known.atol)
            before = rest(solver.t, solver.y)
            while solver.status == "running" and path.status == "end":
                try:
                    path.message = solver.step() or ""
                except (ValueError, np.linalg.LinAlgError) as error:  # how implicit methods take a field that is NaN
                    if np.isfinite(solver.fun(solver.t, solver.y)).all() and "infs or NaNs" not in str(error):
                        raise
                    solver.status, path.message = "failed", str(error)
                if solver.status == "failed" or not np.isfinite(solver.y).all():
                    path.status = "stuck"
                    break
                after, path.last = rest(solver.t, solver.y), solver.t
                if before > 0 >= after:
                    between = solver.dense_output()
                    path.last = find_root(lambda t, x=between: rest(t, x(t)), solver.t_old, solver.t)
                    path.status = "rest"
                due = wanted if wanted is not None else np.array([path.last])
                due = due[(due > solver.t_old) & (due <= path.last)]
                path.times += due.tolist()
                if len(due):
                    path.points += list(solver.dense_output()(due).T) if due[0] < solver.t else [solver.y]
                before = after
        return path


@dataclass
class SolverPath:
    """Where a solver came: times, points (n,), the last time, the status as that of a `Trajectory`, SciPy's message."""

    times: list[float]
    points: list[np.ndarray]
    last: float = 0.0
    status: str = "end"
    message: str = ""


def find_root(function: Any, low: float, high: float) -> float:
    """Where a function that is positive at `low`, and not at `high`, changes its sign, by bisection."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


class IntegratorOptions(TypedDict, total=False):
    """Keywords of `flow` for its solver."""

    integrator: Integrator
    rtol: float | None
    atol: float | None
    method: str
    rest: float | None
    evaluations: int


OWN = ("function", "family", "start", "span", "coordinates", "natural", "maximise")
GROUPS = {"integrator": Group(Integrator())}


@set_modes_aside
def flow(
    function: Function,
    family: ExponentialFamily,
    start: Tensor,
    span: float | Sequence[float] | Tensor,
    coordinates: FlowCoordinates | None = None,
    *,
    natural: bool = True,
    maximise: bool = False,
    **solver: Unpack[IntegratorOptions],
) -> Trajectory:
    """The gradient flow of F(theta) from one start, by an adaptive solver of SciPy.

    Args:
        function: F of natural parameters (..., n) -> (...), with gradients.
        family: The distributions.
        start: In these coordinates, shape (n,).
        span: The last time, or all times (increasing, from 0) at which points are wanted.
        coordinates: Where the flow runs; default the natural parameters.
        natural: True for the natural gradient; False for the Euclidean one.
        maximise: True to ascend.
        **solver: The five that follow, one by one or as `integrator=Integrator(...)`.
        rtol: Relative tolerance of the solver, default 1e-10, and 1e-5 from a start in single precision.
        atol: Absolute tolerance of the solver, default a hundredth of that.
        method: Of SciPy, default "DOP853"; "LSODA" for stiff flows.
        rest: The flow has come to rest where the field's largest entry is below this part of what it was at first;
            default 1e-9, and 1e-4 in single precision.
        evaluations: Of the field, at most, default 5000; a flow that would need more ends as "stuck".

    Raises:
        TypeError: If a keyword is none of these.
        TypeError: If the start is no tensor.
        ValueError: If the start is outside of the domain, the last time is not positive, or times do not increase; for
            a natural flow of statistics that depend on one another, as those of `Categorical`.
        ImportError: If SciPy is not installed.

    Example:
        >>> flows, family = ng.flows, ng.Ising(2, [(0,), (1,)])
        >>> F = flows.expected_value(family, lambda x: x[:, 0] + 2 * x[:, 1])
        >>> path = flows.flow(F, family, torch.zeros(2, dtype=torch.float64), 3.0)
        >>> path.status, bool(path.values[-1] < path.values[0])
        ('end', True)
    """
    if not isinstance(start, Tensor):
        raise TypeError(f"start is {type(start).__name__}, expected a tensor (n,): torch.tensor(start).double()")
    start, chosen = start.detach(), read_groups("flow", GROUPS, solver, OWN)["integrator"]
    check_precision("start", start.dtype, "call start.double()")
    check_recorded("start", start)
    integrator: Integrator = chosen.fit_to(start.dtype)
    rtol, rest = cast(float, integrator.rtol), cast(float, integrator.rest)
    chart = coordinates or natural_coordinates(family)
    if start.dim() != 1 or not bool(_is_inside(family, chart, start)):
        raise ValueError(f"start {start.tolist()} is not one point inside the domain of the coordinates {chart.name!r}")
    if natural and not bool(is_positive_definite(family.covariance(chart.theta(start)))):
        raise ValueError(family.explain_singular())
    field = flow_field(function, family, chart, natural=natural, maximise=maximise)
    first = float(field(start).abs().max())
    if isinstance(span, (int, float)):
        wanted, end = None, float(span)
    else:
        wanted = torch.as_tensor(span, dtype=start.dtype)
        if wanted.dim() != 1 or not len(wanted) or not bool((wanted.diff() > 0).all() and wanted[0] >= 0):
            raise ValueError(f"span is {span}, expected times that increase from 0 on, or the last time")
        end = float(wanted[-1])
    check_positive("span", end, hint=", the last time")
    troubles: list[str] = []
    asked = 0

    @lru_cache(maxsize=1)  # the event asks for the last one again
    def find_velocity(place: bytes) -> np.ndarray:
        nonlocal asked
        asked += 1
        xi = as_tensor_like(np.frombuffer(place).copy(), start)
        if asked > integrator.evaluations:
            troubles.append("stuck")
        elif not bool(_is_inside(family, chart, xi)):
            troubles.append("edge")
        elif bool(torch.isfinite(velocity := field(xi)).all()):
            return velocity.numpy().astype(float)
        else:
            troubles.append("not finite")
        return np.full(len(start), np.nan)  # which no solver steps over

    def right_hand_side(_: float, x: np.ndarray) -> np.ndarray:
        return find_velocity(x.tobytes())

    def at_rest(t: float, x: np.ndarray) -> float:
        velocity = right_hand_side(t, x)
        return float(np.abs(velocity).max() - rest * first) if np.isfinite(velocity).all() else 1.0

    times = None if wanted is None else wanted.numpy()
    solved = integrator.solve(right_hand_side, end, start.numpy(), times, at_rest)
    points = as_tensor_like(np.array(solved.points).reshape(-1, len(start)), start)
    values = function(chart.theta(points)).detach() if len(points) else start.new_zeros(0)
    status = troubles[-1] if solved.status == "stuck" and troubles else solved.status
    if bool((~torch.isfinite(values)).any()):
        status = "not finite"
    last = solved.last
    message = {
        "end": f"reached the last time, {end:g}",
        "rest": f"came to rest by t = {last:g}",
        "edge": f"came to the edge of the domain after t = {last:g}",
        "not finite": f"the field or the function was not finite after t = {last:g}",
        "stuck": f"the solver gave up after t = {last:g}: {solved.message}",
    }[status]
    if status == "stuck" and asked > integrator.evaluations:
        message = (
            f"the field was evaluated {integrator.evaluations} times by t = {last:g}, which is all that is allowed: "
            f"{_advise(field, points[-1] if len(points) else start, rtol)}"
        )
    return Trajectory(as_tensor_like(np.array(solved.times), start), points, values, status, message)


def _advise(field: Field, point: Tensor, rtol: float) -> str:
    """What helps: a looser tolerance where the field changes by more than that within round-off of a point."""
    here, eps = field(point), torch.finfo(point.dtype).eps
    noise = max(float((field(point * (1 + k * eps)) - here).abs().max() / here.abs().max()) for k in range(1, 5))
    if noise > rtol:
        return f"the field is known to {noise:.1g} of itself there, take a larger rtol than {rtol:g}"
    return 'give more evaluations=, or method="LSODA" if the flow is stiff'


def _is_inside(family: ExponentialFamily, chart: FlowCoordinates, xi: Tensor) -> Tensor:
    if not bool(torch.isfinite(xi).all()):
        return torch.zeros((), dtype=torch.bool)
    return chart.inside(xi) if chart.inside is not None else family.inside(chart.theta(xi))


# Flows from many starts at once, as exactly as a picture needs


def paths(field: Field, starts: Tensor, times: Tensor, inside: Callable[[Tensor], Tensor], substeps: int = 5) -> Tensor:
    """The flow from many starts at once, at all times: (m, T, n), NaN after a row left the domain.

    By Runge and Kutta's rule of order 4 in `substeps` steps of one length between times: for pictures. `flow` is exact
    to a tolerance, and says why it ended.

    Args:
        field: From `flow_field`.
        starts: Shape (m, n).
        times: Increasing, shape (T,).
        inside: Points (m, n) -> which of them lie in the domain, (m,) of bool.
        substeps: Steps between two times.
    """
    now, moving = starts.clone(), inside(starts)
    points = [now.clone()]
    for width in times.diff().tolist():
        for _ in range(substeps):
            _advance(field, now, moving, width / substeps, inside)
        points.append(torch.where(moving.unsqueeze(1), now, torch.nan))
    return torch.stack(points, dim=1)


def destinations(
    field: Field, starts: Tensor, span: float, inside: Callable[[Tensor], Tensor], steps: int = 400
) -> Tensor:
    """The points (m, n) where the flow from every start is at the last time, or where it left the domain: for basins.

    As `paths`: no more exact than a picture needs.

    Args:
        field: From `flow_field`.
        starts: Shape (m, n).
        span: The last time.
        inside: Points (m, n) -> which of them lie in the domain, (m,) of bool.
        steps: Of one length.
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
