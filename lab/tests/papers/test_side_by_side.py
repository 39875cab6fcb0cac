"""The papers' numbers beside ours: those of the pages, and a picture of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from natgrad_lab.papers.side_by_side import PANELS, TITLES, Panel, draw_all, number

PAGES = Path(__file__).parents[3] / "docs" / "papers"


@pytest.mark.parametrize("name", PANELS)
def test_every_number_stands_on_the_page_that_shows_the_picture(name: str):
    pages = [text for page in PAGES.glob("*.md") if f"/{name}.png" in (text := page.read_text())]
    assert len(pages) == 1
    for panel in PANELS[name]:
        assert not missing(panel, pages[0])


def missing(panel: Panel, text: str) -> list[str]:
    cells = [cell for row in panel.rows for cell in (row.paper, row.ours, row.paper_error, row.our_error)]
    return [cell for cell in cells if cell is not None and cell not in text]


def test_a_number_that_is_not_on_the_page_is_found():
    assert missing(PANELS["karakida_table1"][0], "-33.21 and -29.40") != []


def test_pictures_are_written(tmp_path: Path):
    draw_all(tmp_path)
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == {*PANELS, "malago_printed", "blog_steepest", "blog_formulas", "ang_normals"}
    assert all(any(f"/{name}.png" in page.read_text() for page in PAGES.glob("*.md")) for name in drawn)
    assert number("216,000") == 216_000


@pytest.mark.parametrize("name", PANELS)
def test_a_picture_has_a_title_and_a_side_is_numbers_or_words(name: str):
    assert TITLES[name]
    for panel in PANELS[name]:
        assert not panel.in_words or all(row.paper is None for row in panel.rows)
