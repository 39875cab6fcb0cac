"""The page of the physics-informed networks: errors against seconds, the solution, and where it is wrong."""

from __future__ import annotations

from statistics import median

import numpy as np
from matplotlib.figure import Figure

from natgrad_lab.equations.problems import EquationProblem
from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, PALETTE


def tell(findings: Findings, summary: str, problem: EquationProblem, methods: tuple[str, ...]) -> Story:
    """One section, of the methods that are finished."""
    s = findings.settings
    told = {name: found for name in methods if (found := findings.of(name))}
    method = (
        f"A network {'-'.join(map(str, (2, *[s.width] * s.depth, 1)))} with tanh in double precision, {s.seconds:g} "
        f"CPU seconds of one thread for each method, {_say_points(s.redraw, problem)}. The error is relative, in L2, "
        f"on a grid. ng.residuals has no setting; Adam's rate {s.adam:g} falls on a cosine to zero."
    )
    return Story(summary, _lead(told), method, (_section(told, problem),) if told else ())


def last_error(found: list[Numbers]) -> float:
    """At the end, the median over seeds."""
    return median(one["curve"][-1][2] for one in found)


def _lead(told: dict[str, list[Numbers]]) -> str:
    said = ", ".join(f"{name} {last_error(found):.1e}" for name, found in told.items())
    return f"Relative error at the end: {said}."


def _say_points(redraw: bool, problem: EquationProblem) -> str:
    if redraw:
        return "the same points, drawn anew at every step"
    return "points drawn anew where residuals are large" if problem.adaptive else "the same points"


def _section(told: dict[str, list[Numbers]], problem: EquationProblem) -> Section:
    coefficient = problem.coefficient
    heads = ("", "relative error", "steps") + (("coefficient",) if coefficient is not None else ())
    rows = []
    for name, found in told.items():
        ends = [one["curve"][-1][2] for one in found]
        row = (
            name,
            f"{median(ends):.1e} ({min(ends):.1e} to {max(ends):.1e})",
            f"{median(o['steps'] for o in found):,}",
        )
        rows.append((*row, f"{median(o['k'] for o in found):.8f}") if coefficient is not None else row)
    title = "At the end: median, least and largest over seeds"
    title += "" if coefficient is None else f"; the coefficient is {coefficient}"
    pictures = (_curve(told), _fields(told, problem))
    return Section("Errors", "", (Table(title, heads, tuple(rows)),), pictures)


def _curve(told: dict[str, list[Numbers]]) -> Picture:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (method, found) in enumerate(told.items()):
            for place, one in enumerate(found):
                points = np.array(one["curve"])
                label = method if place == 0 else None
                style = {"color": PALETTE[number], "linestyle": DASHES[number], "linewidth": 1.6}
                axes.plot(points[:, 0], points[:, 2], label=label, **style)
        axes.set(xlabel="CPU seconds", ylabel="relative error", yscale="log")
        axes.legend(fontsize=9)

    return Picture("error-seconds", "Error against CPU seconds, a line per seed", fill)


def _fields(told: dict[str, list[Numbers]], problem: EquationProblem) -> Picture:
    names, (across, upward) = problem.axes, problem.box

    def fill(figure: Figure) -> None:
        grid = figure.subplots(len(told), 2, squeeze=False)
        for (left, right), (method, found) in zip(grid, told.items(), strict=True):
            for axes, key, title in ((left, "solution", f"{method}: u"), (right, "error", f"{method}: u - exact")):
                values = np.array(found[0][key])
                most = float(np.abs(values).max()) or 1.0
                shades = {"cmap": "viridis"} if key == "solution" else {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
                image = axes.imshow(values, origin="lower", extent=(*across, *upward), aspect="auto", **shades)
                bar = figure.colorbar(image, ax=axes, shrink=0.85)
                bar.ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
                axes.set(xlabel=names[0], ylabel=names[1], xticks=across, yticks=upward)
                axes.set_title(title, fontsize=10)

    return Picture("fields", "The solution and its error, first seed", fill, (8.0, 3.3 * max(1, len(told))))
