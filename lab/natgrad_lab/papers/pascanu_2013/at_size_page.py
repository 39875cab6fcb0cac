"""The page's table, its differences and its picture of restricted MNIST at the paper's size, from the kept record.

`python -m natgrad_lab.papers.pascanu_2013.at_size_page docs` writes them into `docs/papers/pascanu_2013.md`, between
two comments, and `docs/images/pascanu_at_size.png`; nothing runs again. `at_size` writes the record.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from natgrad_lab.figures import DASHES, PALETTE, put_legend_below, put_title, save_picture
from natgrad_lab.papers.kept_tables import insert, write_rows
from natgrad_lab.papers.pascanu_2013.at_size import ADAPTED_DIFFERENT, ADAPTED_SAME, CURVE, RATES, WEAK_UNLABELLED
from natgrad_lab.papers.pascanu_2013.table1 import DIFFERENT, MSGD, RESTRICTED, SAME, UNLABELLED

RECORD = Path(__file__).parent / "records" / "at_size.json"
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


def read_record(path: Path = RECORD) -> Record:
    """The kept record."""
    return json.loads(path.read_text())


def last(record: Record, name: str) -> dict[str, float]:
    """The numbers of a contestant at its last stage."""
    step, *numbers = record["contestants"][name]["curve"][-1]
    return {"updates": step, **dict(zip(CURVE, numbers, strict=True))}


def compare(record: Record, ours: str, theirs: str) -> tuple[float, float, int, int]:
    """Difference of two test errors, its standard error by McNemar's count, and the images that one alone has wrong."""
    a, b = (set(record["contestants"][name]["wrong"]) for name in (ours, theirs))
    many = 10_000  # test images
    return (len(a) - len(b)) / many, math.sqrt(len(a ^ b)) / many, len(a - b), len(b - a)


def write_tables(record: Record) -> str:
    """The section's tables in Markdown."""
    best = min(RATES, key=lambda name: last(record, name)["valid_error"])
    heads = (
        "",
        "updates",
        "rate, damping",
        "training loss",
        "test error",
        "validation error",
        "the paper's test error, after 2000",
        "products an update",
        "CPU seconds",
    )
    rows = []
    for name, contestant in record["contestants"].items():
        end = last(record, name)
        paper = f"{100 * RESTRICTED[name][1]:.2f} %" if name in RESTRICTED else "-"
        products = "-" if contestant["products"] is None else f"{contestant['products']:.0f}"
        cells = (
            name,
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
    pairs = []
    for ours, theirs in PAIRS:
        rival = best if theirs == MSGD else theirs
        if last(record, ours)["updates"] != last(record, rival)["updates"]:
            continue
        difference, error, alone, other = compare(record, ours, rival)
        pairs.append((f"{ours} less {rival}", f"{100 * difference:+.2f} ± {100 * error:.2f}", f"{alone} and {other}"))
    under = ("test error of one less the other", "points", "images that one alone has wrong")
    return f"{write_rows(heads, rows)}\n\n{write_rows(under, pairs)}"


def write_choice(choice: Mapping[str, float]) -> str:
    """`.1, .01` or `5, from 2 (LM)`."""
    rate = shorten(choice["lr"])
    if "LM from" in choice:
        return f"{rate}, from {shorten(choice['LM from'])} (LM)"
    return f"{rate}, {shorten(choice['damping'])}" if "damping" in choice else rate


def shorten(number: float) -> str:
    """A number without the zero before its point."""
    return f"{number:g}".removeprefix("0")


def fill(record: Record, figure: Figure) -> None:
    """Training loss and test error against updates, as in the paper's Fig. 4."""
    axes = figure.subplots(1, 2)
    for place, (name, contestant) in enumerate(record["contestants"].items()):
        points = [point for point in contestant["curve"] if point[0] >= 1]
        for panel, key, factor in ((axes[0], "train_loss", 1.0), (axes[1], "test_error", 100.0)):
            values = [factor * point[1 + CURVE.index(key)] for point in points]
            look = {"color": PALETTE[place], "linestyle": DASHES[place], "linewidth": 1.8, "label": name}
            panel.plot([point[0] for point in points], values, **look)
    for panel in axes:
        panel.set(xlabel="updates (MSGD: twentieths of its own)", xscale="log")
        panel.grid(visible=True, axis="y")
    axes[0].set(ylabel="training loss, nats per image", yscale="log")
    lowest = min(last(record, name)["test_error"] for name in record["contestants"])
    axes[1].set(ylabel="test error, %", ylim=(100 * lowest - 0.5, 15))
    put_legend_below(figure, axes[0], 3)
    put_title(figure, "Restricted MNIST, 10,000 labels, 784-1500-10: metrics at the paper's settings, one seed")


def main(docs: Path) -> None:
    """Write the page's tables and its picture."""
    record = read_record()
    page = docs / "papers" / "pascanu_2013.md"
    page.write_text(insert(page.read_text(), "at size", write_tables(record)))
    save_picture(partial(fill, record), (9.0, 4.6), docs / "images" / "pascanu_at_size")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
