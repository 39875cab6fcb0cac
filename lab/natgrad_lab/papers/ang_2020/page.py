"""The report's three claims and its figures 2 and 3, from the records of `ang_2020_cifar`.

`python -m natgrad_lab.papers.ang_2020.page runs/ang_2020_cifar docs/images` draws the pictures of the page and prints
its tables. Several folders may be given, such as one per network.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from natgrad_lab.experiments.race_summary import Record, Spread, read_runs
from natgrad_lab.experiments.records import Folder
from natgrad_lab.figures import (
    DASHES,
    INK,
    PALETTE,
    draw_order,
    name_rows,
    put_legend_below,
    put_title,
    save_picture,
)

NAMES = ("K-FAC", "Kaldi-style", "diagonal", "SGD-momentum", "Adam")
NETWORKS = {"densenet": "DenseNet", "wide_resnet": "WideResNet"}
SHARE = 0.95  # of tuned SGD's best precision, which the others are to reach
SMOOTHED = 15  # batches, whose mean the loss of a step is
QUANTILES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # of Student's t, two sides, 95 %, by the number of seeds

Runs = Mapping[str, Sequence[Record]]  # contestant -> its runs from all seeds, in the order of the seeds


def measure_half(numbers: Spread) -> float:
    """Half of the 95 % interval by Student's t; nan for a single seed."""
    count = len(numbers.values)
    return QUANTILES.get(count, 2.6) * numbers.error if count > 1 else math.nan


def write_interval(numbers: Spread, digits: int) -> str:
    """The mean and its 95 % interval, or how many seeds have a number."""
    if math.isnan(numbers.mean):
        return f"{len(numbers.known_values)} of {len(numbers.values)}"
    return f"{numbers.mean:.{digits}f} ± {measure_half(numbers):.{digits}f}"


def collect(folders: Sequence[Path]) -> dict[str, Runs]:
    """Network -> contestant -> runs of the race, those seeds that every contestant has finished."""
    finished: dict[str, dict[str, dict[int, Record]]] = {}
    for folder in folders:
        for record in read_runs(Folder(folder).read_all()):
            header = record.header
            if header["phase"] == "race":
                finished.setdefault(header["task"], {}).setdefault(header["contestant"], {})[header["seed"]] = record
    common: dict[str, Runs] = {}
    for network, runs in finished.items():
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in runs.values())))
        names = [name for name in NAMES if name in runs] + [name for name in runs if name not in NAMES]
        common[network] = {name: [runs[name][seed] for seed in seeds] for name in names}
    return common


def read_evaluations(record: Record, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, seconds and the values of that name, of the rows that have it."""
    rows = [row for row in record.rows if row.get(name) is not None]
    step, seconds, values = (np.array([row[key] for row in rows], float) for key in ("step", "seconds", name))
    return step, seconds, values


def smooth_losses(record: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, seconds and the running mean over the last `SMOOTHED` batches' losses."""
    step, seconds, loss = read_evaluations(record, "loss")
    sums = np.concatenate([[0.0], loss.cumsum()])
    first = np.maximum(np.arange(len(loss)) + 1 - SMOOTHED, 0)
    return step, seconds, (sums[1:] - sums[first]) / (np.arange(len(loss)) + 1 - first)


def reach(steps: np.ndarray, values: np.ndarray, level: float) -> float | None:
    """The first step at which the values come to a level from below, between two by a straight line; None if never."""
    above = np.flatnonzero(values >= level)
    if not len(above):
        return None
    place = above[0]
    if not place:
        return float(steps[0])
    share = (level - values[place - 1]) / (values[place] - values[place - 1])
    return float(steps[place - 1] + share * (steps[place] - steps[place - 1]))


def measure(runs: Runs) -> dict[str, dict[str, Spread]]:
    """Contestant -> what the claims ask -> its numbers."""
    plain = runs["SGD-momentum"]
    best = [SHARE * read_evaluations(record, "test_precision")[2].max() for record in plain]
    losses = [smooth_losses(record)[2][-1] for record in plain]
    precisions = {name: [read_evaluations(r, "test_precision") for r in records] for name, records in runs.items()}
    smoothed = {name: [smooth_losses(record) for record in records] for name, records in runs.items()}

    def ask(name: str, i: int, record: Record) -> dict[str, float | None]:
        (steps, _, precision), (batches, _, loss) = precisions[name][i], smoothed[name][i]
        return {
            "precision": precision[-1],
            "best precision": precision.max(),
            "updates to the precision": reach(steps, precision, best[i]),
            "updates to the loss": reach(batches, -loss, -losses[i]),
            "batch loss": loss[-1],
            "test loss": read_evaluations(record, "test_loss")[2][-1],
            "seconds": record.end["seconds"],
            "time of a step": record.end["seconds"] / plain[i].end["seconds"],
        }

    answers = {name: [ask(name, i, record) for i, record in enumerate(records)] for name, records in runs.items()}
    return {
        name: {key: Spread(tuple(seed[key] for seed in seeds)) for key in seeds[0]} for name, seeds in answers.items()
    }


def subtract(first: Spread, second: Spread) -> Spread:
    """Seed by seed."""
    pairs = zip(first.values, second.values, strict=True)
    return Spread(tuple(None if a is None or b is None else a - b for a, b in pairs))


def fill_curves(runs: Runs, title: str, figure: Figure) -> None:
    """Precision and loss against updates and seconds: means over the seeds, and their range."""
    panels = figure.subplots(2, 2, sharey="row")
    for number, (name, records) in enumerate(runs.items()):
        look = {"color": PALETTE[number], "linestyle": DASHES[number], "label": name}
        precisions = [read_evaluations(record, "test_precision") for record in records]
        losses = [smooth_losses(record) for record in records]
        for row, parts in zip(panels, (precisions, losses), strict=True):
            for column, axes in enumerate(row):
                across, curves = np.mean([part[column] for part in parts], axis=0), np.array([p[2] for p in parts])
                axes.plot(across, curves.mean(0), **look)
                axes.fill_between(across, curves.min(0), curves.max(0), color=look["color"], alpha=0.15, linewidth=0)
                axes.grid(axis="y")
    panels[0][0].set_ylabel("precision on test images")
    panels[1][0].set_ylabel(f"loss of {SMOOTHED} batches, nats")
    panels[1][0].set_yscale("log")
    panels[1][0].set_xlabel("updates")
    panels[1][1].set_xlabel("CPU seconds")
    put_legend_below(figure, panels[0][0], columns=len(runs))
    put_title(figure, title)


CLAIMS = (  # the number that decides what section 2.4 says, and the places that it gives, low to high
    (
        "Updates to .95 of tuned SGD's best precision",
        "updates to the precision",
        {"Kaldi-style": 0, "SGD-momentum": 1, "Adam": 1},
    ),
    ("Time of an update, SGD's = 1", "time of a step", {"Kaldi-style": 1, "SGD-momentum": 0, "Adam": 0}),
    ("Precision at the end", "precision", {"Kaldi-style": 1, "diagonal": 0, "Adam": 0}),
)


def fill_claims(networks: Mapping[str, Mapping[str, Mapping[str, Spread]]], figure: Figure) -> None:
    """A row per claim: the report's order on the left, our numbers of each network beside it."""
    grid = figure.subplots(len(CLAIMS), 1 + len(networks), squeeze=False)
    for row, (title, key, places) in zip(grid, CLAIMS, strict=True):
        draw_order(row[0], {name: places.get(name) for name in NAMES})
        row[0].set_title(title, loc="left", fontsize=10)
        for axes, (_, measured) in zip(row[1:], networks.items(), strict=True):
            draw_numbers(axes, {name: numbers[key] for name, numbers in measured.items() if name in NAMES})
    grid[-1][0].set_xlabel("the report says\n(no numbers)")
    for axes, network in zip(grid[-1][1:], networks, strict=True):
        axes.set_xlabel(f"ours: {NETWORKS.get(network, network)}")
    put_title(
        figure, "Ang 2020, section 2.4: classifiers on CIFAR-10, the report's words and our numbers with 95 % intervals"
    )


def draw_numbers(axes: Axes, numbers: Mapping[str, Spread]) -> None:
    """Our means with their intervals, and the seeds as small points."""
    for height, name in enumerate(NAMES):
        if name not in numbers:
            continue
        values = numbers[name].known_values
        axes.plot(values, [height] * len(values), ".", color=INK, markersize=3)
        if len(values) < len(numbers[name].values):
            said = f"{len(values)} of {len(numbers[name].values)}"
            axes.annotate(said, (0.98, height), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8)
            continue
        half = np.nan_to_num(measure_half(numbers[name]))
        axes.errorbar(numbers[name].mean, height, xerr=half, fmt="o", color=PALETTE[0], capsize=3)
    name_rows(axes, NAMES)
    axes.set_yticklabels([])
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x")


PAIRS = (*((name, other) for name in NAMES[:3] for other in NAMES[3:]), *((name, NAMES[2]) for name in NAMES[:2]))
"""Differences that decide: each of ours less SGD and Adam, and the two full metrics less the diagonal one."""


def list_lines(networks: Mapping[str, Mapping[str, Mapping[str, Spread]]]) -> list[str]:
    """The tables of the page and the differences that decide the claims."""
    digits = {"updates to the precision": 0, "updates to the loss": 0, "seconds": 1, "time of a step": 2}
    lines = []
    for network, measured in networks.items():
        keys = list(next(iter(measured.values())))
        lines += ["", f"{network}: " + " | ".join(keys)]
        for name, numbers in measured.items():
            cells = (write_interval(numbers[key], digits.get(key, 3)) for key in keys)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        for key in ("precision", "updates to the precision", "updates to the loss"):
            for name, other in PAIRS:
                if name in measured and other in measured:
                    gap = subtract(measured[name][key], measured[other][key])
                    lines.append(f"{key}, {name} less {other}: {write_interval(gap, digits.get(key, 3))}")
    return lines


def draw_all(folders: Sequence[Path], images: Path) -> list[str]:
    """Write the PNGs of the page; the lines of its tables."""
    runs = collect(folders)
    networks = {network: measure(of) for network, of in runs.items()}
    save_picture(partial(fill_claims, networks), (8.4, 6.2), images / "ang_claims")
    for network, of in runs.items():
        seeds = len(next(iter(of.values())))
        title = f"{NETWORKS.get(network, network)} on CIFAR-10: mean and range, seeds: {seeds}"
        save_picture(partial(fill_curves, of, title), (8.4, 6.2), images / f"ang_{network}")
    return list_lines(networks)


if __name__ == "__main__":
    *given, target = map(Path, sys.argv[1:])
    sys.stdout.write("\n".join(draw_all(given, target)) + "\n")
