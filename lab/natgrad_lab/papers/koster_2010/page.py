"""The page of `koster_2010_natural_images`: features, what the second layer pools, and the methods' curves."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
from matplotlib.figure import Figure

from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, PALETTE, draw_images, put_legend_below
from natgrad_lab.words import short

METHODS = ("feature blocks", "natural gradient", "Adam", "SGD-momentum")


def tell(findings: Findings) -> Story:
    """Features and curves of the methods that are finished."""
    s = findings.settings
    told = {method: found for method in METHODS if (found := findings.of(method))}
    best = min(told, key=lambda method: median(ends(told[method])))
    method = (
        f"{s.patches:,} patches of {s.size} x {s.size} pixels from random places of the photographs ({s.photographs}), "
        f"their mean taken off and divided by their norm, whitened by the {s.keep} leading of {s.size**2 - 1} main "
        f"components; {s.keep} features and {s.keep} units, W orthogonal and V = exp(v) near the identity at first. W "
        "and V are fitted together and without constraints (Koster & Hyvarinen keep rows at unit norm); exact score "
        f"matching, batches of {s.batch}, {s.seconds:g} s of CPU time each. Features are drawn as W times the "
        "inverse of the whitening: what the model finds in patches."
    )
    sections = (
        Section("Loss", _verdict(told, best), (_table(told),), (_curves(told, 0), _curves(told, 1))),
        *(_section(name, found[0], s.size) for name, found in told.items()),
    )
    return Story("Simple cells from photographs", _lead(told[best][0], best), method, sections)


def ends(found: list[Numbers]) -> list[float]:
    """The last losses."""
    return [one["curve"][-1][2] for one in found]


def _lead(found: Numbers, best: str) -> str:
    c, e = found["coherence"], found["extent"]
    return (
        f"With the lowest loss ({best}) the slopes of the median feature point one way to {c:.0%} (main components: "
        f"{found['coherence of components']:.0%}), and {e:.0%} of the pixels hold three quarters of its energy "
        f"({found['extent of components']:.0%}). Features that one unit pools have like orientations: mean cosine of "
        f"twice the angle between them {found['likeness']:.2f}, 0 by chance."
    )


def _verdict(told: dict[str, list[Numbers]], best: str) -> str:
    said = ", ".join(f"{method} {short(median(ends(found)))}" for method, found in told.items())
    return f"Held-out loss after the same CPU time: {said}. {best} is lowest."


def _table(told: dict[str, list[Numbers]]) -> Table:
    rows = tuple(
        (
            method,
            short(median(ends(found))),
            f"{median(one['steps'] for one in found):,}",
            *(f"{median(one[key] for one in found):.2f}" for key in ("coherence", "extent", "likeness")),
        )
        for method, found in told.items()
    )
    heads = ("", "held-out loss", "steps", "coherence", "extent", "likeness of pooled features")
    return Table("At the end, medians over seeds", heads, rows)


def _curves(told: dict[str, list[Numbers]], axis: int) -> Picture:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (method, found) in enumerate(told.items()):
            for place, one in enumerate(found):
                points = np.array(one["curve"])
                label = method if place == 0 else None
                style = {"color": PALETTE[number], "linestyle": DASHES[number], "linewidth": 1.6}
                axes.plot(points[:, axis], points[:, 2], label=label, **style)
        axes.set(xlabel=("CPU seconds", "steps")[axis], ylabel="score matching loss, held-out patches")
        axes.set_xscale("log") if axis else None
        put_legend_below(figure, axes)

    return Picture(("loss-seconds", "loss-steps")[axis], ("Against seconds", "Against steps")[axis], fill)


def _section(method: str, found: Numbers, size: int) -> Section:
    features, pooling = np.array(found["features"]).reshape(-1, size, size), np.array(found["pooling"])
    stem = method.replace(" ", "-").lower()
    first, second = "First layer: features, the strongest pooled first", "Second layer: one unit a row, what it pools"
    pictures = (
        Picture(
            f"features-{stem}", first, _features(features, pooling, method), (7.0, 0.3 + 0.7 * -(-len(features) // 10))
        ),
        Picture(f"pooling-{stem}", second, _pools(features, pooling), (7.0, 7.0)),
    )
    verdict = f"{found['steps']:,} steps; coherence {found['coherence']:.2f}, extent {found['extent']:.2f}."
    return Section(method, verdict, (), pictures)


def _features(features: np.ndarray, pooling: np.ndarray, method: str) -> Callable[[Figure], None]:
    order, size = np.argsort(-pooling.max(0)), features.shape[1]

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        draw_images(axes, features[order], 10)
        axes.set_title(
            f"{len(features)} features of photographs' patches, {size} x {size} pixels: {method}", loc="left"
        )

    return fill


def _pools(features: np.ndarray, pooling: np.ndarray, units: int = 10, shown: int = 10) -> Callable[[Figure], None]:
    """The units that pool most, each with its strongest features."""
    chosen = np.argsort(-pooling.sum(1))[:units]
    order = np.concatenate([np.argsort(-pooling[unit])[:shown] for unit in chosen])
    return lambda figure: draw_images(figure.subplots(), features[order], shown)
