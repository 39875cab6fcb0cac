"""The look of all figures, and how they are kept.

A figure is drawn once and saved twice: as a PNG and as an SVG file, both on white. The page has the same SVG with CSS
variables for its colours, so that it follows the page into the dark. Colours other than INK, GRID and PALETTE stay.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GRID = "#1b1f24", "#dfe3e8"
PALETTE = (  # the first four differ for the colour-blind, and neighbours in grey
    "#d95f02", "#1b3a93", "#1a9e77", "#c04fb4", "#5c4a00", "#be185d", "#4d7c0f", "#57534e", "#0891b2", "#7f1d1d",
)  # fmt: skip
DARK = (  # PALETTE on a dark ground
    "#fb923c", "#9db8ff", "#4fd1b5", "#f0a0e8", "#e0b84a", "#f28ab8", "#a3e635", "#a8a29e", "#22d3ee", "#fca5a5",
)  # fmt: skip
DASHES: tuple[Any, ...] = (  # one for each colour: in grey, lines differ by these
    "-", (0, (6, 1.5)), (0, (2, 1.2)), "-.", ":", (0, (1, 1)),
    (0, (7, 1.2, 2, 1.2)), (0, (4, 1.2, 1, 1.2, 1, 1.2)), (0, (9, 2.5)), (0, (3, 0.7)),
)  # fmt: skip
LETTERS = 13.5  # of a title, to an inch
DPI = 160  # of a PNG
STYLE: dict[Any, Any] = {
    "axes.prop_cycle": cycler(color=PALETTE, linestyle=DASHES),
    "axes.titlesize": 11,
    "font.size": 11,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "path.simplify": True,
}


def draw(fill: Callable[[Figure], None], size: tuple[float, float]) -> Figure:
    """A figure in the laboratory's style."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # laid out once: with any engine, "none" too, each saving draws twice
        return figure


def put_legend_below(figure: Figure, axes: Axes, columns: int = 2) -> None:
    """The legend of these axes below the figure, where it strikes nothing out."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, handlelength=2.6)


def put_title(figure: Figure, title: str) -> None:
    """A title at the left above the figure, in as many lines as it needs; a figure that has one keeps it.

    The titles of several axes name the panels, so that the figure needs one of its own beside them.
    """
    own = (axes.get_title(where) for axes in figure.axes for where in ("left", "center", "right"))
    if not figure.get_suptitle() and (len(figure.axes) > 1 or not any(own)):
        figure.suptitle(fill_evenly(title, round(LETTERS * figure.get_figwidth())), x=0.01, ha="left", fontsize=9)


def fill_evenly(text: str, width: int) -> str:
    """A text in as few lines as its words need, all about equally long."""
    count = len(textwrap.wrap(text, width))
    longest = max(map(len, text.split()), default=1)
    return textwrap.fill(
        text, next(w for w in range(min(longest, width), width + 1) if len(textwrap.wrap(text, w)) <= count)
    )


def look(number: int, width: float = 1.6) -> dict[str, Any]:
    """Colour and dashes of a line by its number."""
    return {"color": PALETTE[number], "linestyle": DASHES[number], "linewidth": width}


Lines = Mapping[str, Sequence[Any]]  # name -> (x, y) from every seed


def fill_axes(
    draw: Callable[[Axes], None], axis: Mapping[str, Any], title: str = "", columns: int = 2
) -> Callable[[Figure], None]:
    """Draws on one pair of axes, over horizontal lines, with the legend below. axis: what `Axes.set` takes."""

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        draw(axes)
        axes.set(**axis)
        axes.grid(visible=True, axis="y")
        if title:
            put_title(figure, title)
        put_legend_below(figure, axes, columns)

    return fill


def fill_lines(lines: Lines, axis: Mapping[str, Any], title: str = "", columns: int = 2) -> Callable[[Figure], None]:
    """Draws a line per seed, those of one name alike. axis: what `Axes.set` takes."""

    def draw(axes: Axes) -> None:
        for number, (name, curves) in enumerate(lines.items()):
            for place, (x, y) in enumerate(curves):
                axes.plot(x, y, label=None if place else name, **look(number))

    return fill_axes(draw, axis, title, columns)


def take_columns(runs: Mapping[str, Sequence[Any]], x: int, y: int) -> dict[str, list[Any]]:
    """Name -> (x, y) from every seed, out of the runs' curves, whose points are rows of numbers."""
    return {name: [np.array(run["curve"], float)[:, [x, y]].T for run in many] for name, many in runs.items()}


def draw_band(axes: Axes, x: Any, y: Any, name: str, style: dict[str, Any], reach: float = 0.5) -> None:
    """The median of rows y (seeds, k) as a line, and the quantiles `reach` below and above it as a band."""
    low, middle, high = np.nanquantile(np.asarray(y, float), (0.5 - reach, 0.5, 0.5 + reach), axis=0)
    axes.plot(x, middle, label=name, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.17, linewidth=0)


def draw_order(axes: Axes, places: Mapping[str, int | None]) -> None:
    """Names at their places in an order from less to more, on an axis without numbers; None: not said."""
    for height, place in enumerate(places.values()):
        if place is None:
            axes.annotate("not said", (0.02, height), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        else:
            axes.plot(place, height, "o", color=PALETTE[1])
    known = [place for place in places.values() if place is not None]
    ends = min(known), max(known)
    axes.set_xlim(ends[0] - 0.6, ends[1] + 0.6)
    axes.set_xticks(ends, ["less", "more"], fontsize=8)
    axes.grid(axis="x")
    name_rows(axes, places)


def name_rows(axes: Axes, names: Collection[str]) -> None:
    """Names from top to bottom, a line each."""
    axes.set_yticks(range(len(names)), list(names), fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.8)


def fill_strips(rows: Mapping[str, Any], side: int) -> Callable[[Figure], None]:
    """Draws rows of images of bits, a title over each. rows: title -> (images, pixels)."""

    def fill(figure: Figure) -> None:
        for axes, (name, images) in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows.items(), strict=True):
            tiles = [np.pad(np.array(image).reshape(side, -1), 1) for image in images]
            axes.imshow(np.concatenate(tiles, axis=1), cmap="gray_r", interpolation="nearest")
            axes.set_title(name, loc="left", fontsize=9)
            axes.set_axis_off()

    return fill


def draw_images(axes: Axes, images: np.ndarray, columns: int) -> None:
    """Images side by side, each on its own grey scale around zero."""
    rows, size = -(-len(images) // columns), images.shape[1]
    page = np.full((rows * (size + 1), columns * (size + 1)), np.nan)
    for place, image in enumerate(images):
        top, left = (place // columns) * (size + 1), (place % columns) * (size + 1)
        page[top : top + size, left : left + size] = image / max(np.abs(image).max(), 1e-12)
    axes.imshow(page, cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def save(figure: Figure, stem: Path) -> str:
    """Write stem.png and stem.svg; the text of an SVG without a ground, for `inline`."""
    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": stem.name}):
        figure.savefig(stem.with_suffix(".png"), dpi=DPI, facecolor="white")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    ground = r'\g<0><rect width="100%" height="100%" fill="white"/>'
    stem.with_suffix(".svg").write_text(re.sub(r"<svg [^>]*>", ground, text, count=1))
    return text


def save_picture(fill: Callable[[Figure], None], size: tuple[float, float], stem: Path, title: str = "") -> None:
    """Draw and write stem.png, for a page of the docs; with a title above where one is given."""

    def fill_titled(figure: Figure) -> None:
        fill(figure)
        if title:
            put_title(figure, title)

    figure = draw(fill_titled, size)
    with mpl.rc_context(STYLE):
        figure.savefig(stem.with_suffix(".png"), dpi=DPI, facecolor="white")


def inline(text: str, name: str, title: str) -> str:
    """What `save` gave of a figure, as an <svg> element in the page's colours."""
    text = text[text.index("<svg") :]
    for colour, variable in ((INK, "--ink"), (GRID, "--rule"), *((c, f"--c{i}") for i, c in enumerate(PALETTE))):
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"'?DejaVu Sans'?(, [^;\"]*sans-serif)?", "inherit", text)
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    box = text[text.index("viewBox=") :].split('"')[1]
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="{box}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + text[text.index(">") + 1 :]
