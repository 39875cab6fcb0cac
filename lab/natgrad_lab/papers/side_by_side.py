"""What the papers print beside what came out here: the pictures of the papers' pages.

`python -m natgrad_lab.papers.side_by_side docs/images` draws them again. The numbers are those of the pages, where the
commands stand that ours come from; what follows from formulas is computed anew. Ang's claims need records of runs:
`natgrad_lab.papers.ang_2020.page` draws them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from natgrad_lab.figures import INK, PALETTE, draw_order, name_rows, put_title, save_picture
from natgrad_lab.papers.ang_2020 import normals
from natgrad_lab.papers.blog_2022 import steepest
from natgrad_lab.papers.malago_2023 import printed_toy


@dataclass(frozen=True)
class ComparedRow:
    """One contestant: the paper's number and ours as they are printed on the page, None where there is none."""

    name: str  # of the contestant
    paper: str | None  # the paper's number
    ours: str | None  # our number
    paper_error: str | None = None  # the paper's standard deviation
    our_error: str | None = None  # our standard error or deviation
    place: int | None = None  # in the order that the paper's words give, low to high, where it gives no number


@dataclass(frozen=True)
class Panel:
    """One quantity: its rows, drawn twice, the paper's on the left and ours on the right."""

    title: str  # the quantity and its unit
    rows: tuple[ComparedRow, ...]  # the contestants
    limits: tuple[float, float] | None = None  # of both axes; None where the numbers are too far apart for one axis
    logarithmic: bool = False  # whether the axes are

    @property
    def in_words(self) -> bool:
        """True if the paper's side is an order without numbers."""
        return any(row.place is not None for row in self.rows)


def read_panels(text: str) -> tuple[Panel, ...]:
    """Panels between blank lines: `title; low to high of the axes, logarithmic`, then a line for each contestant.

    A line is `contestant | paper's number ± error, or its place in an order | our number ± error`.
    """
    panels = []
    for block in text.strip().split("\n\n"):
        head, *lines = (line.strip() for line in block.splitlines())
        title, _, axes = head.partition("; ")
        limits = axes.removesuffix(", logarithmic").split(" to ")
        both = (float(limits[0]), float(limits[1])) if axes else None
        panels.append(Panel(title, tuple(map(read_row, lines)), both, axes.endswith("logarithmic")))
    return tuple(panels)


def read_row(line: str) -> ComparedRow:
    """One contestant."""
    name, *cells = (cell.strip() for cell in line.split("|"))
    (paper, their_error), (ours, our_error) = ([part.strip() or None for part in f"{c}±".split("±")][:2] for c in cells)
    if paper is None or not paper.startswith("place"):
        return ComparedRow(name, paper, ours, their_error, our_error)
    return ComparedRow(name, None, ours, their_error, our_error, int(paper.removeprefix("place")))


PANELS = {  # the pictures by the name of their file
    name: read_panels(text)
    for name, text in {
        "pascanu_table1": """
            Restricted MNIST: test error, %
                MSGD                | 5.22 | 10.95 ± .16
                KL, unlabelled      | 4.63 | 12.03 ± .21
                KL, different batch | 4.89 | 11.94 ± .20
                KL, same batch      | 4.91 | 11.86 ± .20
                covariance          | 4.74 | 11.48 ± .28

            MNIST: test error, %
                MSGD                |      | 3.63 ± .19
                KL, different batch | .78  | 5.01 ± .21
                KL, same batch      | .82  | 4.88 ± .15
                covariance          | 1.07 | 6.38 ± .26

            Faces (the paper: TFD, ours: FER2013): test error, %
                MSGD                |       | 66.7
                KL, unlabelled      | 16.96 | 68.0
                KL, different batch |       | 67.0
                KL, same batch      | 18.87 | 68.9
        """,
        "karakida_table1": """
            Test error at the end, all runs; -39 to -22
                SGD                        | -33.21 ± 2.25 | -33.16 ± 3.79
                natural, eq. 4             | -32.14 ± 3.58 | -32.05 ± 3.53
                SGD, first data            |               | -29.88 ± 2.64
                natural, eq. 4, first data |               | -27.30 ± 3.64

            Steps to a test error of -28 (ours: of the runs that reach it); 5000 to 1e+06, logarithmic
                SGD                        | 216,000 | 286,000 ± 76,000
                natural, eq. 4             | 19,300  | 15,400 ± 5600
                SGD, first data            |         | 308,000 ± 58,000
                natural, eq. 4, first data |         | 30,900 ± 10,800
        """,
        "varady_order": """
            MNIST, 4 epochs: best bound, nats
                RWS with Adam | place 0 | -108.78
                natural RWS   | place 1 | -104.41

            Clothes, 2 epochs: best bound, nats
                wake-sleep         |         | -178.8
                RWS                | place 0 | -152.5
                RWS with Adam      | place 0 | -136.9
                natural wake-sleep |         | -134.9
                natural RWS        | place 1 | -131.7

            Clothes: CPU seconds to -136.9, where RWS with Adam ends
                RWS with Adam      | place 1 | 59
                natural wake-sleep |         | 39
                natural RWS        | place 0 | 29

            Faces of FER2013, 10 epochs: best bound, nats
                wake-sleep         |         | -269.4
                RWS                | place 0 | -222.1
                RWS with Adam      | place 0 | -208.8
                natural wake-sleep |         | -197.7
                natural RWS        | place 1 | -197.4

            Faces of FER2013: CPU seconds to -208.8, where RWS with Adam ends
                RWS with Adam      | place 1 | 23
                natural wake-sleep |         | 8.9
                natural RWS        | place 0 | 7.0
        """,
        "koster_order": """
            Oriented: coherence, %
                principal components  | place 0 | 46
                features, first layer | place 1 | 84

            Localised: pixels with three quarters of the energy, %
                principal components  | place 1 | 31
                features, first layer | place 0 | 13

            Alike: cosine of twice the angle between pooled features
                by chance                      | place 0 | 0
                pooled by a unit, second layer | place 1 | .75
        """,
        "arbel_order": """
            Normals, d = 5: relative error of the natural gradient
                from 128 samples  | place 2 | .123
                from 512 samples  | place 1 | .049
                from 2048 samples | place 0 | .026

            CIFAR-10, condition 1000: training loss at the end
                SGD with momentum      | place 1 | 1.11
                K-FAC                  |         | .90
                kernelised Wasserstein | place 0 | 1.75
        """,
    }.items()
}

TITLES = {  # data set and contestants, by the name of the file
    "pascanu_table1": "Pascanu & Bengio 2013, table 1: metrics on MNIST and on faces, TFD (paper) and FER2013 (ours)",
    "karakida_table1": "Karakida, Okada & Amari 2016, table 1: two-layer model on ISA data, ours times .943",
    "varady_order": "Várady, Volpi, Malagò & Ay 2022: the abstract's order and our medians of 3 and 5 seeds",
    "koster_order": "Köster & Hyvärinen 2010: 16 x 16 patches of photographs, the abstract's words and our measures",
    "arbel_order": "Arbel, Gretton, Li & Montúfar 2020: kernelised Wasserstein, the abstract's order and our numbers",
}


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
            draw_order(left, {row.name: row.place for row in panel.rows})
        else:
            draw_side(left, panel, [(row.paper, row.paper_error) for row in panel.rows], 1)
        draw_side(right, panel, [(row.ours, row.our_error) for row in panel.rows], 0)
        left.set_title(panel.title, loc="left", fontsize=10)
        right.set_yticklabels([])
    grid[-1][0].set_xlabel("the abstract's order (it has no numbers)" if panels[-1].in_words else "the paper")
    grid[-1][1].set_xlabel("ours")
    put_title(figure, TITLES[name])


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
    name_rows(axes, [row.name for row in panel.rows])
    axes.margins(x=0.25)
    if panel.logarithmic:
        axes.set_xscale("log")
    if panel.limits is not None:
        axes.set_xlim(*panel.limits)
    axes.grid(axis="x")


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
