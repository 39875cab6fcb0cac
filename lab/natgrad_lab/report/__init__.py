"""Reports of finished runs: tables, figures, and one HTML page, all from the records alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import singledispatch
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from natgrad_lab.experiments import LabError, find
from natgrad_lab.experiments.records import Folder, replace
from natgrad_lab.figures import inline, save
from natgrad_lab.report import study
from natgrad_lab.report.page import Drawn, render
from natgrad_lab.report.plots import draw, draw_overview, plots
from natgrad_lab.report.study import Outcome
from natgrad_lab.report.summary import Result, Summary, summarise
from natgrad_lab.report.table import terminal
from natgrad_lab.words import plural

__all__ = ["Outcome", "Summary", "build", "render_terminal", "summarise"]


def build(path: Path) -> tuple[Summary | Outcome, Path]:
    """Write plots/*.png, plots/*.svg and report.html into a folder of records.

    Args:
        path: The folder.

    Returns:
        The numbers, and the page's path.

    Raises:
        LabError: If the folder holds no experiment, or too little of it is finished.
    """
    folder = Folder(path)
    kind = folder.plan().get("kind", "race")
    if kind not in BUILDERS:
        raise LabError(f"{path} holds a {kind}, expected {' or '.join(BUILDERS)}: a later natgrad made it")
    return BUILDERS[kind](folder)


@singledispatch
def render_terminal(numbers: Summary | Outcome) -> Iterable[RenderableType]:
    """What a terminal shows of a report: tables and verdicts.

    Args:
        numbers: What `build` returned.
    """
    raise TypeError(f"numbers is {type(numbers).__name__}, expected what build() returned")


def _race(folder: Folder) -> tuple[Summary, Path]:
    summary = summarise(folder)
    order = [contestant["name"] for contestant in folder.plan()["tasks"][0]["contestants"]]
    (folder.path / "plots").mkdir(exist_ok=True)
    drawn = {result.name: _draw(result, order, folder.path / "plots") for result in summary.results}
    if not any(result.pairs for result in summary.results):
        over = f"medians and ranges of {plural(len(summary.seeds), 'seed')}"
        title = f"{summary.title or summary.experiment}. Training loss, {over}."
        save(draw_overview(summary.results, order, title), folder.path / "plots" / "overview")
    page = folder.path / "report.html"
    replace(page, render(summary, drawn, order, _defaults(summary.experiment)))
    return summary, page


def _study(folder: Folder) -> tuple[Outcome, Path]:
    name = folder.plan()["experiment"]
    return study.build(find(name), folder, _defaults(name))


BUILDERS = {"race": _race, "study": _study}


@render_terminal.register
def _printed_race(numbers: Summary) -> Iterator[RenderableType]:
    for result in numbers.results:
        yield terminal(result)
        yield result.verdict + "\n"


render_terminal.register(Outcome, study.speak_outcome)


def _draw(result: Result, order: list[str], place: Path) -> list[Drawn]:
    found = []
    for plot in plots(result):
        figure, name = draw(plot, result.entries, order, result.title), f"{result.name}-{plot.name}"
        save(figure, place / name)
        found.append(Drawn(plot.title, inline(figure, name, f"{result.title}: {plot.title}")))
    return found


def _defaults(experiment: str) -> dict[str, Any]:
    """Default settings of an experiment that this version still has; none of another's."""
    try:
        return asdict(find(experiment).settings())
    except LabError:
        return {}
