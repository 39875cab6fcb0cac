"""The papers' printed numbers beside ours, as the pictures of the papers' pages.

`python -m natgrad_lab.papers.side_by_side docs/images` draws them again. The numbers are those of the pages, where the
commands stand that ours come from.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from natgrad_lab.figures import INK, PALETTE, draw, put_title, save


@dataclass(frozen=True)
class ComparedRow:
    """One contestant: the paper's number and ours as they are printed on the page, None where there is none.

    Args:
        name: Of the contestant.
        paper: The paper's number.
        ours: Our number.
        paper_error: The paper's standard deviation.
        our_error: Our standard error or deviation.
    """

    name: str
    paper: str | None
    ours: str | None
    paper_error: str | None = None
    our_error: str | None = None


@dataclass(frozen=True)
class Panel:
    """One quantity: its rows, drawn twice, the paper's on the left and ours on the right.

    Args:
        title: The quantity and its unit.
        rows: The contestants.
        limits: Of both axes; None where the numbers are too far apart for one axis.
        logarithmic: Whether the axes are.
    """

    title: str
    rows: tuple[ComparedRow, ...]
    limits: tuple[float, float] | None = None
    logarithmic: bool = False


PANELS = {
    "pascanu_table1": (
        Panel(
            "Restricted MNIST: test error, %",
            (
                ComparedRow("MSGD", "5.22", "10.95", None, ".16"),
                ComparedRow("KL, unlabelled", "4.63", "12.03", None, ".21"),
                ComparedRow("KL, different batch", "4.89", "11.94", None, ".20"),
                ComparedRow("KL, same batch", "4.91", "11.86", None, ".20"),
                ComparedRow("covariance", "4.74", "11.48", None, ".28"),
            ),
        ),
        Panel(
            "MNIST: test error, %",
            (
                ComparedRow("MSGD", None, "3.63", None, ".19"),
                ComparedRow("KL, different batch", ".78", "5.01", None, ".21"),
                ComparedRow("KL, same batch", ".82", "4.88", None, ".15"),
                ComparedRow("covariance", "1.07", "6.38", None, ".26"),
            ),
        ),
        Panel(
            "Faces: test error, %",
            (
                ComparedRow("MSGD", None, "66.7"),
                ComparedRow("KL, unlabelled", "16.96", "68.0"),
                ComparedRow("KL, different batch", None, "67.0"),
                ComparedRow("KL, same batch", "18.87", "68.9"),
            ),
        ),
    ),
    "karakida_table1": (
        Panel(
            "Test error at the end",
            (
                ComparedRow("SGD", "-33.21", "-29.40", "2.25", "2.39"),
                ComparedRow("natural, eq. 4", "-32.14", "-29.45", "3.58", "1.80"),
                ComparedRow("natural, exact", None, "-28.82", None, "1.94"),
            ),
            limits=(-37.0, -25.0),
        ),
        Panel(
            "Steps to a test error of -28 (ours: of the runs that reach it)",
            (
                ComparedRow("SGD", "216,000", "296,000", None, "18,000"),
                ComparedRow("natural, eq. 4", "19,300", "45,800", None, "10,200"),
                ComparedRow("natural, exact", None, "32,200", None, "8,100"),
            ),
            limits=(1e4, 6e5),
            logarithmic=True,
        ),
        Panel(
            "Processing time, SGD = 1",
            (
                ComparedRow("SGD", "1", "1"),
                ComparedRow("natural, eq. 4", ".34", ".57"),
                ComparedRow("natural, exact", None, ".46"),
            ),
            limits=(0.0, 1.2),
        ),
    ),
}
"""The pictures by the name of their file."""

TITLES = {
    "pascanu_table1": "Pascanu & Bengio 2013, table 1: stochastic gradient descent and metrics on MNIST and on faces",
    "karakida_table1": "Karakida, Okada & Amari 2016, table 1: the two-layer model on ISA data, score matching",
}
"""Data set and contestants, by the name of the file."""


def number(printed: str) -> float:
    """A number as a page prints it.

    Args:
        printed: Such as ".34" or "216,000".
    """
    return float(printed.replace(",", ""))


def fill(name: str, figure: Figure) -> None:
    """Draw the panels of a picture, a row of two axes each.

    Args:
        name: Of the picture's file.
        figure: Empty.
    """
    panels = PANELS[name]
    heights = [len(panel.rows) + 1.2 for panel in panels]
    grid = figure.subplots(len(panels), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    for panel, (left, right) in zip(panels, grid, strict=True):
        draw_side(left, panel, [(row.paper, row.paper_error) for row in panel.rows], 1)
        draw_side(right, panel, [(row.ours, row.our_error) for row in panel.rows], 0)
        left.set_title(panel.title, loc="left", fontsize=10)
        right.set_yticklabels([])
    grid[-1][0].set_xlabel("the paper")
    grid[-1][1].set_xlabel("ours")
    put_title(figure, TITLES[name])


def draw_side(axes: Axes, panel: Panel, cells: list[tuple[str | None, str | None]], colour: int) -> None:
    """The numbers of one side as points, with their errors where these are known.

    Args:
        axes: Where.
        panel: Names the rows.
        cells: A number and its error for each row.
        colour: Place in the palette.
    """
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
    axes.set_yticks(range(len(panel.rows)), [row.name for row in panel.rows], fontsize=9)
    axes.set_ylim(len(panel.rows) - 0.5, -0.8)
    axes.margins(x=0.25)
    if panel.logarithmic:
        axes.set_xscale("log")
    if panel.limits is not None:
        axes.set_xlim(*panel.limits)
    axes.grid(axis="x")


def draw_all(folder: Path) -> None:
    """Write a PNG of every picture.

    Args:
        folder: Where to.
    """
    for name, panels in PANELS.items():
        height = sum(0.32 * (len(panel.rows) + 1.2) for panel in panels) + 1.1
        stem = folder / name
        save(draw(partial(fill, name), (8.0, height)), stem)
        stem.with_suffix(".svg").unlink()


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
