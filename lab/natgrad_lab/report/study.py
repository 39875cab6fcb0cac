"""The report of a study: its story, told from the records, as a page and for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.table import Table as RichTable

from natgrad_lab.experiments.records import Folder, replace
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.study import Findings, Study, findings
from natgrad_lab.figures import draw, inline, put_title, save
from natgrad_lab.report.page import Drawn, command, facts
from natgrad_lab.report.template import fill
from natgrad_lab.words import unique


@dataclass(frozen=True)
class Outcome:
    """All that a study's report shows: where the numbers come from, and the story.

    Attributes:
        experiment: Its name.
        settings: Those that it ran with.
        seeds: Those that are finished.
        versions: Of packages, where records differ several.
        threads: Of the processes that made the records.
        devices: Where they trained.
        missing: Pieces of the plan that are not finished.
        story: What the page says.
    """

    experiment: str
    settings: dict[str, Any]
    seeds: tuple[int, ...]
    versions: tuple[dict[str, str], ...]
    threads: tuple[int, ...]
    devices: tuple[str, ...]
    missing: int
    story: Story


def outcome(study: Study, folder: Folder) -> Outcome:
    """Read a folder's plan and finished pieces, and tell the story. LabError when nothing is finished."""
    plan, told = folder.plan(), findings(study, folder)
    headers = [one.header for one in told.found]
    seeds = tuple(sorted({header["seed"] for header in headers}))
    planned = sum(len(seeds) if piece["repeated"] else 1 for piece in plan["pieces"])
    return Outcome(
        experiment=plan["experiment"],
        settings=plan["settings"],
        seeds=seeds,
        versions=unique(header["versions"] for header in headers),
        threads=unique(header["threads"] for header in headers),
        devices=unique(header["device"] for header in headers),
        missing=planned - len(headers),
        story=_tell(study, told),
    )


def _tell(study: Study, told: Findings) -> Story:
    story = study.tell(told)
    names = [picture.name for section in story.sections for picture in section.pictures]
    if len(set(names)) < len(names):
        raise ValueError(f"{study.name} has pictures named {names}, expected different names")
    return story


def build(study: Study, folder: Folder, defaults: dict[str, Any]) -> tuple[Outcome, Path]:
    """Write plots/*.png, plots/*.svg and report.html; returns (numbers and story, page's path)."""
    told = outcome(study, folder)
    (folder.path / "plots").mkdir(exist_ok=True)
    parts = [
        {"section": section, "figures": [_draw(p, told.story.title, folder.path / "plots") for p in section.pictures]}
        for section in told.story.sections
    ]
    text = fill(
        "study.j2",
        summary=told,
        title=told.story.title,
        lead=told.story.lead,
        method=told.story.method,
        parts=parts,
        command=command(told, defaults),
        facts=facts(told),
    )
    page = folder.path / "report.html"
    replace(page, text)
    return told, page


def draw_titled(picture: Picture, story: str) -> Figure:
    """The picture as its file shows it: with a title, since a file is seen without the page around it."""

    def fill_and_name(figure: Figure) -> None:
        picture.draw(figure)
        put_title(figure, f"{story}: {picture.title}")

    return draw(fill_and_name, picture.size)


def _draw(picture: Picture, story: str, place: Path) -> Drawn:
    figure = draw_titled(picture, story)
    save(figure, place / picture.name)
    return Drawn(picture.title, inline(figure, picture.name, picture.title), picture.wide)


def speak_outcome(told: Outcome) -> Iterator[RenderableType]:
    """Tables and verdicts for a terminal: the page tells more."""
    for section in told.story.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[RenderableType]:
    for table in section.tables:
        yield _table(table)
    yield section.verdict + "\n"


def _table(table: Table) -> RichTable:
    shown = RichTable(
        title=table.title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    for place, head in enumerate(table.heads):
        shown.add_column(head, justify="right" if place else "left")
    for row in table.cells:
        shown.add_row(*(f"{text} ({small})" if small else text for text, small in row))
    return shown
