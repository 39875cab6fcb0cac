"""One gradient flow, Euclidean or natural, integrated to a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from natgrad.applications.flows.coordinates import FlowCoordinates, natural_coordinates
from natgrad.applications.flows.expectation import Function
from natgrad.families import ExponentialFamily
from natgrad.keyword_settings import Group, read_groups
from natgrad.lapack import solve_or_nan
from natgrad.typed_torch import as_tensor_like

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
            found = solve_or_nan(slope, inner)
        else:
            found = slope.mT @ gradient
        return sign * found.squeeze(-1).detach()

    return field


@dataclass(frozen=True)
class Trajectory:
    """A flow from its start to where it ended.

    Attributes:
        times: Shape (T,).
        points: In the flow's coordinates, shape (T, n).
        values: Of F, shape (T,).
        status: "end" of the time; "rest", if the field had vanished; "edge" of the domain; "not finite", if field or F
            are not; "stuck", if the solver gave up.
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
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        method: Of `scipy.integrate.solve_ivp`; "LSODA" for stiff flows.
        rest: The flow has come to rest where the field's largest entry is below this part of what it was at first.
    """

    rtol: float = 1e-10
    atol: float = 1e-12
    method: str = "DOP853"
    rest: float = 1e-9

    def solve(self, field: Any, end: float, start: Tensor, wanted: Tensor | None, event: Any) -> Any:
        """SciPy's solution of dx/dt = field(t, x).

        Args:
            field: A function of the time and a point, in NumPy.
            end: The last time.
            start: Shape (n,).
            wanted: Times (T,) at which points are wanted; None for those of the solver.
            event: A function of the time and a point whose zero ends the flow.

        Raises:
            ImportError: If SciPy is not installed.
        """
        try:
            from scipy.integrate import solve_ivp
        except ImportError as error:
            raise ImportError("flows are integrated by SciPy: pip install scipy") from error
        times, span, first = None if wanted is None else wanted.numpy(), (0.0, end), start.numpy()
        with np.errstate(all="ignore"):
            return solve_ivp(field, span, first, self.method, times, events=[event], rtol=self.rtol, atol=self.atol)


class IntegratorOptions(TypedDict, total=False):
    """Keywords of `flow` for its solver."""

    integrator: Integrator
    rtol: float
    atol: float
    method: str
    rest: float


OWN = ("function", "family", "start", "span", "coordinates", "natural", "maximise")
GROUPS = {"integrator": Group(Integrator())}


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
        **solver: The four that follow, one by one or as `integrator=Integrator(...)`.
        rtol: Relative tolerance of the solver, default 1e-10.
        atol: Absolute tolerance of the solver, default 1e-12.
        method: Of SciPy, default "DOP853"; "LSODA" for stiff flows.
        rest: The flow has come to rest where the field's largest entry is below this part of what it was at first;
            default 1e-9.

    Raises:
        TypeError: If a keyword is none of these.
        ValueError: If the start is outside of the domain, or the last time is not positive.
        ImportError: If SciPy is not installed.

    Example:
        >>> flows, family = ng.applications.flows, ng.Ising(2, [(0,), (1,)])
        >>> F = flows.expected_value(family, lambda x: x[:, 0] + 2 * x[:, 1])
        >>> found = flows.flow(F, family, torch.zeros(2, dtype=torch.float64), 3.0)
        >>> found.status, bool(found.values[-1] < found.values[0])
        ('end', True)
    """
    integrator: Integrator = read_groups("flow", GROUPS, solver, OWN)["integrator"]
    chart = coordinates or natural_coordinates(family)
    if start.dim() != 1 or not bool(_is_inside(family, chart, start)):
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
            found = evaluate_field(x)
            known.clear()
            known[place] = found
        return known[place]

    def evaluate_field(x: np.ndarray) -> np.ndarray:
        xi = as_tensor_like(x.copy(), start)
        if not bool(_is_inside(family, chart, xi)):
            troubles.append("edge")
            return np.full_like(x, np.nan)
        found = field(xi)
        if not bool(torch.isfinite(found).all()):
            troubles.append("not finite")
            return np.full_like(x, np.nan)
        return found.numpy().astype(float)

    def at_rest(t: float, x: np.ndarray) -> float:
        found = right_hand_side(t, x)
        return float(np.abs(found).max() - integrator.rest * first) if np.isfinite(found).all() else 1.0

    at_rest.terminal = True  # type: ignore[attr-defined]
    solved = integrator.solve(right_hand_side, end, start, wanted, at_rest)
    points = as_tensor_like(np.ascontiguousarray(solved.y.T), start)
    values = function(chart.theta(points)).detach() if len(points) else start.new_zeros(0)
    status = {0: "end", 1: "rest"}.get(solved.status) or (troubles[-1] if troubles else "stuck")
    if bool((~torch.isfinite(values)).any()):
        status = "not finite"
    return Trajectory(as_tensor_like(solved.t, start), points, values, status, _describe_ending(status, solved, end))


def _is_inside(family: ExponentialFamily, chart: FlowCoordinates, xi: Tensor) -> Tensor:
    if not bool(torch.isfinite(xi).all()):
        return torch.zeros((), dtype=torch.bool)
    return chart.inside(xi) if chart.inside is not None else family.inside(chart.theta(xi))


def _describe_ending(status: str, solved: Any, end: float) -> str:
    last = float(solved.t[-1]) if len(solved.t) else 0.0
    return {
        "end": f"reached the last time, {end:g}",
        "rest": f"came to rest by t = {float(solved.t_events[0][-1]) if solved.t_events[0].size else last:g}",
        "edge": f"came to the edge of the domain after t = {last:g}",
        "not finite": f"the field or the function was not finite after t = {last:g}",
    }.get(status, f"the solver gave up after t = {last:g}: {solved.message}")
