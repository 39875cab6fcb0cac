"""The pages of `malago_2023_toy`, `_polynomials` and `_quadratic`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from natgrad.flows import (
    Field,
    Function,
    destinations,
    draw_basins,
    draw_field,
    draw_levels,
    draw_trajectory,
    lattice,
)
from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.figures import GRID, INK, PALETTE

View = tuple[tuple[float, float], tuple[float, float]]
COLOUR = {"Euclidean": PALETTE[0], "natural": PALETTE[1]}
QUIET = "#9aa3ad"
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
    words = {
        "end": "under way at the last time",
        "rest": "at rest",
        "edge": "at the edge or beyond",
        "stuck": "solver gave up",
    }
    kinds = [way["status"] for way in ways]
    return ", ".join(f"{kinds.count(k)} {words.get(k, k)}" for k in sorted(set(kinds)))


def toy(
    findings: Findings,
    fields: dict[tuple[str, str], Field],
    values: dict[str, Function],
    insides: dict[str, Callable[[Tensor], Tensor]],
    views: dict[str, View],
) -> Story:
    """Four panels, basins, and where the flows end."""
    sections, flows, same = [], findings.of("flows"), findings.of("same")
    lead = "Nothing is finished yet."
    if flows:
        pictures = _toy_pictures(flows[0], fields, values, insides, views, findings.settings)
        rows = tuple(
            _toy_row(name, kind, ways) for name, ways_by_kind in flows[0].items() for kind, ways in ways_by_kind.items()
        )
        heads = ("", "flows", "at (1, 0)", "at (0, 1)", "elsewhere", "how they ended")
        table = Table("Where descent ends", heads, rows, "At: within .05 in mu, by the last time.")
        lead = _toy_lead(flows[0])
        sections.append(Section("Flows", lead, (table,), pictures))
    if same:
        verdict = (
            f"Natural flows in mu, theta and eta from {same[0]['starts']} start(s) are the same curve to "
            f"{same[0]['apart']:.0e} in mu."
        )
        sections.append(Section("The same curve", verdict))
    return Story("Two coordinates, two gradients: f = x₁ + 2 x₂ + 3 x₁ x₂", lead, METHOD, tuple(sections))


def ends_in_mu(name: str, ways: Sequence[Numbers]) -> Tensor:
    """Where the flows end, as probabilities (m, 2)."""
    ends = torch.stack([points(way)[-1] for way in ways])
    return torch.sigmoid(2 * ends) if name == "theta" else ends


VERTICES = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)


def vertices(name: str, ways: Sequence[Numbers]) -> list[int]:
    """How many flows end at (1, 0), at (0, 1), elsewhere."""
    near = torch.cdist(ends_in_mu(name, ways), VERTICES) < 0.05
    counts = near.sum(0).tolist()
    return [*counts, len(ways) - sum(counts)]


def _toy_row(name: str, kind: str, ways: Sequence[Numbers]) -> tuple[str, ...]:
    return (f"{kind} gradient in {name}", str(len(ways)), *map(str, vertices(name, ways)), statuses(ways))


def _toy_lead(flows: Numbers) -> str:
    shares = {
        (n, k): sum(vertices(n, w)[:2]) / len(w) for n, ways_by_kind in flows.items() for k, w in ways_by_kind.items()
    }
    said = ", ".join(f"{kind} in {name} {share:.0%}" for (name, kind), share in shares.items())
    return (
        f"Flows that end in one of the two vertices that are local minima, by the last time: {said}. The saddle "
        "between the basins is at mu = (1/6, 1/3) in all of them; only the natural flow has the same basins in both "
        "coordinates."
    )


def _toy_pictures(
    flows: Numbers,
    fields: dict[tuple[str, str], Field],
    values: dict[str, Function],
    insides: dict[str, Callable[[Tensor], Tensor]],
    views: dict[str, View],
    settings: Any,
) -> tuple[Picture, ...]:
    def fill(figure: Figure) -> None:
        grid = figure.subplots(2, 2)
        for row, name in zip(grid, flows, strict=True):
            for axes, kind in zip(row, COLOUR, strict=True):
                _plane(axes, values[name], fields[name, kind], flows[name][kind], COLOUR[kind], views[name])
                _saddle(axes, name)
                greek = {"mu": ("μ₁", "μ₂"), "theta": ("θ₁", "θ₂")}[name]
                panel(axes, f"{kind} gradient in {greek[0][0]}", greek, views[name])
        figure.suptitle(
            "Two independent bits, f = x₁ + 2 x₂ + 3 x₁ x₂: level lines of E[f], field, descent", fontsize=11
        )

    def basins(figure: Figure) -> None:
        for axes, (name, kind) in zip(figure.subplots(1, 4), fields, strict=True):
            starts = lattice(*views[name], settings.lattice)
            span = 8.0 if (name, kind) == ("theta", "Euclidean") else 1.5  # on a plateau all is slow
            ends = destinations(fields[name, kind], starts, span, insides[name], 60)
            if name == "theta":
                ends = torch.sigmoid(2 * ends)
            draw_basins(axes, ends, VERTICES, *views[name], (PALETTE[0], PALETTE[1]))
            draw_levels(axes, values[name], *_within(views[name]), colors=GRID, levels=15)
            _saddle(axes, name)
            greek = {"mu": ("μ₁", "μ₂"), "theta": ("θ₁", "θ₂")}[name]
            panel(axes, f"{kind} in {greek[0][0]}", greek, views[name])

    return (
        Picture("flows", "Level lines of E[f], fields and descent", fill, (9.2, 8.8)),
        Picture(
            "basins", "Basins: which vertex is nearest in the end, (1, 0) orange, (0, 1) blue", basins, (12.0, 3.3)
        ),
    )


def _saddle(axes: Axes, name: str) -> None:
    mu = torch.tensor([1 / 6, 1 / 3])
    x, y = mu.tolist() if name == "mu" else (mu.logit() / 2).tolist()
    axes.plot(x, y, "x", color=INK, markersize=8, markeredgewidth=2, zorder=5)


def _within(view: View) -> View:
    """A little inside, where coordinates are finite."""
    (a, b), (c, d) = view
    return (a + 1e-3 * (b - a), b - 1e-3 * (b - a)), (c + 1e-3 * (d - c), d - 1e-3 * (d - c))


def _plane(
    axes: Axes, value: Function, field: Field, ways: Sequence[Numbers], colour: str, view: View, length: str = "root"
) -> None:
    draw_levels(axes, value, *_within(view), colors=GRID, linewidths=0.9, levels=28)
    inner = tuple((a + 0.03 * (b - a), b - 0.03 * (b - a)) for a, b in view)
    draw_field(axes, field, *inner, count=15, length=length, color=QUIET)
    for way in ways:
        draw_trajectory(axes, points(way), color=colour)


def polynomials(
    findings: Findings, fields: dict[tuple[str, str], Field], values: dict[str, Function], views: dict[str, View]
) -> Story:
    """Two polynomials, two gradients, in (mean, standard deviation)."""
    flows, closed, sections = findings.of("flows"), findings.of("closed"), []
    if flows:
        for name, ways_by_kind in flows[0].items():
            heads = ("", "deviation left, median", "how the flows ended")
            rows = tuple(
                (f"{kind} gradient", f"{_spread(ways):.2g}", statuses(ways)) for kind, ways in ways_by_kind.items()
            )
            picture = Picture(
                f"flows-{name}",
                POLYNOMIALS[name],
                _line_picture(name, ways_by_kind, fields, values, views[name]),
                (10.0, 4.2),
            )
            verdict = _line_verdict(name, ways_by_kind)
            sections.append(Section(POLYNOMIALS[name], verdict, (Table("At the last time", heads, rows),), (picture,)))
    if closed:
        c = closed[0]
        gap = max(abs(a - b) for x, y in zip(c["ours"], c["closed"], strict=True) for a, b in zip(x, y, strict=True))
        said = f"From N(-1, 1) the integrated natural flow differs from it by at most {gap:.0e} up to t = 5."
        sections.append(Section("Closed form of the quadratic, 1/σ² = 1/σ₀² + 6 t", said))
    lead = sections[0].verdict if sections else "Nothing is finished yet."
    method = (
        METHOD + " All flows ascend, as in the lectures. E[f] by Gauss-Hermite quadrature, exact for these polynomials."
    )
    return Story("Flows over univariate normals", lead, method, tuple(sections))


def _spread(ways: Sequence[Numbers]) -> float:
    return float(torch.stack([points(way)[-1, 1] for way in ways]).median())


def _line_verdict(name: str, ways_by_kind: Numbers) -> str:
    means = {kind: [points(way)[-1, 0].item() for way in ways] for kind, ways in ways_by_kind.items()}
    right = {kind: sum(m > 0 for m in ends) for kind, ends in means.items()}
    said = ", ".join(f"{kind}: {right[kind]} of {len(ends)} to the right of 0" for kind, ends in means.items())
    if name == "quadratic":
        return (
            f"Deviations at the end (median): Euclidean {_spread(ways_by_kind['Euclidean']):.1g}, natural "
            f"{_spread(ways_by_kind['natural']):.2g}. The Euclidean flow in (mean, deviation) shrinks exponentially "
            "here, the natural one as 1/sqrt(t): faster is a matter of the coordinates, the curve is not."
        )
    return f"Two local maxima, at x = -√2 and √2, the right one global. Where the flows end: {said}."


def _line_picture(
    name: str, ways_by_kind: Numbers, fields: dict[tuple[str, str], Field], values: dict[str, Function], view: View
) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        for axes, (kind, ways) in zip(figure.subplots(1, 2, sharey=True), ways_by_kind.items(), strict=True):
            shown = (view[0], (0.02, view[1][1]))
            _plane(axes, values[name], fields[name, kind], ways, COLOUR[kind], shown)
            panel(axes, f"{kind} gradient", ("mean μ", "standard deviation σ" if kind == "Euclidean" else ""), view)
        figure.suptitle(f"Normals in R, {POLYNOMIALS[name]}: level lines of E[f], field, ascent", fontsize=11)

    return fill


POLYNOMIALS = {"quadratic": "f = x - 3 x²", "quartic": "f = 6 x + 8 x² - x³ - 2 x⁴"}
FORMULA = "f = x₁ + 2 x₂ - 3 x₁² - 2 x₁ x₂ - 2 x₂²"


def quadratic(findings: Findings, f: Function, optimum: list[float]) -> Story:
    """Means on their way over the level lines of f."""
    flows, title = findings.of("flows"), "A quadratic over normals in two dimensions"
    if not flows:
        return Story(title, "Nothing is finished yet.", METHOD, ())
    ways_by_kind = flows[0]
    ends = {
        kind: [torch.dist(points(way)[-1, :2], torch.tensor(optimum).double()).item() for way in ways_by_kind[kind]]
        for kind in COLOUR
    }
    verdict = (
        "The natural flow's means agree with the closed form P(t) = P₀ + 2 A t, P μ = P₀ μ₀ + b t to "
        f"{ways_by_kind['gap']:.0e}. Euclidean flows in (mean, covariance): {statuses(ways_by_kind['Euclidean'])}, for "
        "there the covariance falls by A per unit of time until it is singular; natural flows: "
        f"{statuses(ways_by_kind['natural'])}. Largest distance from the optimum at the end: Euclidean "
        f"{max(ends['Euclidean']):.2g}, natural {max(ends['natural']):.2g}."
    )

    def fill(figure: Figure) -> None:
        view = ((optimum[0] - 2.4, optimum[0] + 2.4), (optimum[1] - 2.1, optimum[1] + 2.1))
        for axes, kind in zip(figure.subplots(1, 2, sharey=True), COLOUR, strict=True):
            draw_levels(axes, f, *view, colors=GRID, linewidths=0.9, levels=24)
            for way in ways_by_kind[kind]:
                draw_trajectory(axes, points(way)[:, :2], color=COLOUR[kind])
            axes.plot(*optimum, "*", color=INK, markersize=10, zorder=5)
            panel(axes, f"{kind} gradient", ("μ₁", "μ₂" if kind == "Euclidean" else ""), view)
        figure.suptitle(f"Normals in R², {FORMULA}: means, ascent", fontsize=11)

    method = (
        METHOD + " Starts: means on a circle around the optimum, the lectures' covariance (1, -.5; -.5, 2). Ascent."
    )
    picture = Picture("flows", f"{FORMULA}: level lines of f, means", fill, (10.0, 4.9))
    return Story(title, verdict, method, (Section("Means", verdict, (), (picture,)),))
