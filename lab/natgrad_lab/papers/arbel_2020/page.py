"""The page of `arbel_2020_toy`."""

from __future__ import annotations

from statistics import median

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, INK, PALETTE, put_legend_below, put_title

METHODS = ("gradient", "Wasserstein, E[J^T J]", "Wasserstein, kernelised", "Fisher")
SHOWN = {"Wasserstein, E[J^T J]": r"Wasserstein, $\mathrm{E}[J^\top J]$"}
SIZE = (5.0, 3.9)  # of a picture, in inches
LOWEST = 1e-8  # of the drawn shares of the first loss


def tell(findings: Findings) -> Story:
    """A section per part that is finished."""
    s = findings.settings
    method = (
        f"Error: normals with independent entries, a kernel of bandwidth {s.bandwidth:g} deviations, d floor(sqrt(n)) "
        f"functions, regularization {s.regularization:g}, medians over {s.draws} draws of samples and gradient. "
        f"Descent: x = mean + B z in {s.d} dimensions, from a narrow normal three away from a broad and slanted one; "
        f"the loss is the squared Wasserstein distance, exact; the coordinates have condition {s.condition:g}; "
        f"{s.samples} new samples per step estimate the metric; the best of six rates each, {s.steps} steps."
    )
    sections = []
    if found := findings.of("errors"):
        sections.append(_errors(found[0]))
    if runs := findings.of("descents"):
        sections.append(_descents(runs, s.level))
    lead = sections[-1].verdict if sections else "Nothing is finished yet."
    return Story("The kernelised Wasserstein metric on normals", lead, method, tuple(sections))


def _errors(found: Numbers) -> Section:
    counts = list(next(iter(found.values())))
    rows = tuple((f"d = {d}", *(f"{median(cells[n]):.3g}" for n in counts)) for d, cells in found.items())
    table = Table("Relative error of the natural gradient", ("", *(f"{n} samples" for n in counts)), rows)

    first, last = (max(median(cells[n]) for cells in found.values()) for n in (counts[0], counts[-1]))
    verdict = f"The largest error over the dimensions falls from {first:.2g} to {last:.2g}."
    return Section("Error", verdict, (table,), (_draw_errors(found, counts),))


def _draw_errors(found: Numbers, counts: list[str]) -> Picture:
    many = len(next(iter(found.values()))[counts[0]])
    title = f"Kernelised metric on normals with d independent entries: medians and quartiles of {many} draws"

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for place, (d, cells) in enumerate(found.items()):
            low, middle, high = np.percentile([cells[n] for n in counts], [25, 50, 75], axis=1)
            look = {"color": PALETTE[place], "linestyle": DASHES[place], "marker": "os^"[place], "capsize": 3}
            x = [int(n) * 1.04 ** (place - 1) for n in counts]  # beside one another
            axes.errorbar(x, middle, yerr=(middle - low, high - middle), label=f"d = {d}", **look)
        axes.set(xscale="log", yscale="log", xlabel="samples", ylabel="relative error")
        axes.set_xticks([int(n) for n in counts], counts)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(visible=True, axis="y")
        put_title(figure, title)
        put_legend_below(figure, axes, 3)

    return Picture("errors", "Error against samples", fill, SIZE)


def _descents(runs: list[Numbers], level: float) -> Section:
    rows = tuple((name, *_cells([run[name] for run in runs])) for name in METHODS)
    heads = ("", f"steps to {level:g} of the first loss", "loss at the end, of the first", "rates")
    table = Table("At the best rate of each", heads, rows, f"Medians over {len(runs)} seeds, and ranges.")
    said = ", ".join(f"{name} {row[0]}" for name, *row in rows)
    return Section("Descent", f"Steps to the level: {said}.", (table,), (_curves(runs), _paths(runs[0])))


def _cells(runs: list[Numbers]) -> tuple[str, str, str]:
    steps = sorted(run["reached"] for run in runs if run["reached"] is not None)
    span = f"{median(steps):g} ({steps[0]} to {steps[-1]})" if steps else "never"
    if steps and len(steps) < len(runs):
        span += f", {len(steps)} of {len(runs)}"
    ends = [run["losses"][-1] / run["losses"][0] for run in runs]
    return span, f"{median(ends):.2g}", ", ".join(f"{rate:g}" for rate in sorted({run["rate"] for run in runs}))


def _curves(runs: list[Numbers]) -> Picture:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, dash, name in zip(PALETTE, DASHES, METHODS, strict=False):
            length = min(len(run[name]["losses"]) for run in runs)
            shares = [np.array(run[name]["losses"][:length]) / run[name]["losses"][0] for run in runs]
            low, middle, high = (np.maximum(kind(shares, axis=0), LOWEST) for kind in (np.min, np.median, np.max))
            axes.plot(middle, color=colour, linestyle=dash, linewidth=2, label=SHOWN.get(name, name))
            axes.fill_between(range(length), low, high, color=colour, alpha=0.16, linewidth=0)
        axes.set(yscale="log", xlabel="steps", ylabel="loss, share of the first")
        axes.grid(visible=True, axis="y")
        title = f"Squared Wasserstein distance between normals, four metrics: median and range of {len(runs)} seeds"
        put_title(figure, f"{title} (drawn down to {LOWEST:g})")
        put_legend_below(figure, axes)

    return Picture("losses", "Loss against steps", fill, SIZE)


def _paths(run: Numbers) -> Picture:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, dash, name in zip(PALETTE, DASHES, METHODS, strict=False):
            means = np.array(run[name]["means"])[:, :2]
            across, up = means[:, 0], means[:, 1] if means.shape[1] > 1 else np.zeros(len(means))
            look = {"color": colour, "linestyle": dash, "linewidth": 1.2, "marker": ".", "markersize": 3}
            axes.plot(across, up, label=SHOWN.get(name, name), **look)
        goal = [[value] for value in [*run["goal"], 0.0][:2]]
        axes.plot(*goal, marker="*", color=INK, linestyle="none", markersize=10, label="target")
        axes.set(xlabel="mean, first entry", ylabel="mean, second entry")
        put_title(figure, "Paths of the mean of a normal to its target under four metrics, a dot a step: first seed")
        put_legend_below(figure, axes)

    return Picture("paths", "Paths of the mean, first seed", fill, SIZE)
