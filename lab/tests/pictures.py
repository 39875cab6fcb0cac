"""What every picture keeps: named axes, a title, nothing cut off, no legend over a line, lines that differ in grey."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

FAINT = 0.5  # lines below this opacity stand behind the others and may cross a legend


def find_faults(figure: Figure) -> Iterator[str]:
    """Sentences on what is wrong with a picture, none where nothing is.

    Args:
        figure: Laid out, in the style in which it was: otherwise ticks and words have other sizes.
    """
    checks = (check_names, check_edges, check_overlaps, check_legends, check_looks)
    for check in checks:
        yield from check(figure)


def has_scale(axes: Axes, which: str) -> bool:
    """Whether one side of the axes shows numbers that need a name."""
    side = axes.xaxis if which == "x" else axes.yaxis
    if not axes.axison or not side.get_visible() or not len(axes.get_children()):
        return False
    shown = [label.get_text() for label in side.get_ticklabels() if label.get_visible()]
    return any(bool(text) and text.lstrip("-−$\\").startswith(tuple("0123456789.m")) for text in shown)


def check_names(figure: Figure) -> Iterator[str]:
    """A title somewhere, and a name for every scale, its own or that of another axes in its row or column."""
    titles = [text for axes in figure.axes for text in (axes.get_title(where) for where in ("left", "center", "right"))]
    if not any((figure.get_suptitle(), *titles)):
        yield "no title"
    if len(figure.axes) > 1 and not figure.get_suptitle():
        yield "several panels, and no title over them all"
    for axes in figure.axes:
        box = axes.get_position()
        for which in "xy":
            if not has_scale(axes, which):
                continue
            beside = [
                other
                for other in figure.axes
                if abs(other.get_position().x0 - box.x0) < 0.02 or which == "y"
                if abs(other.get_position().y0 - box.y0) < 0.02 or which == "x"
            ]
            if not any(other.get_xlabel() if which == "x" else other.get_ylabel() for other in beside):
                yield f"{which} has no name in the axes titled {axes.get_title('left') or axes.get_title()!r}"


def check_edges(figure: Figure) -> Iterator[str]:
    """No word leaves the picture."""
    frame, unseen = figure.bbox.padded(1.0), set(find_undrawn(figure))
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if not text.get_visible() or not text.get_text().strip() or text in unseen:
            continue
        box = text.get_window_extent()
        if box.x0 < frame.x0 or box.y0 < frame.y0 or box.x1 > frame.x1 or box.y1 > frame.y1:
            yield f"{text.get_text()!r} is cut off"


def find_undrawn(figure: Figure) -> Iterator[Text]:
    """The texts of ticks that lie beyond their axes' limits or belong to a side that is not seen."""
    for axes in figure.axes:
        for side, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            seen = axes.axison and side.get_visible()
            for tick in (*side.get_major_ticks(), *side.get_minor_ticks()):
                if not seen or not min(low, high) <= tick.get_loc() <= max(low, high):
                    yield from (tick.label1, tick.label2)


def check_overlaps(figure: Figure) -> Iterator[str]:
    """No title, name of an axis or legend lies on another."""
    words = [axes.title for axes in figure.axes if axes.axison]
    words += [name for axes in figure.axes if axes.axison for name in (axes.xaxis.label, axes.yaxis.label)]
    words += [axes._left_title for axes in figure.axes]  # pyright: ignore[reportAttributeAccessIssue]
    words += [text for text in figure.texts if text.get_text()] + [figure._suptitle]  # pyright: ignore
    boxes = [(text.get_text(), text.get_window_extent()) for text in words if text is not None and text.get_text()]
    boxes += [("the legend", legend.get_window_extent()) for legend in figure.legends]
    for place, (label, box) in enumerate(boxes):
        for other, beside in boxes[:place]:
            shared = Bbox.intersection(box, beside)
            if shared is not None and min(shared.width, shared.height) > 1 and label != other:
                yield f"{label!r} lies on {other!r}"


def check_legends(figure: Figure) -> Iterator[str]:
    """No legend lies on a line or on a point."""
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is None:
            continue
        box = legend.get_window_extent()
        struck = [line for line in axes.lines if is_strong(line) and crosses(line, axes, box)]
        if struck:
            yield f"the legend lies on {len(struck)} line(s) of the axes titled {axes.get_title('left')!r}"


def is_strong(line: Line2D) -> bool:
    """Whether a line is drawn to be read."""
    return to_rgba(line.get_color(), line.get_alpha())[3] >= FAINT


def crosses(line: Line2D, axes: Axes, box: Bbox) -> bool:
    """Whether a line has a point in a box, its stretches between data included."""
    points = line.get_transform().transform(np.column_stack(line.get_data(orig=False)))
    points = points[np.isfinite(points).all(1)]
    if len(points) > 1 and line.get_linestyle() not in ("None", "", " "):
        shares = np.linspace(0, 1, 20, endpoint=False)[:, None, None]
        points = ((1 - shares) * points[:-1] + shares * points[1:]).reshape(-1, 2)
    seen = axes.bbox
    return any(box.contains(x, y) and seen.contains(x, y) for x, y in points)


def check_looks(figure: Figure) -> Iterator[str]:
    """Two lines with different names differ in dash or in marker."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    for legend in legends:
        if not isinstance(legend, Legend):
            continue
        looks = [
            (repr(getattr(line, "_dash_pattern", None)), repr(line.get_marker()), line.get_linewidth() > 0)
            for line in legend.get_lines()
        ]
        if len(set(looks)) < len(looks):
            yield f"of the {len(looks)} lines of a legend some differ by colour alone"
