"""The look of all figures, and how they are kept.

A figure is drawn once and saved three times: PNG and SVG files on white, and an SVG for the page whose colours are CSS
variables, so that it follows the page into the dark. Colours other than INK, GRID and PALETTE stay as they are.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, GRID = "#1b1f24", "#dfe3e8"
PALETTE = (
    "#c2410c", "#1d4ed8", "#0f766e", "#7c3aed", "#a16207", "#be185d", "#4d7c0f", "#57534e", "#0891b2", "#7f1d1d",
)  # fmt: skip
DARK = (  # PALETTE on a dark ground
    "#fb923c", "#7aa2ff", "#4fd1b5", "#b79cff", "#e0b84a", "#f28ab8", "#a3e635", "#a8a29e", "#22d3ee", "#fca5a5",
)  # fmt: skip
STYLE: dict[Any, Any] = {
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
    """A figure of that size in inches, filled by fill(figure) in our style."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once: else each of the three savings does it again
        return figure


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


def save(figure: Figure, stem: Path) -> None:
    """stem.png and stem.svg."""
    with mpl.rc_context(STYLE):
        figure.savefig(stem.with_suffix(".png"), dpi=160, facecolor="white")
    stem.with_suffix(".svg").write_text(_svg(figure, stem.name, transparent=False))


def inline(figure: Figure, name: str, title: str) -> str:
    """The figure as an <svg> element in the page's colours. name: unique in the page, it prefixes every id."""
    text = _svg(figure, name, transparent=True)
    text = text[text.index("<svg") :]
    for colour, variable in ((INK, "--ink"), (GRID, "--rule"), *((c, f"--c{i}") for i, c in enumerate(PALETTE))):
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"'?DejaVu Sans'?(, [^;\"]*sans-serif)?", "inherit", text)
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    width, height = figure.get_size_inches()
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width * 72:g} {height * 72:g}"'
    return re.sub(r"<svg [^>]*>", head + ' xmlns:xlink="http://www.w3.org/1999/xlink">', text, count=1)


def _svg(figure: Figure, salt: str, transparent: bool) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
