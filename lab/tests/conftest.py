"""Every figure that a test of the laboratory draws is looked at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure
from pictures import find_faults

from natgrad_lab import figures


@pytest.fixture(autouse=True)
def _pictures_without_faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that draws a picture with unnamed axes, cut off words or a legend on a line."""
    faults = set[str]()
    make_canvas = figures.FigureCanvasAgg

    def watch(figure: Figure) -> object:
        lay_out = figure.draw_without_rendering

        def look() -> None:  # before it is saved, which leaves its words where the file's resolution has them
            lay_out()
            faults.update(find_faults(figure))

        monkeypatch.setattr(figure, "draw_without_rendering", look)
        return make_canvas(figure)

    monkeypatch.setattr(figures, "FigureCanvasAgg", watch)
    monkeypatch.setattr(figures, "DPI", 40)  # it has been looked at by then
    yield
    assert not faults, "\n".join(sorted(faults))
