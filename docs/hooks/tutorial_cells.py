"""Runs a tutorial: a Python file in jupytext's percent format, cell by cell, and keeps what each cell shows.

    python docs/hooks/tutorial_cells.py SOURCE OUT.json

A cell shows what it prints, the value of its last line, and the figures that it leaves open in pyplot.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import html
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot

from natgrad_lab.figures import STYLE

MARK = re.compile(r"^# %%[ \t]*(\[markdown\])?[ \t]*\n", re.M)


@dataclass
class Picture:
    """A figure as a PNG file in base64, and its titles for those who do not see it."""

    png: str
    title: str


@dataclass
class Cell:
    """A piece of a tutorial and, once it has run, what it shows."""

    kind: str  # "markdown" or "code"
    source: str
    text: str = ""  # what it printed, and the representation of its last line
    html: str = ""  # the last line's value, where it has a representation in HTML
    pictures: list[Picture] = field(default_factory=list)


def read_cells(text: str) -> list[Cell]:
    """The cells of a file in percent format; what stands before the first mark is left out.

    Args:
        text: The file: `# %% [markdown]` opens a cell of text, whose lines are comments, and `# %%` one of code.

    Returns:
        The cells in order, without empty ones.
    """
    parts = MARK.split(text)[1:]  # [markdown] or None, source, ...
    cells = []
    for mark, source in zip(parts[::2], parts[1::2], strict=True):
        body = re.sub(r"^# ?", "", source, flags=re.M) if mark else source
        if body.strip():
            cells.append(Cell("markdown" if mark else "code", body.strip("\n")))
    return cells


def run_cells(cells: list[Cell], name: str) -> None:
    """Executes the code cells in one namespace and writes into each what it shows.

    Args:
        cells: Of one tutorial, changed in place.
        name: Of the file, for tracebacks.
    """
    mpl.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    show = pyplot.show
    pyplot.show = lambda *_, **__: None  # the figures are taken from pyplot when the cell has run
    dtype = torch.get_default_dtype()
    try:
        with mpl.rc_context(STYLE), torch.random.fork_rng(devices=[]):
            for number, cell in enumerate(cells):
                if cell.kind == "code":
                    run_cell(cell, f"{name}, cell {number}", names)
                    cell.pictures = list(take_pictures())
    finally:
        torch.set_default_dtype(dtype)  # a tutorial may set both: what runs after it starts as before
        pyplot.show = show
        pyplot.close("all")


def run_cell(cell: Cell, name: str, names: dict[str, Any]) -> None:
    """Executes one cell; its text and HTML are what it prints and the value of its last line.

    Args:
        cell: A code cell, changed in place.
        name: For tracebacks.
        names: The namespace, shared by the cells of a tutorial.
    """
    tree = ast.parse(cell.source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    cell.text = printed.getvalue()
    if value is not None and not cell.source.rstrip().endswith(";"):
        as_html = getattr(value, "_repr_html_", lambda: None)()
        if as_html:
            cell.html = as_html
        else:
            cell.text += f"{value!r}\n"


def take_pictures() -> Iterator[Picture]:
    """Every open figure of pyplot, in order, closed afterwards."""
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=140, facecolor="white", bbox_inches="tight", pad_inches=0.1)
        titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
        yield Picture(base64.b64encode(buffer.getvalue()).decode(), "; ".join(t for t in titles if t))
        pyplot.close(figure)


def write_page(cells: list[Cell], name: str) -> str:
    """The tutorial as a Markdown page; its pictures are NAME_1.png, NAME_2.png, ... beside it.

    Args:
        cells: As they have run.
        name: The file's name without `.py`.
    """
    lines, count = [], 0
    for cell in cells:
        if cell.kind == "markdown":
            lines.append(cell.source)
            continue
        lines.append(f"```python\n{cell.source}\n```")
        if cell.text:
            lines.append(f'<pre class="output">{html.escape(cell.text.rstrip())}</pre>')
        if cell.html:
            lines.append(f'<div class="output-html">{cell.html}</div>')
        for picture in cell.pictures:
            count += 1
            lines.append(f"![{picture.title}]({name}_{count}.png)")
    note = (
        f'<a href="{name}.ipynb" download>As a notebook</a> · run by the tests as <code>docs/tutorials/{name}.py</code>'
    )
    lines.insert(1, f'<p class="source">{note}</p>')
    return "\n\n".join(lines) + "\n"


def write_notebook(cells: list[Cell]) -> str:
    """The tutorial as a Jupyter notebook with its outputs (nbformat 4.5).

    Args:
        cells: As they have run.
    """
    meta = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    body = [write_notebook_cell(cell, f"cell-{i}") for i, cell in enumerate(cells)]
    return json.dumps({"cells": body, "metadata": meta, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def write_notebook_cell(cell: Cell, identity: str) -> dict[str, Any]:
    """One cell in the form of nbformat 4.5.

    Args:
        cell: As it has run.
        identity: Unique in the notebook.
    """
    entry: dict[str, Any] = {"cell_type": cell.kind, "id": identity, "metadata": {}, "source": cell.source}
    if cell.kind == "code":
        shown = [{"image/png": picture.png} for picture in cell.pictures]
        shown += [{"text/html": cell.html}] if cell.html else []
        outputs: list[dict[str, Any]] = [{"output_type": "display_data", "data": s, "metadata": {}} for s in shown]
        if cell.text:
            outputs.insert(0, {"output_type": "stream", "name": "stdout", "text": cell.text})
        entry |= {"execution_count": None, "outputs": outputs}
    return entry


def main(source: str, out: str) -> None:
    """Runs one tutorial and writes its cells as JSON.

    Args:
        source: The tutorial.
        out: Where the cells go.
    """
    torch.set_num_threads(1)  # sums in one order: the page says the same on every build
    path = Path(source)
    cells = read_cells(path.read_text(encoding="utf-8"))
    run_cells(cells, path.name)
    Path(out).write_text(json.dumps([asdict(cell) for cell in cells]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
