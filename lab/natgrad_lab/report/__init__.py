"""The report of an experiment: its story, outcome from the records alone, as a page with figures and for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.table import Table as RichTable

from natgrad_lab.experiments import Experiment, Picture, Story, Table, find
from natgrad_lab.experiments import records as files
from natgrad_lab.experiments.frame import findings
from natgrad_lab.experiments.records import Folder
from natgrad_lab.figures import DARK, PALETTE, draw, inline, put_title, save
from natgrad_lab.words import unique

__all__ = ["Outcome", "build", "draw_titled", "render_terminal"]


@dataclass(frozen=True)
class Outcome:
    """All that a report shows: where the numbers come from, and the story.

    Args:
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


def build(path: Path, experiment: Experiment | None = None) -> tuple[Outcome, Path]:
    """Write plots/*.png, plots/*.svg and report.html into a folder of records.

    Args:
        path: The folder.
        experiment: Whose records they are; None: the one that the plan names.

    Returns:
        What the page shows, and the page's path.

    Raises:
        LabError: If the folder holds no experiment, or too little of it is finished.
    """
    folder = Folder(path)
    experiment = experiment or find(folder.plan()["experiment"])
    outcome, place = read_outcome(experiment, folder), path / "plots"
    place.mkdir(exist_ok=True)
    for picture in outcome.story.files:
        save(draw(picture.draw, picture.size), place / picture.name)
    parts = [
        {"section": section, "figures": [_draw(picture, outcome.story.title, place) for picture in section.pictures]}
        for section in outcome.story.sections
    ]
    environment = Environment(
        loader=PackageLoader("natgrad_lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["replace"] = replace
    # the command that gives this report again; settings at their defaults need not be said
    defaults = asdict(experiment.settings())
    words = ["natgrad", "run", outcome.experiment, "--seeds", str(len(outcome.seeds))]
    for key, value in outcome.settings.items():
        if key not in defaults or defaults[key] != value:
            words += ["--set", f"{key}={'none' if value is None else value}"]
    # what the page lists: versions, threads, device, seeds, settings
    versions = (", ".join(f"{name} {version}" for name, version in each.items()) for each in outcome.versions)
    facts = {"versions": "; ".join(versions)}
    for name in ("threads", "devices", "seeds"):
        facts[name.replace("devices", "device")] = ", ".join(map(str, getattr(outcome, name)))
    settings = {name: "none" if v is None else str(v) for name, v in outcome.settings.items() if name not in facts}
    values = {"command": shlex.join(words), "facts": [*facts.items(), *settings.items()]}
    text = environment.get_template("page.j2").render(light=PALETTE, dark=DARK, outcome=outcome, parts=parts, **values)
    page = path / "report.html"
    files.replace(page, text)
    return outcome, page


def read_outcome(experiment: Experiment, folder: Folder) -> Outcome:
    """Read a folder's plan and finished pieces, and tell the story. LabError when nothing is finished."""
    plan, read = folder.plan(), findings(experiment, folder)
    headers = [piece.header for piece in read.finished]
    seeds = tuple(sorted({header["seed"] for header in headers}))
    planned = sum(len(seeds) if piece["repeated"] else 1 for piece in plan["pieces"])
    story = experiment.tell(read)
    names = [picture.name for section in story.sections for picture in section.pictures]
    if len(set(names)) < len(names):
        raise ValueError(f"{experiment.name} has pictures named {names}, expected different names")
    return Outcome(
        experiment=experiment.name,
        settings=plan["settings"],
        seeds=seeds,
        versions=unique(header["versions"] for header in headers),
        threads=unique(header["threads"] for header in headers),
        devices=unique(header["device"] for header in headers),
        missing=planned - len(headers),
        story=story,
    )


def draw_titled(picture: Picture, story: str) -> Figure:
    """The picture as its file shows it: with a title, since a file is seen without the page around it.

    Args:
        picture: One of a section.
        story: The page's title, which names the data and the model.
    """

    def fill_and_name(figure: Figure) -> None:
        picture.draw(figure)
        put_title(figure, f"{story}: {picture.title}")

    return draw(fill_and_name, picture.size)


def _draw(picture: Picture, story: str, place: Path) -> dict[str, Any]:
    drawn = save(draw_titled(picture, story), place / picture.name)
    return {"title": picture.title, "svg": inline(drawn, picture.name, picture.title), "wide": picture.wide}


def render_terminal(outcome: Outcome) -> Iterator[RenderableType]:
    """Tables and verdicts for a terminal: the page tells more.

    Args:
        outcome: What `build` returned.
    """
    for section in outcome.story.sections:
        for table in section.tables:
            if table.brief != ():
                yield _write_table(table, section.title)
        yield section.verdict + "\n"


def _write_table(table: Table, section: str) -> RichTable:
    title, columns = table.title or section, range(len(table.heads)) if table.brief is None else table.brief
    shown = RichTable(
        title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    for place in columns:
        shown.add_column(table.heads[place], justify="right" if place else "left", no_wrap=not place)
    for number, row in enumerate(table.cells):
        cells = (f"{row[place][0]} ({row[place][1]})" if row[place][1] else row[place][0] for place in columns)
        shown.add_row(*cells, style="bold" if number in table.bold else "")
    return shown
