"""Tables of a page that are written from kept records, between two comments that name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from natgrad_lab.experiments.frame import Experiment, findings
from natgrad_lab.experiments.records import Folder
from natgrad_lab.experiments.sections import Section, Story
from natgrad_lab.figures import save_picture


def insert(page: str, name: str, tables: str) -> str:
    """A page with tables between its one pair of comments of that name, such as `<!-- name: begin -->`."""
    begin, end = (f"<!-- {name}: {side} -->" for side in ("begin", "end"))
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has not one pair of {begin} and {end}: write them where the tables go")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{tables}\n{end}{rest.split(end)[1]}"


def write_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def tell_kept(experiment: Experiment, folder: Path) -> Story:
    """The story of records that are kept: nothing runs again."""
    return experiment.tell(findings(experiment, Folder(folder)))


def draw_kept(section: Section, names: Mapping[str, Path]) -> None:
    """Write the PNGs of a section's pictures; a picture's name -> its file's."""
    for picture in section.pictures:
        save_picture(picture.draw, picture.size, names[picture.name], picture.title)
