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
    drawn: list[Figure] = []
    draw = figures.FigureCanvasAgg

    def keep(figure: Figure) -> object:
        drawn.append(figure)
        return draw(figure)

    monkeypatch.setattr(figures, "FigureCanvasAgg", keep)
    yield
    faults = [fault for figure in drawn for fault in find_faults(figure)]
    assert not faults, "\n".join(sorted(set(faults)))
