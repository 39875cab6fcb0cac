"""Every tutorial runs, shows a picture and is found by the site; what runs them does what it says."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from tutorial_cells import Cell, read_cells, run_cells, write_notebook, write_page

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
MKDOCS = importlib.util.find_spec("mkdocs")
NEEDS = {"ten_minutes": "sklearn", "policy": "gymnasium"}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_a_tutorial_runs_and_shows_a_picture(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip(NEEDS.get(path.stem, "torch"))
    monkeypatch.chdir(tmp_path)
    cells = read_cells(path.read_text(encoding="utf-8"))
    title, _, summary = cells[0].source.partition("\n\n")
    assert cells[0].kind == "markdown"
    assert title.startswith("# ")
    assert len(summary) > 40
    cells = read_cells_of_the_site(path) or cells
    if not any(cell.pictures for cell in cells):
        run_cells(cells, path.name)
    assert any(cell.pictures for cell in cells)
    assert all(picture.title for cell in cells for picture in cell.pictures), "a figure has no title: it is read aloud"
    assert any("assert " in cell.source for cell in cells), "a tutorial checks its result"


def read_cells_of_the_site(path: Path) -> list[Cell]:
    """What the tutorial showed when the site was built from these sources; nothing where another seed is asked for."""
    if MKDOCS is None or {"NATGRAD_SEED", "NATGRAD_THREADS"} & os.environ.keys():
        return []
    import tutorials

    kept = tutorials.find_kept(path)
    return tutorials.read_shown(kept) if kept.exists() else []


def test_a_tutorial_draws_nothing_from_a_clock_or_a_network():
    for path in TUTORIALS:
        text = path.read_text(encoding="utf-8")
        assert "urlopen" not in text
        assert "time.time" not in text
        assert "requests" not in text


def test_cells_show_prints_the_last_value_and_figures():
    cells = read_cells("""# %% [markdown]
# # Title
#
# Words.

# %%
import matplotlib.pyplot as plt
print("said")
1 + 1

# %%
plt.plot([1, 2])
plt.title("A line")
plt.show()

# %%
class Shown:
    def _repr_html_(self):
        return "<b>bold</b>"
Shown()
""")
    assert [cell.kind for cell in cells] == ["markdown", "code", "code", "code"]
    assert cells[0].source == "# Title\n\nWords."
    run_cells(cells, "small.py")
    assert cells[1].text == "said\n2\n"
    assert [picture.title for picture in cells[2].pictures] == ["A line"]
    assert cells[3].html == "<b>bold</b>"
    page = write_page(cells, "small")
    assert page.startswith("# Title\n\nWords.")
    assert "![A line](small_1.png)" in page
    assert '<pre class="output">said\n2</pre>' in page
    notebook = json.loads(write_notebook(cells))
    assert notebook["cells"][1]["outputs"][0]["text"] == "said\n2\n"
    assert "image/png" in notebook["cells"][2]["outputs"][0]["data"]


def test_a_failing_cell_names_the_tutorial_and_the_cell():
    cells = [Cell("code", "x = 1"), Cell("code", "x / 0")]
    with pytest.raises(ZeroDivisionError) as raised:
        run_cells(cells, "broken.py")
    assert "broken.py, cell 1" in str(raised.traceback[-1].path)


@pytest.mark.skipif(MKDOCS is None, reason="the site's packages are an extra")
def test_the_gallery_lists_every_tutorial_in_an_order():
    import tutorials

    assert sorted(tutorials.sources()) == TUTORIALS
    assert [path.stem for path in tutorials.sources()][: len(tutorials.ORDER)] == list(tutorials.ORDER)
    title, summary = tutorials.describe(read_cells(TUTORIALS[0].read_text(encoding="utf-8")))
    assert title in tutorials.write_card("name", title, summary, True)
