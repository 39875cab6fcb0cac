"""The page of `varady_2022_*`: learning curves with bands, what the settings did, and generated images.

`python -m natgrad_lab.papers.varady_2022.page docs` writes the tables of the races whose records are kept here into
`docs/papers/varady_2022.md`, between two comments each, and their pictures into `docs/images`; nothing runs again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from natgrad_lab.experiments import find
from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Cell, Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, PALETTE, fill_axes
from natgrad_lab.papers.kept_tables import draw_kept, insert, tell_kept, write_rows

RECORDS = Path(__file__).parent / "records"
KEPT = {"mnist": "wake_sleep_tuned", "eleven_layers": "wake_sleep_eleven"}
"""Folders of kept records, and how the names of their pictures begin."""
NAMES = {"ws": "WS", "rws": "RWS", "rws-adam": "RWS, Adam", "nws": "NWS", "nrws": "NRWS"}
LOOKS = {name: (PALETTE[at], DASHES[at]) for name, at in zip(NAMES, (7, 1, 3, 2, 0), strict=True)}
BASELINE = "rws-adam"
KEYS = ("bound", "mean", "seconds")  # of a point of a curve


def tell(findings: Findings) -> Story:
    """Sections for what is finished."""
    s = findings.settings
    races = findings.collect(NAMES, "race-{}")
    sections = [_settings(findings)]
    if races:
        dreams = any(runs[0]["looks"] for runs in races.values())
        sections = [_race(races, s.data), *([_images(races, s.data != "faces")] if dreams else [])]
        sections += [_settings(findings)] if any(len(s.rules().get(name, ())) != 1 for name in s.names()) else []
    method = (
        f"Helmholtz machine with hidden layers {s.sizes} on {s.data}, {s.samples} draws of h per example, batches of "
        f"{s.batch}, {s.epochs} epochs. WS: wake-sleep; RWS: reweighted wake-sleep, q learning half from weighted "
        f"draws and half from dreams; N: the natural version, damping {s.damping:g}, blocks averaged over refreshes. "
        f"Each has several settings, tried for {s.tuning} epochs from a seed of their own and judged on held-out "
        "examples, but for those whose rate is given by one rule. "
        "Seconds are of training alone. All start with the visible biases at the data's log-odds."
    )
    return Story(f"Natural wake-sleep on {s.data}", _lead(races), method, tuple(sections))


def curve(run: Numbers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Epochs, seconds, bounds; a bound that is not finite as NaN."""
    rows = [(p["epoch"], p["seconds"], math.nan if p["bound"] is None else p["bound"]) for p in run["curve"]]
    epochs, seconds, bounds = np.array(rows).T
    return epochs, seconds, bounds


def find_first_epoch(run: Numbers, level: float) -> tuple[float, float]:
    """(epochs, seconds) at which a run's bound first is at least `level`; infinite where it never is."""
    epochs, seconds, bounds = curve(run)
    hit = np.flatnonzero(bounds >= level)
    return (float(epochs[hit[0]]), float(seconds[hit[0]])) if len(hit) else (math.inf, math.inf)


def final(runs: list[Numbers]) -> list[float]:
    """The best bound of each run."""
    return [float(np.nanmax(curve(run)[2])) for run in runs]


def _lead(races: dict[str, list[Numbers]]) -> str:
    if not races:
        return "No contestant has run yet."
    best = {name: median(final(runs)) for name, runs in races.items()}
    said = ", ".join(f"{NAMES[name]} {value:.2f}" for name, value in sorted(best.items(), key=lambda kv: -kv[1]))
    return f"Best test bound in nats per example, median over seeds: {said}."


def _race(races: dict[str, list[Numbers]], data: str) -> Section:
    level = median_low(final(races[BASELINE])) if BASELINE in races else None
    rows = [_row(name, runs, level) for name, runs in races.items()]
    title = "never" if level is None else f"{level:.2f}"
    heads = ("", "setting", "best bound", f"epochs to {title}", f"seconds to {title}", "ms per step")
    note = (
        "Medians over seeds, ranges in small type. The level is the median of the best bounds of RWS with "
        "Adam, the lower of two."
    )
    drawn = f"Helmholtz machine, {data}: median and range of {max(map(len, races.values()))} seeds"
    pictures = (
        Picture("epochs", "Bound on the test examples against epochs", _curves(races, 0, "epochs", drawn), (5, 3.9)),
        Picture("seconds", "The same against seconds", _curves(races, 1, "seconds of training", drawn), (5, 3.9)),
    )
    tables = (Table("Contestants", heads, tuple(rows), note), *_means(races))
    return Section("Learning", _verdict(races, level), tables, pictures)


def _means(races: dict[str, list[Numbers]]) -> tuple[Table, ...]:
    """Bounds of the iterates and of their mean after each epoch, where means were taken."""
    rows = []
    for name, runs in races.items():
        for points in zip(*(run["curve"] for run in runs), strict=False):
            epoch = points[0]["epoch"]
            if "mean" in points[0] and epoch > 0 and epoch == round(epoch):
                numbers = [[math.nan if p[key] is None else p[key] for p in points] for key in KEYS]
                bound, mean, seconds = map(median, numbers)
                rows.append((NAMES[name], f"{epoch:g}", f"{bound:.2f}", f"{mean:.2f}", f"{seconds:.1f}"))
    heads = ("", "epochs", "bound", "mean of the iterates", "seconds")
    note = "Medians over seeds. The mean has weights 9 / (t + 9); its cost is in the seconds."
    return (Table("Averaged iterates", heads, tuple(rows), note),) if rows else ()


def _verdict(races: dict[str, list[Numbers]], level: float | None) -> str:
    if level is None or "nrws" not in races:
        return "The baseline, RWS with Adam, or NRWS has not run yet."
    ours = [find_first_epoch(run, level) for run in races["nrws"]]
    theirs = [find_first_epoch(run, level) for run in races[BASELINE]]
    epochs, seconds = (median(o[i] for o in ours) / median(t[i] for t in theirs) for i in (0, 1))
    if not math.isfinite(epochs):
        return f"NRWS does not reach {level:.2f}, where RWS with Adam ends, in most runs."
    return (
        f"To {level:.2f}, where RWS with Adam ends, NRWS takes {epochs:.2f} of its epochs and {seconds:.2f} of its "
        "seconds."
    )


def _row(name: str, runs: list[Numbers], level: float | None) -> tuple[str | Cell, ...]:
    bests = final(runs)
    times = [find_first_epoch(run, level) if level is not None else (math.inf, math.inf) for run in runs]
    each = [1000 * run["curve"][-1]["seconds"] / run["steps"] for run in runs]
    return (
        NAMES[name],
        runs[0]["choice"],
        (f"{median(bests):.2f}", f"{min(bests):.2f} to {max(bests):.2f}"),
        _when([t[0] for t in times], "g"),
        _when([t[1] for t in times], ".3g"),
        f"{median(each):.2g}",
    )


def _when(values: list[float], kind: str) -> Cell:
    middle = median(values)
    finite = [v for v in values if math.isfinite(v)]
    small = f"{len(finite)} of {len(values)}" + (f", {min(finite):{kind}} to {max(finite):{kind}}" if finite else "")
    return (f"{middle:{kind}}" if math.isfinite(middle) else "-", small)


def _curves(races: dict[str, list[Numbers]], axis: int, label: str, title: str) -> Callable[[Figure], None]:
    def draw(axes: Axes) -> None:
        ends, starts = [], []
        for name, runs in races.items():
            curves = [curve(run) for run in runs]
            length = min(len(points[0]) for points in curves)
            x = np.median([points[axis][:length] for points in curves], axis=0)
            y = np.array([points[2][:length] for points in curves])
            colour, dash = LOOKS[name]
            axes.plot(x, np.median(y, axis=0), color=colour, linestyle=dash, linewidth=1.8, label=NAMES[name])
            axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.18, linewidth=0)
            ends += [np.nanmedian(y[:, -1]), np.nanmax(y)]
            starts.append(np.nanmedian(y[:, 0]))
        room = max(ends) - min(ends) + 1e-6
        below = max(0.75 * room, 0.15 * (max(ends) - max(starts)))
        axes.set_ylim(min(ends) - below, max(ends) + 0.1 * room)  # steep starts, and dives, are cut off
        axes.set_title(title, loc="left", fontsize=10)

    return fill_axes(draw, {"xlabel": label, "ylabel": "bound on test examples, nats"}, columns=3)


def _images(races: dict[str, list[Numbers]], ink: bool) -> Section:
    """ink: whether a unit that is up is dark, as in drawings; in photographs it is bright."""
    seen = {name: runs[0] for name, runs in races.items() if runs[0]["looks"]}
    epochs = [look["epoch"] for look in next(iter(seen.values()))["looks"]]
    size = (2.6 * len(epochs) + 0.9, 0.95 * len(seen) + 0.4)
    picture = Picture("images", "Probabilities of pixels in dreams from the first seed", _gallery(seen, ink), size)
    return Section("Dreams", f"After {', '.join(str(e) for e in epochs)} epochs.", (), (picture,))


def _gallery(seen: dict[str, Numbers], ink: bool) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        looks = [run["looks"] for run in seen.values()]
        axes = figure.subplots(len(seen), len(looks[0]), squeeze=False)
        for row, (name, run) in enumerate(seen.items()):
            for column, look in enumerate(run["looks"]):
                _tile(axes[row][column], look["images"], tuple(run["shape"]), ink)
                if column == 0:
                    axes[row][column].set_ylabel(NAMES[name], fontsize=9)
                if row == 0:
                    axes[row][column].set_title(f"epoch {look['epoch']}", fontsize=10)

    return fill


def _tile(axes: Any, images: list[list[float]], shape: tuple[int, ...], ink: bool) -> None:
    """Two rows of images, a blank line between."""
    height, width = shape
    half = len(images) // 2
    sheet = np.ones((2 * (height + 1) - 1, half * (width + 1) - 1))
    for i, image in enumerate(images[: 2 * half]):
        top, left = (i // half) * (height + 1), (i % half) * (width + 1)
        pixels = np.array(image).reshape(height, width)
        sheet[top : top + height, left : left + width] = 1 - pixels if ink else pixels
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _settings(findings: Findings) -> Section:
    rows = []
    for name, title in NAMES.items():
        tried = [numbers for i in range(9) for numbers in findings.of(f"tune-{name}-{i}")]
        rows += [
            (title, numbers["choice"], "-" if numbers["valid"] is None else f"{numbers['valid']:.2f}")
            for numbers in tried
        ]
    table = Table("Every setting", ("", "setting", "held-out bound"), tuple(rows))
    return Section("Settings", f"After {findings.settings.tuning} epochs, on examples held out of training.", (table,))


def write_tables(story: Story) -> str:
    """The learning curves' table and that of the settings, in Markdown."""
    parts = []
    for table in (table for section in story.sections for table in section.tables if table.rows):
        rows = [[f"{said} ({small})" if small else said for said, small in row] for row in table.cells]
        parts.append(write_rows(table.heads, rows))
    return "\n\n".join(parts)


def main(docs: Path) -> None:
    """Write the tables and the pictures of the kept races."""
    page = docs / "papers" / "varady_2022.md"
    for name, stem in KEPT.items():
        story = tell_kept(find("varady_2022_mnist"), RECORDS / name)
        page.write_text(insert(page.read_text(), name, write_tables(story)))
        draw_kept(story.sections[0], {axis: docs / "images" / f"{stem}_{axis}" for axis in ("epochs", "seconds")})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
