"""The page of `boltzmann_ratio`: steps where the truth is known, losses by seconds, and draws."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, INK, PALETTE, put_legend_below, put_title
from natgrad_lab.words import short

METHOD = (
    "The machine: log p(x) = h . s + sum J_ij s_i s_j + constant over spins s in {-1, 1}, all h and J drawn from N(0, "
    "scale^2). The data are its exact distribution: every state, weighted with its probability. All runs start at "
    "zero. Natural steps are undamped, at rate 1. Gradient descent has the best of ten rates, 1/64 to 8. KL is that "
    "from the truth to the model, in nats. The larger machine has its couplings scaled by sqrt(units / more units). "
    "The field: a square lattice, couplings -1, the diagonal such that the lowest eigenvalue of the precision is the "
    "one named; gradient descent has the best constant rate, 2 / (lowest + highest curvature). Images: mini-batches, "
    "biases started at the pixels' logits, the best of three rates per contestant on training images held out, "
    "seconds of processor time on one thread without evaluation."
)


LOSSES = ("ratio matching", "pseudo-likelihood")


def tell(findings: Findings) -> Story:
    """Sections for the parts that are finished."""
    sections = []
    if findings.of("exact"):
        sections.append(_exact(findings))
    if findings.of("field"):
        sections.append(_field(findings.of("field"), findings.settings.examples))
    if findings.of("race"):
        sections.append(_images(findings))
    return Story("Boltzmann machines by ratio matching", _lead(findings), METHOD, tuple(sections))


def _lead(findings: Findings) -> str:
    said = []
    for one in findings.of("exact")[:1]:
        counts = [(f"scale {scale}", write_step_counts(findings.of("exact"), scale, "ratio matching")) for scale in one]
        said += [f"{name}: {ours} natural steps, {theirs} of gradient descent" for name, (ours, theirs) in counts]
    return f"To KL {findings.settings.goal:g}: " + "; ".join(said) + "." if said else "Nothing exact is finished yet."


def write_step_counts(runs: Sequence[Numbers], scale: str, loss: str) -> tuple[str, str]:
    """Natural steps and gradient steps over the seeds, as ranges."""
    cells = [run[scale][loss] for run in runs]
    ours = [count_steps_to_goal(cell["natural"]) for cell in cells]
    return write_range(ours), write_range([cell["descent"] for cell in cells])


def count_steps_to_goal(gaps: Sequence[float | None]) -> int | None:
    """Steps until the goal; None for a run that diverged, which ends with a KL that is far or not a number."""
    return len(gaps) - 1 if gaps[-1] is not None and gaps[-1] < 1 else None


def write_range(counts: Sequence[int | None]) -> str:
    """Least to greatest; never: a run that did not get there."""
    there = sorted(count for count in counts if count is not None)
    if not there:
        return "never"
    span = f"{there[0]:,}" if there[0] == there[-1] else f"{there[0]:,} to {there[-1]:,}"
    return span if len(there) == len(counts) else f"{span}, {len(counts) - len(there)} of {len(counts)} never"


def _exact(findings: Findings) -> Section:
    runs, more = findings.of("exact"), findings.of("larger")
    scales, losses = list(runs[0]), list(runs[0][next(iter(runs[0]))])
    rows = []
    for scale in scales:
        for loss in losses:
            ours, theirs = write_step_counts(runs, scale, loss)
            rows.append((f"scale {scale}, {loss}", ours, theirs))
    for scale in scales if more else ():
        ends = write_range([count_steps_to_goal(run[scale]) for run in more])
        rows.append((f"scale {scale}, ratio matching, {findings.settings.more} units", ends, "not run"))
    table = Table(
        f"Steps to KL {findings.settings.goal:g}",
        ("", "natural gradient", "gradient descent, best rate"),
        tuple(rows),
        f"Over {len(runs)} seeds. Gradient descent had at most {findings.settings.steps:,} steps.",
    )
    units = findings.settings.units
    picture = Picture("exact", f"KL over steps, {units} units", _paths(runs, units), (9.0, 3.8))
    return Section(f"{units} spins, known exactly", _lead(findings), (table,), (picture,))


def _paths(runs: Sequence[Numbers], units: int) -> Callable[[Figure], None]:
    title = f"Boltzmann machine of {units} spins, exact: natural gradient (solid) and gradient descent (dashed)"
    seeds = f"first of {len(runs)} seeds with marks, the others faint" if len(runs) > 1 else "one seed"

    def fill(figure: Figure) -> None:
        for axes, scale in zip(_axes(figure, 1, len(runs[0])), runs[0], strict=True):
            for number, run in reversed(list(enumerate(runs))):
                for colour, mark, (loss, found) in zip(PALETTE, "os^", run[scale].items(), strict=False):
                    look = (
                        {"color": colour, "marker": mark, "markersize": 4.5}
                        if number == 0
                        else {"color": colour, "alpha": 0.3}
                    )
                    _way(axes, found, loss if number == 0 else None, look)
            axes.set_xscale("symlog", linthresh=1)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.tick_params(axis="x", labelsize=7)
            axes.set_yscale("log")
            axes.set_ylim(1e-8, 30)  # a run that diverges leaves at the top
            axes.set_title(f"couplings from N(0, {scale}²)", loc="left", fontsize=10)
            axes.set_xlabel("steps")
        figure.axes[0].set_ylabel("KL in nats")
        figure.suptitle(f"{title}; {seeds}", x=0.01, ha="left", fontsize=9)
        put_legend_below(figure, figure.axes[0], 3)

    return fill


def _way(axes: Axes, found: Numbers, name: str | None, look: dict[str, Any]) -> None:
    """Natural steps as a solid line, those of gradient descent as a dashed one."""
    axes.plot(range(len(found["natural"])), found["natural"], "-", linewidth=1.8, label=name, **look)
    if found["path"]:
        steps, gaps = zip(*found["path"], strict=True)
        axes.plot(steps, gaps, "--", linewidth=1.2, markevery=max(len(steps) // 8, 1), **look)


def _axes(figure: Figure, rows: int, columns: int) -> list[Axes]:
    return list(np.atleast_1d(figure.subplots(rows, columns, sharey=True)).ravel())


def _field(runs: Sequence[Numbers], examples: int) -> Section:
    rows = []
    for floor in runs[0]:
        cells = [run[floor] for run in runs]
        rows.append(
            (
                f"lowest eigenvalue {floor}",
                short(statistics.median(cell["condition"] for cell in cells)),
                f"1, to {max(cell['natural'] for cell in cells):.0e}",
                write_range([cell["descent"] for cell in cells]),
                f"{100 * statistics.median(cell['truth'] for cell in cells):.1f} %",
            )
        )
    heads = (
        "",
        "condition of the metric",
        "natural steps, distance left",
        "gradient descent to 1e-3",
        "from the truth",
    )
    note = "Distances are relative to the optimum's length; the last column is the optimum's own, from few examples."
    worst = max(cell["natural"] for run in runs for cell in run.values())
    verdict = (
        f"One natural step from the identity ends at the optimum of score matching on {examples:,} examples, within "
        f"{worst:.0e}, whatever the condition; gradient descent pays for it in proportion."
    )
    return Section("Precision of a Gauss-Markov field", verdict, (Table("A lattice", heads, tuple(rows), note),))


def _images(findings: Findings) -> Section:
    runs, chosen = findings.of("race"), findings.of("choice")
    names = list(runs[0]["contestants"])
    rows = tuple(_row(name, runs, chosen[0][name] if chosen else {}) for name in names)
    heads = ("", "rate", "steps", *(f"{loss}, {part}" for loss in LOSSES for part in ("test", "training")))
    table = Table(
        f"After {findings.settings.seconds:g} seconds", heads, rows, f"Means over {len(runs)} seeds (spread)."
    )
    pictures = [
        Picture(f"images-{n}", f"Test {loss}", _curves(runs, loss, findings.settings.data), (5.0, 3.9))
        for n, loss in enumerate(LOSSES)
    ]
    pictures.append(Picture("draws", "Draws by Gibbs sampling", _draws(runs[0]), (9.0, 1.2 * (len(names) + 1))))
    return Section(f"Pixels of digits ({findings.settings.data})", _verdict(runs), (table,), tuple(pictures))


def final(runs: Sequence[Numbers], name: str, loss: str) -> list[float]:
    """The last test loss of every seed; infinite where it is not a number."""
    found = [run["contestants"][name]["points"][-1][loss] for run in runs]
    return [float("inf") if value is None else value for value in found]


def _verdict(runs: Sequence[Numbers]) -> str:
    said = []
    for loss in LOSSES:
        means = {name: statistics.fmean(final(runs, name, loss)) for name in runs[0]["contestants"]}
        first, second = sorted(means, key=lambda name: means[name])[:2]
        said.append(f"Lowest test {loss}: {first}, {short(means[first])}; next {second}, {short(means[second])}.")
    return " ".join(said)


def _row(name: str, runs: Sequence[Numbers], tried: Numbers) -> tuple[str, ...]:
    steps = statistics.fmean(run["contestants"][name]["points"][-1]["steps"] for run in runs)
    finite = {rate: loss for rate, loss in tried.items() if loss is not None}
    rate = min(finite, key=lambda r: finite[r]) if finite else "-"
    cells = []
    for loss in (f"{loss}{part}" for loss in LOSSES for part in ("", ", training")):
        values = final(runs, name, loss)
        cells.append(f"{short(statistics.fmean(values))} ({short(max(values) - min(values))})")
    return (name, rate, f"{steps:,.0f}", *cells)


def _curves(runs: Sequence[Numbers], loss: str, data: str) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for colour, dash, name in zip((INK, *PALETTE), DASHES, runs[0]["contestants"], strict=False):
            style = {"color": colour, "linestyle": dash, "linewidth": 1.6}
            for number, run in enumerate(runs):
                points = [p for p in run["contestants"][name]["points"][1:] if p[loss] is not None]
                x, y = [p["seconds"] for p in points], [p[loss] for p in points]
                axes.plot(x, y, label=name if number == 0 else None, **style)
        axes.set_yscale("log")
        axes.set(xlabel="CPU seconds", ylabel=f"{loss}, test images")
        axes.grid(visible=True, axis="y")
        put_title(figure, f"Boltzmann machines on {data}: a line per seed")
        put_legend_below(figure, axes)

    return fill


def _draws(run: Numbers) -> Callable[[Figure], None]:
    shown: dict[str, Any] = {"test images": run["real"]}
    shown |= {name: found["draws"] for name, found in run["contestants"].items()}

    def fill(figure: Figure) -> None:
        grid = figure.subplots(len(shown), 1)
        for axes, (name, rows) in zip(np.atleast_1d(grid), shown.items(), strict=True):
            tiles = [np.pad(np.array(row).reshape(run["side"], -1), 1) for row in rows]
            axes.imshow(np.concatenate(tiles, axis=1), cmap="gray_r", interpolation="nearest")
            axes.set_title(name, loc="left", fontsize=9)
            axes.set_axis_off()

    return fill
