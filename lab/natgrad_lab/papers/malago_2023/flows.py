"""Figures of Malago's lectures (2023): gradient flows of E_p[f] over models of bits and over normals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.families import ExponentialFamily, Ising, MultivariateNormal
from natgrad.flows import (
    FlowCoordinates,
    deviation_coordinates,
    expectation_coordinates,
    expected_value,
    flow,
    flow_field,
    lattice,
    natural_coordinates,
    paths,
    probability_coordinates,
)
from natgrad.ground.linalg import invert_or_nan, solve_or_nan
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Story
from natgrad_lab.experiments.settings import check_counts
from natgrad_lab.papers.malago_2023 import page as story

KINDS = {"Euclidean": False, "natural": True}
TOY = Ising(2, [(0,), (1,)])
LINE = MultivariateNormal(1)
PLANE = MultivariateNormal(2)


def toy(x: Tensor) -> Tensor:
    """x1 + 2 x2 + 3 x1 x2, slide 6."""
    return x[..., 0] + 2 * x[..., 1] + 3 * x[..., 0] * x[..., 1]


def quadratic(x: Tensor) -> Tensor:
    """x - 3 x^2."""
    return (x - 3 * x.square())[..., 0]


def quartic(x: Tensor) -> Tensor:
    """6 x + 8 x^2 - x^3 - 2 x^4."""
    return (6 * x + 8 * x.square() - x**3 - 2 * x**4)[..., 0]


SLOPE = torch.tensor([1.0, 2.0], dtype=torch.float64)
BOWL = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
COVARIANCE = torch.tensor([[1.0, -0.5], [-0.5, 2.0]], dtype=torch.float64)


def bowl(x: Tensor) -> Tensor:
    """x1 + 2 x2 - 3 x1^2 - 2 x1 x2 - 2 x2^2."""
    return x @ SLOPE - (x @ BOWL * x).sum(-1)


@dataclass(frozen=True)
class MalagoFlowSettings:
    """What `--set` can change."""

    starts: int = 4  # per axis; not given in the lectures
    span: float = 4.0  # the last time of a flow
    steps: int = 50  # points per trajectory that are kept
    lattice: int = 25  # per axis, for basins
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_counts(self, "starts", "steps", "lattice", least=2)
        if not self.span > 0:
            raise LabError(f"span is {self.span}, expected a positive time")


TOY_CHARTS = {"mu": probability_coordinates(TOY), "theta": natural_coordinates(TOY)}
TOY_VIEWS = {"mu": ((0.0, 1.0), (0.0, 1.0)), "theta": ((-1.5, 1.5), (-1.5, 1.5))}


def toy_flows(run: PieceRun) -> Numbers:
    """Descent from a lattice of starts, both kinds of gradient, both coordinates."""
    return _grid(run, {name: (TOY, toy, chart, TOY_VIEWS[name]) for name, chart in TOY_CHARTS.items()}, False)


def toy_same(run: PieceRun) -> Numbers:
    """How far the natural flows in mu, theta and eta are apart, in mu, over the starts."""
    value, worst = expected_value(TOY, toy), 0.0
    times = torch.tensor([0.0, 0.25], dtype=torch.float64)
    starts = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    for number, mu in enumerate(starts):
        run.advance(number / len(starts))
        theta = TOY_CHARTS["mu"].theta(mu)
        ours = flow(value, TOY, mu, times, TOY_CHARTS["mu"]).points
        others = (
            torch.sigmoid(2 * flow(value, TOY, theta, times).points),
            (flow(value, TOY, 2 * mu - 1, times, expectation_coordinates(TOY)).points + 1) / 2,
        )
        worst = max(worst, *(float((ours - other).abs().max()) for other in others))
    return {"apart": worst, "starts": len(starts)}


def _grid(run: PieceRun, cases: dict, maximise: bool) -> Numbers:
    """{case: {kind: [{points, values, status}]}} from a lattice of starts in the case's view."""
    s: MalagoFlowSettings = run.settings
    span = s.span / 3 if maximise else s.span  # over the line all is over sooner
    times, ways = span * torch.linspace(0, 1, s.steps, dtype=torch.float64) ** 2.5, {}  # dense where flows are fast
    for place, (name, (family, f, chart, view)) in enumerate(cases.items()):
        ways[name] = {}
        for number, (kind, natural) in enumerate(KINDS.items()):
            run.advance((place + number / 2) / len(cases))
            field = flow_field(expected_value(family, f), family, chart, natural=natural, maximise=maximise)
            starts = lattice(view[0], view[1], s.starts)
            ways[name][kind] = plain(paths(field, starts, times, domain(family, chart), 5 if maximise else 2))
    return ways


def domain(family: ExponentialFamily, chart: FlowCoordinates) -> Callable[[Tensor], Tensor]:
    """Which points the coordinates have."""
    return chart.inside or family.inside


def plain(ways: Tensor) -> list[Numbers]:
    """Trajectories (m, T, n) as plain numbers: points as long as they are inside, six digits, and whether all are."""
    numbers = []
    for way in ways:
        inside = torch.isfinite(way).all(1)
        points = [[float(f"{x:.6g}") for x in point] for point in way[inside].tolist()]
        numbers.append({"points": points, "status": "end" if bool(inside.all()) else "edge"})
    return numbers


LINE_CASES = {"quadratic": (quadratic, ((-1.0, 1.5), (0.0, 1.2))), "quartic": (quartic, ((-3.0, 3.0), (0.0, 1.8)))}


def line_flows(run: PieceRun) -> Numbers:
    """Ascent over univariate normals in (mean, standard deviation)."""
    chart = deviation_coordinates()
    return _grid(run, {name: (LINE, f, chart, view) for name, (f, view) in LINE_CASES.items()}, True)


def line_closed(run: PieceRun) -> Numbers:
    """The quadratic's natural flow beside its closed form, 1 / s^2 = 1 / s0^2 + 6 t."""
    times = torch.tensor([0.0, 0.1, 0.5, 1.0, 5.0], dtype=torch.float64)
    start = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    points = flow(expected_value(LINE, quadratic), LINE, start, times, deviation_coordinates(), maximise=True).points
    variance = 1 / (1 + 6 * times)
    closed = torch.stack([1 / 6 - 7 / 6 * variance, variance.sqrt()], dim=1)
    return {"times": times.tolist(), "ours": points.tolist(), "closed": closed.tolist()}


def moments() -> FlowCoordinates:
    """(mean; Sigma_11; Sigma_22; Sigma_12) of normals in two dimensions."""

    def matrix(xi: Tensor) -> Tensor:
        first, second, both = xi[..., 2:].unbind(-1)
        return torch.stack([torch.stack([first, both], -1), torch.stack([both, second], -1)], -2)

    def theta(xi: Tensor) -> Tensor:
        precision = invert_or_nan(matrix(xi))
        return torch.cat([(precision @ xi[..., :2].unsqueeze(-1)).squeeze(-1), PLANE.pack(-precision / 2)], -1)

    def inside(xi: Tensor) -> Tensor:
        return (xi[..., 2] > 0) & (xi[..., 2] * xi[..., 3] > xi[..., 4].square())

    return FlowCoordinates("mean and covariance", theta, None, inside)


def plane_flows(run: PieceRun) -> Numbers:
    """Ascent of the two-dimensional quadratic from means around the optimum, beside the closed form."""
    s: MalagoFlowSettings = run.settings
    times = torch.linspace(0, s.span, s.steps, dtype=torch.float64).square() / s.span  # dense where it starts
    value, chart, optimum = expected_value(PLANE, bowl, nodes=2), moments(), solve_or_nan(2 * BOWL, SLOPE)
    angles = torch.arange(2 * s.starts, dtype=torch.float64) * torch.pi / s.starts
    starts = optimum + 1.8 * torch.stack([angles.cos(), angles.sin()], 1)
    xi = torch.cat([starts, COVARIANCE[[0, 1, 0], [0, 1, 1]].expand(len(starts), 3)], dim=1)
    numbers: Numbers = {"gap": 0.0}
    for number, (kind, natural) in enumerate(KINDS.items()):
        run.advance(number / 3)
        field = flow_field(value, PLANE, chart, natural=natural, maximise=True)
        numbers[kind] = plain(paths(field, xi, times, domain(PLANE, chart), 3))
    for mean, start in zip(starts[:: s.starts], xi[:: s.starts], strict=True):
        way = flow(value, PLANE, start, times[:: s.steps // 8], chart, maximise=True)
        numbers["gap"] = max(numbers["gap"], float((way.points[:, :2] - closed_mean(mean, way.times)).abs().max()))
    return numbers


def closed_mean(mean: Tensor, times: Tensor) -> Tensor:
    """mu(t) of the natural flow: P(t) = P0 + 2 A t and P mu = P0 mu0 + b t."""
    precision = invert_or_nan(COVARIANCE)
    moved = precision + 2 * times.view(-1, 1, 1) * BOWL
    return solve_or_nan(moved, (precision @ mean + times.unsqueeze(1) * SLOPE).unsqueeze(-1)).squeeze(-1)


def _study(
    name: str, summary: str, pieces: tuple[Piece, ...], tell: Callable[[Findings], Story], minutes: float
) -> Experiment:
    return Experiment(name, summary, MalagoFlowSettings, lambda settings: pieces, tell, seeds=1, minutes=minutes)


def tell_toy(findings: Findings) -> Story:
    """The page of `malago_2023_toy`."""
    fields = {
        (name, kind): flow_field(expected_value(TOY, toy), TOY, chart, natural=natural)
        for name, chart in TOY_CHARTS.items()
        for kind, natural in KINDS.items()
    }
    values = {name: (lambda xi, c=chart: expected_value(TOY, toy)(c.theta(xi))) for name, chart in TOY_CHARTS.items()}
    insides = {name: chart.inside or TOY.inside for name, chart in TOY_CHARTS.items()}
    return story.toy(findings, fields, values, insides, TOY_VIEWS)


def tell_polynomials(findings: Findings) -> Story:
    """The page of `malago_2023_polynomials`."""
    chart = deviation_coordinates()
    fields = {
        (name, kind): flow_field(expected_value(LINE, f), LINE, chart, natural=natural, maximise=True)
        for name, (f, _) in LINE_CASES.items()
        for kind, natural in KINDS.items()
    }
    values = {name: (lambda xi, f=f: expected_value(LINE, f)(chart.theta(xi))) for name, (f, _) in LINE_CASES.items()}
    return story.polynomials(findings, fields, values, {name: view for name, (_, view) in LINE_CASES.items()})


def tell_quadratic(findings: Findings) -> Story:
    """The page of `malago_2023_quadratic`."""
    return story.quadratic(findings, bowl, solve_or_nan(2 * BOWL, SLOPE).tolist())


TOY_STUDY = _study(
    "malago_2023_toy",
    "Flows of f = x1 + 2 x2 + 3 x1 x2 over independent bits, Euclidean and natural, in two coordinates",
    (Piece("flows", "Flows", toy_flows, False), Piece("same", "Natural flows in three coordinates", toy_same, False)),
    tell_toy,
    0.15,
)
POLYNOMIALS = _study(
    "malago_2023_polynomials",
    "Flows of a quadratic and a quartic over univariate normals, Euclidean and natural",
    (Piece("flows", "Flows", line_flows, False), Piece("closed", "Beside the closed form", line_closed, False)),
    tell_polynomials,
    0.33,
)
QUADRATIC = _study(
    "malago_2023_quadratic",
    "Flows of a quadratic over normals in two dimensions, beside the closed form",
    (Piece("flows", "Flows", plane_flows, False),),
    tell_quadratic,
    0.22,
)
