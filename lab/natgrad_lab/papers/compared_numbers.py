"""The numbers of the papers beside ours, as they stand on the papers' pages: what `side_by_side` draws.

Where only the words of a paper were at hand, a row has a place in their order in place of a number.
"""

from __future__ import annotations

from dataclasses import dataclass


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
            "Faces (the paper: TFD, ours: FER2013): test error, %",
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
            "Test error at the end, all runs",
            (
                ComparedRow("SGD", "-33.21", "-33.16", "2.25", "3.79"),
                ComparedRow("natural, eq. 4", "-32.14", "-32.05", "3.58", "3.53"),
                ComparedRow("SGD, first data", None, "-29.88", None, "2.64"),
                ComparedRow("natural, eq. 4, first data", None, "-27.30", None, "3.64"),
            ),
            limits=(-39.0, -22.0),
        ),
        Panel(
            "Steps to a test error of -28 (ours: of the runs that reach it)",
            (
                ComparedRow("SGD", "216,000", "286,000", None, "76,000"),
                ComparedRow("natural, eq. 4", "19,300", "15,400", None, "5600"),
                ComparedRow("SGD, first data", None, "308,000", None, "58,000"),
                ComparedRow("natural, eq. 4, first data", None, "30,900", None, "10,800"),
            ),
            limits=(5e3, 1e6),
            logarithmic=True,
        ),
    ),
    "varady_order": (
        Panel(
            "MNIST, 4 epochs: best bound, nats",
            (
                ComparedRow("RWS with Adam", None, "-108.78", place=0),
                ComparedRow("natural RWS", None, "-104.41", place=1),
            ),
        ),
        Panel(
            "Clothes, 2 epochs: best bound, nats",
            (
                ComparedRow("wake-sleep", None, "-178.8"),
                ComparedRow("RWS", None, "-152.5", place=0),
                ComparedRow("RWS with Adam", None, "-136.9", place=0),
                ComparedRow("natural wake-sleep", None, "-134.9"),
                ComparedRow("natural RWS", None, "-131.7", place=1),
            ),
        ),
        Panel(
            "Clothes: CPU seconds to -136.9, where RWS with Adam ends",
            (
                ComparedRow("RWS with Adam", None, "59", place=1),
                ComparedRow("natural wake-sleep", None, "39"),
                ComparedRow("natural RWS", None, "29", place=0),
            ),
        ),
        Panel(
            "Faces of FER2013, 10 epochs: best bound, nats",
            (
                ComparedRow("wake-sleep", None, "-269.4"),
                ComparedRow("RWS", None, "-222.1", place=0),
                ComparedRow("RWS with Adam", None, "-208.8", place=0),
                ComparedRow("natural wake-sleep", None, "-197.7"),
                ComparedRow("natural RWS", None, "-197.4", place=1),
            ),
        ),
        Panel(
            "Faces of FER2013: CPU seconds to -208.8, where RWS with Adam ends",
            (
                ComparedRow("RWS with Adam", None, "23", place=1),
                ComparedRow("natural wake-sleep", None, "8.9"),
                ComparedRow("natural RWS", None, "7.0", place=0),
            ),
        ),
    ),
    "koster_order": (
        Panel(
            "Oriented: coherence, %",
            (
                ComparedRow("principal components", None, "46", place=0),
                ComparedRow("features, first layer", None, "84", place=1),
            ),
        ),
        Panel(
            "Localised: pixels with three quarters of the energy, %",
            (
                ComparedRow("principal components", None, "31", place=1),
                ComparedRow("features, first layer", None, "13", place=0),
            ),
        ),
        Panel(
            "Alike: cosine of twice the angle between pooled features",
            (
                ComparedRow("by chance", None, "0", place=0),
                ComparedRow("pooled by a unit, second layer", None, ".75", place=1),
            ),
        ),
    ),
    "arbel_order": (
        Panel(
            "Normals, d = 5: relative error of the natural gradient",
            (
                ComparedRow("from 128 samples", None, ".123", place=2),
                ComparedRow("from 512 samples", None, ".049", place=1),
                ComparedRow("from 2048 samples", None, ".026", place=0),
            ),
        ),
        Panel(
            "CIFAR-10, condition 1000: training loss at the end",
            (
                ComparedRow("SGD with momentum", None, "1.11", place=1),
                ComparedRow("K-FAC", None, ".90"),
                ComparedRow("kernelised Wasserstein", None, "1.75", place=0),
            ),
        ),
    ),
}
"""The pictures by the name of their file."""

TITLES = {
    "pascanu_table1": "Pascanu & Bengio 2013, table 1: metrics on MNIST and on faces, TFD (paper) and FER2013 (ours)",
    "karakida_table1": "Karakida, Okada & Amari 2016, table 1: two-layer model on ISA data, ours times .943",
    "varady_order": "Várady, Volpi, Malagò & Ay 2022: the abstract's order and our medians of 3 and 5 seeds",
    "koster_order": "Köster & Hyvärinen 2010: 16 x 16 patches of photographs, the abstract's words and our measures",
    "arbel_order": "Arbel, Gretton, Li & Montúfar 2020: kernelised Wasserstein, the abstract's order and our numbers",
}
"""Data set and contestants, by the name of the file."""
