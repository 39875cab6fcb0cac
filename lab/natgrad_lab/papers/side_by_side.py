"""What the papers print beside what came out here: the pictures of the papers' pages.

`python -m natgrad_lab.papers.side_by_side docs/images` draws them again. The numbers are those of the pages, where the
commands stand that ours come from; what follows from formulas is computed anew. Ang's claims need records of runs:
`natgrad_lab.papers.ang_2020.page` draws them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from natgrad_lab.figures import INK, PALETTE, put_title, save_picture
from natgrad_lab.papers.ang_2020 import normals
from natgrad_lab.papers.blog_2022 import steepest
from natgrad_lab.papers.compared_numbers import PANELS, TITLES, Panel
from natgrad_lab.papers.malago_2023 import printed_toy


def number(printed: str) -> float:
    """A number as a page prints it."""
    return float(printed.replace(",", ""))


def fill(name: str, figure: Figure) -> None:
    """Draw the panels of a picture, a row of two axes each."""
    panels = PANELS[name]
    heights = [len(panel.rows) + 1.2 for panel in panels]
    grid = figure.subplots(len(panels), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    for panel, (left, right) in zip(panels, grid, strict=True):
        if panel.in_words:
            draw_order(left, panel)
        else:
            draw_side(left, panel, [(row.paper, row.paper_error) for row in panel.rows], 1)
        draw_side(right, panel, [(row.ours, row.our_error) for row in panel.rows], 0)
        left.set_title(panel.title, loc="left", fontsize=10)
        right.set_yticklabels([])
    grid[-1][0].set_xlabel("the abstract's order (it has no numbers)" if panels[-1].in_words else "the paper")
    grid[-1][1].set_xlabel("ours")
    put_title(figure, TITLES[name])


def draw_order(axes: Axes, panel: Panel) -> None:
    """The order that a paper's words give, on an axis without numbers."""
    for height, row in enumerate(panel.rows):
        if row.place is None:
            axes.annotate("not said", (0.02, height), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        else:
            axes.plot(row.place, height, "o", color=PALETTE[1])
    most = max(row.place or 0 for row in panel.rows)
    name_rows(axes, panel)
    axes.set_xlim(-0.6, most + 0.6)
    axes.set_xticks((0, most), ["less", "more"], fontsize=8)
    axes.grid(axis="x")


def draw_side(axes: Axes, panel: Panel, cells: list[tuple[str | None, str | None]], colour: int) -> None:
    """The numbers of one side as points, with their errors where these are known."""
    for place, (value, error) in enumerate(cells):
        if value is None:
            axes.annotate(
                "not in the paper", (0.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
            continue
        x = number(value)
        axes.errorbar(
            x, place, xerr=None if error is None else number(error), fmt="o", color=PALETTE[colour], capsize=3
        )
        said = value if error is None else f"{value} ± {error}"
        axes.annotate(said, (x, place), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8, color=INK)
    name_rows(axes, panel)
    axes.margins(x=0.25)
    if panel.logarithmic:
        axes.set_xscale("log")
    if panel.limits is not None:
        axes.set_xlim(*panel.limits)
    axes.grid(axis="x")


def name_rows(axes: Axes, panel: Panel) -> None:
    """The contestants from top to bottom."""
    axes.set_yticks(range(len(panel.rows)), [row.name for row in panel.rows], fontsize=9)
    axes.set_ylim(len(panel.rows) - 0.5, -0.8)


def draw_all(folder: Path) -> None:
    """Write a PNG of every picture."""
    for name, panels in PANELS.items():
        height = sum(0.32 * (len(panel.rows) + 1.2) for panel in panels) + 1.1
        save_picture(partial(fill, name), (8.0, height), folder / name)
    printed_toy.draw_all(folder)
    steepest.draw_all(folder)
    normals.draw_all(folder)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
