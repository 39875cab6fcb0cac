"""Reports of finished runs: a table, plots, and one HTML page, all from the JSON lines alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from natgrad.experiments import LabError, find
from natgrad.experiments.records import Folder, replace
from natgrad.report.page import Drawn, render
from natgrad.report.plots import draw, inline, plots, save
from natgrad.report.summary import Result, Summary, summarise
from natgrad.report.table import terminal

__all__ = ["Summary", "build", "summarise", "terminal"]


def build(path: Path) -> tuple[Summary, Path]:
    """Write plots/*.png, plots/*.svg and report.html into a folder of records; returns (numbers, page's path).

    LabError when the folder holds no experiment, or no task of it is far enough.
    """
    folder = Folder(path)
    summary = summarise(folder)
    order = [contestant["name"] for contestant in folder.plan()["tasks"][0]["contestants"]]
    (path / "plots").mkdir(exist_ok=True)
    drawn = {result.name: _draw(result, order, path / "plots") for result in summary.results}
    page = path / "report.html"
    replace(page, render(summary, drawn, order, _defaults(summary.experiment)))
    return summary, page


def _draw(result: Result, order: list[str], place: Path) -> list[Drawn]:
    found = []
    for plot in plots(result):
        figure, name = draw(plot, result.entries, order), f"{result.name}-{plot.name}"
        save(figure, place / name)
        found.append(Drawn(plot.title, inline(figure, name, f"{result.title}: {plot.title}")))
    return found


def _defaults(experiment: str) -> dict[str, object]:
    """Default settings of an experiment that this version still has; none of another's."""
    try:
        return asdict(find(experiment).settings())
    except LabError:
        return {}
