"""The page's tables and its picture of restricted MNIST at the paper's size, from the kept records, one for each seed.

`python -m natgrad_lab.papers.pascanu_2013.at_size_page docs` writes them into `docs/papers/pascanu_2013.md`, between
two comments, and `docs/images/pascanu_at_size.png`; nothing runs again. `at_size` writes the records.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from natgrad_lab.figures import DASHES, PALETTE, put_legend_below, put_title, save_picture
from natgrad_lab.papers.kept_tables import insert, write_rows
from natgrad_lab.papers.pascanu_2013.at_size import (
    ADAPTED_DIFFERENT,
    ADAPTED_SAME,
    CURVE,
    RATES,
    WEAK_UNLABELLED,
    name_record,
)
from natgrad_lab.papers.pascanu_2013.table1 import DIFFERENT, MSGD, RESTRICTED, SAME, UNLABELLED

RECORDS = Path(__file__).parent / "records"
PAIRS = (  # whose test errors are compared, image by image; MSGD with its best rate by validation error
    (UNLABELLED, SAME),
    (WEAK_UNLABELLED, SAME),
    (DIFFERENT, SAME),
    (UNLABELLED, ADAPTED_SAME),
    (ADAPTED_DIFFERENT, ADAPTED_SAME),
    (WEAK_UNLABELLED, MSGD),
    (DIFFERENT, MSGD),
    (SAME, MSGD),
)

Record = Mapping[str, Any]


def read_records(folder: Path = RECORDS) -> list[Record]:
    """The kept records by their seeds."""
    records = [json.loads(path.read_text()) for path in folder.glob(name_record("*"))]
    return sorted(records, key=lambda record: record["seed"])


def last(record: Record, name: str) -> dict[str, float]:
    """The numbers of a contestant at its last stage."""
    step, *numbers = record["contestants"][name]["curve"][-1]
    return {"updates": step, **dict(zip(CURVE, numbers, strict=True))}


def compare(record: Record, ours: str, theirs: str) -> tuple[float, float, int, int]:
    """Difference of two test errors, its standard error by McNemar's count, and the images that one alone has wrong."""
    a, b = (set(record["contestants"][name]["wrong"]) for name in (ours, theirs))
    many = 10_000  # test images
    return (len(a) - len(b)) / many, math.sqrt(len(a ^ b)) / many, len(a - b), len(b - a)


def write_tables(records: Sequence[Record]) -> str:
    """The section's tables in Markdown."""
    heads = (
        "",
        "seed",
        "updates",
        "rate, damping",
        "training loss",
        "test error",
        "vali&shy;dation error",
        "the paper's test error, after 2000",
        "pro&shy;ducts an update",
        "CPU seconds",
    )
    rows = [row for record in records for row in list_ends(record)]
    under = ("test error of one less the other", "seed", "updates", "points", "images that one alone has wrong")
    pairs = [row for pair in PAIRS for record in records for row in list_differences(record, *pair)]
    return f"{write_rows(heads, rows)}\n\n{write_rows(under, pairs)}"


def list_ends(record: Record) -> list[tuple[str, ...]]:
    """A row for each contestant, at its last stage."""
    rows = []
    for name, contestant in record["contestants"].items():
        end = last(record, name)
        paper = f"{100 * RESTRICTED[name][1]:.2f} %" if name in RESTRICTED else "-"
        products = "-" if contestant["products"] is None else f"{contestant['products']:.0f}"
        cells = (
            name,
            f"{record['seed']}",
            f"{end['updates']:,.0f}" + (f" (steps: {20 * end['updates']:,.0f})" if name in RATES else ""),
            write_choice(contestant["choice"]),
            f"{end['train_loss']:.2g}",
            f"{end['test_error']:.2%}".replace("%", " %"),
            f"{end['valid_error']:.2%}".replace("%", " %"),
            paper,
            products,
            f"{contestant['seconds']:,.0f}",
        )
        rows.append(cells)
    return rows


def list_differences(record: Record, ours: str, theirs: str) -> list[tuple[str, ...]]:
    """A row of the difference between two contestants; none where one was not run, or not to as many updates."""
    raced = record["contestants"]
    rates = [name for name in RATES if name in raced]
    rival = min(rates, key=lambda name: last(record, name)["valid_error"]) if theirs == MSGD and rates else theirs
    if not {ours, rival} <= set(raced) or last(record, ours)["updates"] != last(record, rival)["updates"]:
        return []
    difference, error, alone, other = compare(record, ours, rival)
    points, images = f"{100 * difference:+.2f} ± {100 * error:.2f}", f"{alone} and {other}"
    return [(f"{ours} less {rival}", f"{record['seed']}", f"{last(record, ours)['updates']:,.0f}", points, images)]


def write_choice(choice: Mapping[str, float]) -> str:
    """`.1, .01` or `5, from 2 (LM)`."""
    rate = shorten(choice["lr"])
    if "LM from" in choice:
        return f"{rate}, from {shorten(choice['LM from'])} (LM)"
    return f"{rate}, {shorten(choice['damping'])}" if "damping" in choice else rate


def shorten(number: float) -> str:
    """A number without the zero before its point."""
    return f"{number:g}".removeprefix("0")


def fill(records: Sequence[Record], figure: Figure) -> None:
    """Training loss and test error against updates, as in the paper's Fig. 4; further seeds in thin lines."""
    axes, names = figure.subplots(1, 2), list(records[0]["contestants"])
    for order, record in enumerate(records):
        for name, contestant in record["contestants"].items():
            points = [point for point in contestant["curve"] if point[0] >= 1]
            look = {"color": PALETTE[names.index(name)], "linestyle": DASHES[names.index(name)]}
            look |= {"label": name, "linewidth": 1.8} if order == 0 else {"linewidth": 0.7}
            for panel, key, factor in ((axes[0], "train_loss", 1.0), (axes[1], "test_error", 100.0)):
                values = [factor * point[1 + CURVE.index(key)] for point in points]
                panel.plot([point[0] for point in points], values, **look)
    for panel in axes:
        panel.set(xlabel="updates (MSGD: twentieths of its own)", xscale="log")
        panel.grid(visible=True, axis="y")
    axes[0].set(ylabel="training loss, nats per image", yscale="log")
    lowest = min(last(record, name)["test_error"] for record in records for name in record["contestants"])
    axes[1].set(ylabel="test error, %", ylim=(100 * lowest - 0.5, 15))
    put_legend_below(figure, axes[0], 3)
    put_title(figure, "Restricted MNIST, 10,000 labels, 784-1500-10: metrics at the paper's settings")


def main(docs: Path) -> None:
    """Write the page's tables and its picture."""
    records = read_records()
    page = docs / "papers" / "pascanu_2013.md"
    page.write_text(insert(page.read_text(), "at size", write_tables(records)))
    save_picture(partial(fill, records), (9.0, 4.6), docs / "images" / "pascanu_at_size")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
