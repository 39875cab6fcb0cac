"""Figures of Malago's lectures (2023): gradient flows of E_p[f] over models of bits and over normals, their pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import natgrad as ng
from natgrad.families import ExponentialFamily, Ising, MultivariateNormal
from natgrad.ground.linalg import invert_or_nan, solve_or_nan
from natgrad_lab.experiments import Experiment, Findings, Picture, Piece, PieceRun, Section, Story, Table
from natgrad_lab.experiments.records import Numbers
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive
from natgrad_lab.figures import GRID, INK, PALETTE

View = tuple[tuple[float, float], tuple[float, float]]
KINDS = {"Euclidean": False, "natural": True}
COLOUR = {"Euclidean": PALETTE[0], "natural": PALETTE[1]}
QUIET = "#9aa3ad"
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
class MalagoFlowSettings(StudySettings):
    """What `--set` can change."""

    starts: int = 4  # per axis; not given in the lectures
    span: float = 4.0  # the last time of a flow
    steps: int = 50  # points per trajectory that are kept
    lattice: int = 25  # per axis, for basins

    def __post_init__(self) -> None:
        check_counts(self, "starts", "steps", "lattice", least=2)
        check_positive(self, "span")


@dataclass(frozen=True)
class FlowCase:
    """A function over a family in coordinates of the family, and the window that is drawn."""

    family: ExponentialFamily
    f: Callable[[Tensor], Tensor]
    chart: ng.flows.FlowCoordinates
    view: View = ((0.0, 1.0), (0.0, 1.0))
    maximise: bool = False
    nodes: int | None = None  # of the quadrature, where not the usual number

    @property
    def value(self) -> ng.flows.Function:
        """E[f] of the natural parameters."""
        return ng.flows.expected_value(self.family, self.f, **({} if self.nodes is None else {"nodes": self.nodes}))

    def at(self, xi: Tensor) -> Tensor:
        """E[f] in the coordinates."""
        return self.value(self.chart.theta(xi))

    def field(self, natural: bool) -> ng.flows.Field:
        """Where the flow goes."""
        return ng.flows.flow_field(self.value, self.family, self.chart, natural=natural, maximise=self.maximise)

    def inside(self, xi: Tensor) -> Tensor:
        """Which points the coordinates have."""
        return (self.chart.inside or self.family.inside)(xi)


TOY_CASES = {
    "mu": FlowCase(TOY, toy, ng.flows.probability_coordinates(TOY)),
    "theta": FlowCase(TOY, toy, ng.flows.natural_coordinates(TOY), ((-1.5, 1.5), (-1.5, 1.5))),
}
LINE_CASES = {
    "quadratic": FlowCase(LINE, quadratic, ng.flows.deviation_coordinates(), ((-1.0, 1.5), (0.0, 1.2)), True),
    "quartic": FlowCase(LINE, quartic, ng.flows.deviation_coordinates(), ((-3.0, 3.0), (0.0, 1.8)), True),
}


def integrate(run: PieceRun, cases: dict[str, FlowCase], span: float, substeps: int) -> Numbers:
    """{case: {kind: [{points, status}]}} from a lattice of starts in the case's view."""
    s: MalagoFlowSettings = run.settings
    times, ways = span * torch.linspace(0, 1, s.steps, dtype=torch.float64) ** 2.5, {}  # dense where flows are fast
    for place, (name, case) in enumerate(cases.items()):
        ways[name] = {}
        for number, (kind, natural) in enumerate(KINDS.items()):
            run.advance((place + number / 2) / len(cases))
            starts = ng.flows.lattice(*case.view, s.starts)
            ways[name][kind] = plain(ng.flows.paths(case.field(natural), starts, times, case.inside, substeps))
    return ways


def plain(ways: Tensor) -> list[Numbers]:
    """Trajectories (m, T, n) as plain numbers: points as long as they are inside, six digits, and whether all are."""
    numbers = []
    for way in ways:
        inside = torch.isfinite(way).all(1)
        points = [[float(f"{x:.6g}") for x in point] for point in way[inside].tolist()]
        numbers.append({"points": points, "status": "end" if bool(inside.all()) else "edge"})
    return numbers


def toy_same(run: PieceRun) -> Numbers:
    """How far the natural flows in mu, theta and eta are apart, in mu."""
    value, chart = ng.flows.expected_value(TOY, toy), TOY_CASES["mu"].chart
    times, mu = (torch.tensor(numbers, dtype=torch.float64) for numbers in ([0.0, 0.25], [0.5, 0.5]))
    ours = ng.flows.flow(value, TOY, mu, times, chart).points
    others = (
        torch.sigmoid(2 * ng.flows.flow(value, TOY, chart.theta(mu), times).points),
        (ng.flows.flow(value, TOY, 2 * mu - 1, times, ng.flows.expectation_coordinates(TOY)).points + 1) / 2,
    )
    return {"apart": max(float((ours - other).abs().max()) for other in others), "starts": 1}


def line_closed(run: PieceRun) -> Numbers:
    """The quadratic's natural flow beside its closed form, 1 / s^2 = 1 / s0^2 + 6 t."""
    times = torch.tensor([0.0, 0.1, 0.5, 1.0, 5.0], dtype=torch.float64)
    start = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    points = ng.flows.flow(
        ng.flows.expected_value(LINE, quadratic), LINE, start, times, ng.flows.deviation_coordinates(), maximise=True
    ).points
    variance = 1 / (1 + 6 * times)
    closed = torch.stack([1 / 6 - 7 / 6 * variance, variance.sqrt()], dim=1)
    return {"times": times.tolist(), "ours": points.tolist(), "closed": closed.tolist()}


def moments() -> ng.flows.FlowCoordinates:
    """(mean; Sigma_11; Sigma_22; Sigma_12) of normals in two dimensions."""

    def matrix(xi: Tensor) -> Tensor:
        first, second, both = xi[..., 2:].unbind(-1)
        return torch.stack([torch.stack([first, both], -1), torch.stack([both, second], -1)], -2)

    def theta(xi: Tensor) -> Tensor:
        precision = invert_or_nan(matrix(xi))
        return torch.cat([(precision @ xi[..., :2].unsqueeze(-1)).squeeze(-1), PLANE.pack(-precision / 2)], -1)

    def inside(xi: Tensor) -> Tensor:
        return (xi[..., 2] > 0) & (xi[..., 2] * xi[..., 3] > xi[..., 4].square())

    return ng.flows.FlowCoordinates("mean and covariance", theta, None, inside)


def plane_flows(run: PieceRun) -> Numbers:
    """Ascent of the two-dimensional quadratic from means around the optimum, beside the closed form."""
    s: MalagoFlowSettings = run.settings
    times = torch.linspace(0, s.span, s.steps, dtype=torch.float64).square() / s.span  # dense where it starts
    case, optimum = FlowCase(PLANE, bowl, moments(), maximise=True, nodes=2), solve_or_nan(2 * BOWL, SLOPE)
    angles = torch.arange(2 * s.starts, dtype=torch.float64) * torch.pi / s.starts
    starts = optimum + 1.8 * torch.stack([angles.cos(), angles.sin()], 1)
    xi = torch.cat([starts, COVARIANCE[[0, 1, 0], [0, 1, 1]].expand(len(starts), 3)], dim=1)
    numbers: Numbers = {"gap": 0.0}
    for number, (kind, natural) in enumerate(KINDS.items()):
        run.advance(number / 3)
        numbers[kind] = plain(ng.flows.paths(case.field(natural), xi, times, case.inside, 3))
    for mean, start in zip(starts[:: s.starts], xi[:: s.starts], strict=True):
        way = ng.flows.flow(case.value, PLANE, start, times[:: max(s.steps // 8, 1)], case.chart, maximise=True)
        numbers["gap"] = max(numbers["gap"], float((way.points[:, :2] - closed_mean(mean, way.times)).abs().max()))
    return numbers


def closed_mean(mean: Tensor, times: Tensor) -> Tensor:
    """mu(t) of the natural flow: P(t) = P0 + 2 A t and P mu = P0 mu0 + b t."""
    precision = invert_or_nan(COVARIANCE)
    moved = precision + 2 * times.view(-1, 1, 1) * BOWL
    return solve_or_nan(moved, (precision @ mean + times.unsqueeze(1) * SLOPE).unsqueeze(-1)).squeeze(-1)


# The pages

METHOD = (
    "The flows drawn are integrated by Runge and Kutta's rule in short steps, those compared with a closed form or "
    "with one another by SciPy's DOP853 with tolerance 1e-10. Starting points are ours: the lectures do not give them. "
    "A Euclidean flow stops where it leaves the domain. Arrows have the square root of the field's length."
)


def points(way: Numbers) -> Tensor:
    """A trajectory's points (T, n)."""
    return torch.tensor(way["points"], dtype=torch.float64)


def panel(axes: Axes, title: str, labels: tuple[str, str], view: View) -> None:
    """Title, names of the axes and limits."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlim=view[0], ylim=view[1], xlabel=labels[0], ylabel=labels[1])
    axes.tick_params(labelsize=9)


def statuses(ways: Sequence[Numbers]) -> str:
    """How the flows ended, counted."""
    kinds = [way["status"] for way in ways]
    words = {"edge": "at the edge or beyond", "end": "under way at the last time"}
    return ", ".join(f"{kinds.count(kind)} {said}" for kind, said in words.items() if kind in kinds)


def tell_toy(findings: Findings) -> Story:
    """Four panels, basins, and where the flows end."""
    sections, flows, same = [], findings.of("flows"), findings.of("same")
    lead = "Nothing is finished yet."
    if flows:
        rows = tuple(
            (f"{kind} gradient in {name}", str(len(ways)), *map(str, count_vertices(name, ways)), statuses(ways))
            for name, ways_by_kind in flows[0].items()
            for kind, ways in ways_by_kind.items()
        )
        heads = ("", "flows", "at (1, 0)", "at (0, 1)", "elsewhere", "how they ended")
        table = Table("Where descent ends", heads, rows, "At: within .05 in mu, by the last time.")
        in_vertices = ", ".join(
            f"{kind} in {name} {sum(count_vertices(name, ways)[:2]) / len(ways):.0%}"
            for name, ways_by_kind in flows[0].items()
            for kind, ways in ways_by_kind.items()
        )
        lead = (
            f"Flows that end in one of the two vertices that are local minima, by the last time: {in_vertices}. The "
            "saddle between the basins is at mu = (1/6, 1/3) in all of them; only the natural flow has the same basins "
            "in both coordinates."
        )
        sections.append(Section("Flows", lead, (table,), _toy_pictures(flows[0], findings.settings.lattice)))
    if same:
        verdict = (
            f"Natural flows in mu, theta and eta from {same[0]['starts']} start(s) are the same curve to "
            f"{same[0]['apart']:.0e} in mu."
        )
        sections.append(Section("The same curve", verdict))
    return Story("Two coordinates, two gradients: f = x₁ + 2 x₂ + 3 x₁ x₂", lead, METHOD, tuple(sections))


VERTICES = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
GREEK = {"mu": ("μ₁", "μ₂"), "theta": ("θ₁", "θ₂")}


def count_vertices(name: str, ways: Sequence[Numbers]) -> list[int]:
    """How many flows end at (1, 0), at (0, 1), elsewhere."""
    ends = torch.stack([points(way)[-1] for way in ways])
    near = torch.cdist(torch.sigmoid(2 * ends) if name == "theta" else ends, VERTICES) < 0.05
    counts = near.sum(0).tolist()
    return [*counts, len(ways) - sum(counts)]


def _toy_pictures(flows: Numbers, count: int) -> tuple[Picture, ...]:
    def fill(figure: Figure) -> None:
        for row, (name, case) in zip(figure.subplots(2, 2), TOY_CASES.items(), strict=True):
            for axes, kind in zip(row, KINDS, strict=True):
                _plane(axes, case, kind, flows[name][kind], case.view)
                _saddle(axes, name)
                panel(axes, f"{kind} gradient in {GREEK[name][0][0]}", GREEK[name], case.view)
        title = "Two independent bits, f = x₁ + 2 x₂ + 3 x₁ x₂: level lines of E[f], field, descent"
        figure.suptitle(title, fontsize=11)

    def basins(figure: Figure) -> None:
        cases = [(name, case, kind) for name, case in TOY_CASES.items() for kind in KINDS]
        for axes, (name, case, kind) in zip(figure.subplots(1, 4), cases, strict=True):
            span = 8.0 if (name, kind) == ("theta", "Euclidean") else 1.5  # on a plateau all is slow
            ends = ng.flows.destinations(
                case.field(KINDS[kind]), ng.flows.lattice(*case.view, count), span, case.inside, 60
            )
            if name == "theta":
                ends = torch.sigmoid(2 * ends)
            ng.flows.draw_basins(axes, ends, VERTICES, *case.view, (PALETTE[0], PALETTE[1]))
            ng.flows.draw_levels(axes, case.at, *shrink(case.view), colors=GRID, levels=15)
            _saddle(axes, name)
            panel(axes, f"{kind} in {GREEK[name][0][0]}", GREEK[name], case.view)

    title = "Basins: which vertex is nearest in the end, (1, 0) orange, (0, 1) blue"
    return (
        Picture("flows", "Level lines of E[f], fields and descent", fill, (9.2, 8.8)),
        Picture("basins", title, basins, (12.0, 3.3)),
    )


def _saddle(axes: Axes, name: str) -> None:
    mu = torch.tensor([1 / 6, 1 / 3])
    x, y = mu.tolist() if name == "mu" else (mu.logit() / 2).tolist()
    axes.plot(x, y, "x", color=INK, markersize=8, markeredgewidth=2, zorder=5)


def shrink(view: View) -> View:
    """A little inside, where coordinates are finite."""
    (a, b), (c, d) = view
    return (a + 1e-3 * (b - a), b - 1e-3 * (b - a)), (c + 1e-3 * (d - c), d - 1e-3 * (d - c))


def _plane(axes: Axes, case: FlowCase, kind: str, ways: Sequence[Numbers], view: View) -> None:
    ng.flows.draw_levels(axes, case.at, *shrink(view), colors=GRID, linewidths=0.9, levels=28)
    inner = tuple((a + 0.03 * (b - a), b - 0.03 * (b - a)) for a, b in view)
    ng.flows.draw_field(axes, case.field(KINDS[kind]), *inner, count=15, length="root", color=QUIET)
    for way in ways:
        ng.flows.draw_trajectory(axes, points(way), color=COLOUR[kind])


def tell_polynomials(findings: Findings) -> Story:
    """Two polynomials, two gradients, in (mean, standard deviation)."""
    flows, closed, sections = findings.of("flows"), findings.of("closed"), []
    for name, ways_by_kind in flows[0].items() if flows else ():
        title, heads = FORMULAS[name], ("", "deviation left, median", "how the flows ended")
        rows = tuple((f"{k} gradient", f"{_spread(ways):.2g}", statuses(ways)) for k, ways in ways_by_kind.items())
        picture = Picture(f"flows-{name}", title, partial(_draw_line, name, ways_by_kind), (10.0, 4.2))
        table = Table("At the last time", heads, rows)
        sections.append(Section(title, _line_verdict(name, ways_by_kind), (table,), (picture,)))
    if closed:
        c = closed[0]
        gap = max(abs(a - b) for x, y in zip(c["ours"], c["closed"], strict=True) for a, b in zip(x, y, strict=True))
        said = f"From N(-1, 1) the integrated natural flow differs from it by at most {gap:.0e} up to t = 5."
        sections.append(Section("Closed form of the quadratic, 1/σ² = 1/σ₀² + 6 t", said))
    lead = sections[0].verdict if sections else "Nothing is finished yet."
    more = " All flows ascend, as in the lectures. E[f] by Gauss-Hermite quadrature, exact for these polynomials."
    return Story("Flows over univariate normals", lead, METHOD + more, tuple(sections))


def _spread(ways: Sequence[Numbers]) -> float:
    return float(torch.stack([points(way)[-1, 1] for way in ways]).median())


def _line_verdict(name: str, ways_by_kind: Numbers) -> str:
    if name == "quadratic":
        return (
            f"Deviations at the end (median): Euclidean {_spread(ways_by_kind['Euclidean']):.1g}, natural "
            f"{_spread(ways_by_kind['natural']):.2g}. The Euclidean flow in (mean, deviation) shrinks exponentially "
            "here, the natural one as 1/sqrt(t): faster is a matter of the coordinates, the curve is not."
        )
    right = {kind: sum(points(way)[-1, 0].item() > 0 for way in ways) for kind, ways in ways_by_kind.items()}
    said = ", ".join(f"{kind}: {n} of {len(ways_by_kind[kind])} to the right of 0" for kind, n in right.items())
    return f"Two local maxima, at x = -√2 and √2, the right one global. Where the flows end: {said}."


def _draw_line(name: str, ways_by_kind: Numbers, figure: Figure) -> None:
    case = LINE_CASES[name]
    for axes, (kind, ways) in zip(figure.subplots(1, 2, sharey=True), ways_by_kind.items(), strict=True):
        _plane(axes, case, kind, ways, (case.view[0], (0.02, case.view[1][1])))
        deviation = "standard deviation σ" if kind == "Euclidean" else ""
        panel(axes, f"{kind} gradient", ("mean μ", deviation), case.view)
    figure.suptitle(f"Normals in R, {FORMULAS[name]}: level lines of E[f], field, ascent", fontsize=11)


FORMULAS = {"quadratic": "f = x - 3 x²", "quartic": "f = 6 x + 8 x² - x³ - 2 x⁴"}
PLANE_FORMULA = "f = x₁ + 2 x₂ - 3 x₁² - 2 x₁ x₂ - 2 x₂²"


def tell_quadratic(findings: Findings) -> Story:
    """Means on their way over the level lines of f."""
    (ways_by_kind,), optimum = findings.of("flows"), solve_or_nan(2 * BOWL, SLOPE)
    far = {kind: max(torch.dist(points(way)[-1, :2], optimum).item() for way in ways_by_kind[kind]) for kind in KINDS}
    verdict = (
        "The natural flow's means agree with the closed form P(t) = P₀ + 2 A t, P μ = P₀ μ₀ + b t to "
        f"{ways_by_kind['gap']:.0e}. Euclidean flows in (mean, covariance): {statuses(ways_by_kind['Euclidean'])}, for "
        "there the covariance falls by A per unit of time until it is singular; natural flows: "
        f"{statuses(ways_by_kind['natural'])}. Largest distance from the optimum at the end: Euclidean "
        f"{far['Euclidean']:.2g}, natural {far['natural']:.2g}."
    )

    def fill(figure: Figure) -> None:
        x, y = optimum.tolist()
        view = ((x - 2.4, x + 2.4), (y - 2.1, y + 2.1))
        for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
            ng.flows.draw_levels(axes, bowl, *view, colors=GRID, linewidths=0.9, levels=24)
            for way in ways_by_kind[kind]:
                ng.flows.draw_trajectory(axes, points(way)[:, :2], color=COLOUR[kind])
            axes.plot(x, y, "*", color=INK, markersize=10, zorder=5)
            panel(axes, f"{kind} gradient", ("μ₁", "μ₂" if kind == "Euclidean" else ""), view)
        figure.suptitle(f"Normals in R², {PLANE_FORMULA}: means, ascent", fontsize=11)

    more = " Starts: means on a circle around the optimum, the lectures' covariance (1, -.5; -.5, 2). Ascent."
    picture = Picture("flows", f"{PLANE_FORMULA}: level lines of f, means", fill, (10.0, 4.9))
    section = Section("Means", verdict, (), (picture,))
    return Story("A quadratic over normals in two dimensions", verdict, METHOD + more, (section,))


def study(
    name: str,
    summary: str,
    settings: type,
    pieces: tuple[Piece, ...],
    tell: Callable[[Findings], Story],
    minutes: float,
    seeds: int = 1,
) -> Experiment:
    """A figure of the lectures."""
    return Experiment(f"malago_2023_{name}", summary, settings, lambda _: pieces, tell, seeds=seeds, minutes=minutes)


TOY_STUDY = study(
    "toy",
    "Flows of f = x1 + 2 x2 + 3 x1 x2 over independent bits, Euclidean and natural, in two coordinates",
    MalagoFlowSettings,
    (
        Piece("flows", "Flows", lambda run: integrate(run, TOY_CASES, run.settings.span, 2), False),
        Piece("same", "Natural flows in three coordinates", toy_same, False),
    ),
    *(tell_toy, 0.15),
)
POLYNOMIALS = study(
    *("polynomials", "Flows of a quadratic and a quartic over univariate normals, Euclidean and natural"),
    MalagoFlowSettings,
    (  # over the line all is over sooner
        Piece("flows", "Flows", lambda run: integrate(run, LINE_CASES, run.settings.span / 3, 5), False),
        Piece("closed", "Beside the closed form", line_closed, False),
    ),
    *(tell_polynomials, 0.33),
)
QUADRATIC = study(
    *("quadratic", "Flows of a quadratic over normals in two dimensions, beside the closed form", MalagoFlowSettings),
    *((Piece("flows", "Flows", plane_flows, False),), tell_quadratic, 0.22),
)
