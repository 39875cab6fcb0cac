"""The page of `arbel_2020_toy`."""

from __future__ import annotations

from statistics import median

import numpy as np
from matplotlib.figure import Figure

from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.study import Findings, Numbers
from natgrad_lab.figures import DASHES, PALETTE

METHODS = ("gradient", "Wasserstein, E[J^T J]", "Wasserstein, kernelised", "Fisher")


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

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, dash, (d, cells) in zip(PALETTE, DASHES, found.items(), strict=False):
            errors = [median(cells[n]) for n in counts]
            axes.plot([int(n) for n in counts], errors, marker="o", linestyle=dash, color=colour, label=f"d = {d}")
        axes.set(xscale="log", yscale="log", xlabel="samples", ylabel="relative error")
        axes.legend(fontsize=9)

    first, last = (max(median(cells[n]) for cells in found.values()) for n in (counts[0], counts[-1]))
    verdict = f"The largest error over the dimensions falls from {first:.2g} to {last:.2g}."
    return Section("Error", verdict, (table,), (Picture("errors", "Error against samples", fill),))


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
            for place, run in enumerate(runs):
                losses = np.array(run[name]["losses"])
                label = name if place == 0 else None
                axes.plot(
                    np.maximum(losses / losses[0], 1e-8), color=colour, linestyle=dash, linewidth=1.2, label=label
                )
        axes.set(yscale="log", xlabel="steps", ylabel="loss, of the first")
        axes.legend(fontsize=8)

    return Picture("losses", "Loss against steps, each seed", fill)


def _paths(run: Numbers) -> Picture:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for colour, dash, name in zip(PALETTE, DASHES, METHODS, strict=False):
            means = np.array(run[name]["means"])[:, :2]
            across, up = means[:, 0], means[:, 1] if means.shape[1] > 1 else np.zeros(len(means))
            axes.plot(across, up, ".", linestyle=dash, color=colour, linewidth=1.2, markersize=3, label=name)
        axes.plot(*[[value] for value in [*run["goal"], 0.0][:2]], "k*", markersize=10)
        axes.set(xlabel="mean, first entry", ylabel="second")
        axes.legend(fontsize=8)

    return Picture("paths", "Paths of the mean, first seed", fill)
