"""Plots of one task: medians over seeds as lines, their range as a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from natgrad_lab import figures
from natgrad_lab.figures import DASHES, PALETTE
from natgrad_lab.report.summary import Entry, Result, curve
from natgrad_lab.words import short

CROWD = 6  # entries of a legend that stand below one another
SIZE = (4.5, 3.3)  # inches


@dataclass(frozen=True)
class Plot:
    """What is drawn against what: x and y name numbers of a row."""

    name: str
    title: str
    x: str
    y: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = True


PRECISION = (
    Plot(
        "precision-epochs",
        "Precision on the test part, by epoch",
        "epoch",
        "test_precision",
        "epochs",
        "precision",
        log_y=False,
    ),
    Plot(
        "precision-seconds",
        "Precision on the test part, by second",
        "seconds",
        "test_precision",
        "seconds of training",
        "precision",
        log_y=False,
    ),
)


def plots(result: Result) -> list[Plot]:
    """The plots of a task, those for which its records have numbers."""
    wanted = _by_updates(result) if result.pairs else _by_seconds(result)
    wanted = [*PRECISION, *wanted]
    return [plot for plot in wanted if any(len(curve(r, plot.x, plot.y)[0]) for e in result.entries for r in e.records)]


def _by_updates(result: Result) -> list[Plot]:
    drawn = [
        ("loss-steps", "Training loss", "train_loss", result.unit),
        ("error-steps", "Test error", "test_error", "share of mistakes"),
        ("test-steps", "Test loss", "test_loss", result.unit),
        ("kl-steps", "KL moved by an update, measured", "kl_measured", "nats per example"),
        ("damping-steps", "Damping", "damping", "damping"),
    ]
    plots = [Plot(name, title, "step", y, "updates", label, log_x=True) for name, title, y, label in drawn]
    return [
        *plots,
        Plot("solver-steps", "Products with the metric", "step", "solver_steps", "updates", "per update", log_y=False),
    ]


def _by_seconds(result: Result) -> list[Plot]:
    return [
        Plot(
            "loss-seconds", "Training loss against seconds", "seconds", "train_loss", "seconds of training", result.unit
        ),
        Plot("loss-steps", "Training loss against steps", "step", "train_loss", "steps", result.unit, log_x=True),
        Plot("test-seconds", "Test loss against seconds", "seconds", "test_loss", "seconds of training", result.unit),
        Plot(
            "kl-steps", "KL moved by a step, measured", "step", "kl_measured", "steps", "nats per example", log_x=True
        ),
        Plot("damping-steps", "Damping", "step", "damping", "steps", "damping"),
        Plot("solver-steps", "Products with the metric", "step", "solver_steps", "steps", "per step", log_y=False),
    ]


def draw(plot: Plot, entries: Sequence[Entry], order: Sequence[str], title: str = "") -> Figure:
    """One figure: medians, and the range of the seeds as a band."""

    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        drawn = _lines(axes, plot, entries, order)
        axes.set_title(title, loc="left", fontsize=9, wrap=True)
        if drawn > 1:
            axes.legend(**({"fontsize": 10} if drawn <= CROWD else {"fontsize": 7, "ncols": 2}), handlelength=2.2)

    return figures.draw(fill, SIZE)


def draw_overview(results: Sequence[Result], order: Sequence[str], title: str) -> Figure:
    """The whole race in one figure: a row for each task, its training loss against seconds and against steps."""
    columns = [plot for plot in _by_seconds(results[0]) if plot.name in ("loss-seconds", "loss-steps")]

    def fill(figure: Figure) -> None:
        panels = figure.subplots(len(results), len(columns), squeeze=False)
        for row, result in zip(panels, results, strict=True):
            for axes, plot in zip(row, columns, strict=True):
                _lines(axes, replace(plot, y_label=result.unit), result.entries, order)
            row[0].set_title(result.title, loc="left", fontsize=10)
        figures.put_title(figure, title)
        figures.put_legend_below(figure, panels[0, 0], min(len(order), 4))

    return figures.draw(fill, (2 * SIZE[0], 2.7 * len(results) + 0.8))


def _lines(axes: Axes, plot: Plot, entries: Sequence[Entry], order: Sequence[str]) -> int:
    """One panel without its title and legend; how many lines it has."""
    drawn = [_line(axes, plot, e, order.index(e.name)) for e in sorted(entries, key=lambda e: order.index(e.name))]
    _scales(axes, plot)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.grid(visible=True, axis="y")
    axes.set_axisbelow(True)
    return sum(drawn)


def _line(axes: Axes, plot: Plot, entry: Entry, index: int) -> bool:
    x, low, middle, high = band([curve(run, plot.x, plot.y) for run in entry.records], plot)
    if not len(x):
        return False
    colour = PALETTE[index % len(PALETTE)]
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    dash = DASHES[index % len(DASHES)]
    axes.plot(x, middle, color=colour, linestyle=dash, linewidth=2.0, label=entry.name)
    return True


def band(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], plot: Plot
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, lowest, median, highest) over curves, interpolated onto common points where all of them are known."""
    kept = [_positive(x, y, plot) for x, y in curves]
    kept = [(x, y) for x, y in kept if len(x)]
    if not kept:
        return np.empty(0), np.empty(0), np.empty(0), np.empty(0)
    first, last = max(x[0] for x, _ in kept), min(x[-1] for x, _ in kept)
    points = np.unique(np.concatenate([x for x, _ in kept]))
    points = points[(points >= first) & (points <= last)]
    values = np.stack([np.interp(points, x, np.log(y) if plot.log_y else y) for x, y in kept])
    low, middle, high = values.min(0), np.median(values, 0), values.max(0)
    back = np.exp if plot.log_y else np.asarray
    return points, back(low), back(middle), back(high)


def _positive(x: np.ndarray, y: np.ndarray, plot: Plot) -> tuple[np.ndarray, np.ndarray]:
    keep = np.isfinite(y) & ((y > 0) | (not plot.log_y)) & ((x > 0) | (not plot.log_x))
    return x[keep], y[keep]


def _scales(axes: Axes, plot: Plot) -> None:
    plain = FuncFormatter(lambda value, _: short(value))
    if plot.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    if not plot.log_y:
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    subs = (1.0, 2.0, 3.0, 5.0) if decades < 1.5 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12 if decades < 6 else 6))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
