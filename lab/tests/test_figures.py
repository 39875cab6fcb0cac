"""Pictures are read in grey and by the colour-blind, and a legend strikes nothing out."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from natgrad_lab.figures import DARK, DASHES, PALETTE, draw, put_legend_below, put_title

SEEN_BY = {  # linear RGB to what is seen (Machado, Oliveira and Fernandes 2009, severity 1)
    "everybody": np.eye(3),
    "protanopes": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopes": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopes": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab_colour(colour: str, seen: np.ndarray) -> np.ndarray:
    """CIELAB coordinates of a colour as somebody sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    ratio = TO_XYZ @ np.clip(seen @ linear, 0, 1) / np.array([0.9505, 1.0, 1.0888])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("viewer", SEEN_BY)
def test_the_first_four_colours_differ_for_every_viewer(viewer: str):
    seen = [lab_colour(colour, SEEN_BY[viewer]) for colour in PALETTE[:4]]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 15


def test_each_colour_has_a_dash_and_a_counterpart_in_the_dark():
    assert len(PALETTE) == len(DARK) == len(DASHES) == len({str(dash) for dash in DASHES})


def test_the_legend_lies_below_the_axes():
    def fill(figure):
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], label="a line")
        axes.set(xlabel="x", ylabel="y")
        put_title(figure, "A line")
        put_legend_below(figure, axes)

    figure = draw(fill, (4.0, 3.0))
    legend = figure.legends[0].get_window_extent()
    assert legend.y1 <= figure.axes[0].get_tightbbox().y0
    assert legend.y0 >= 0
