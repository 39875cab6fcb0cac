"""Figure 1 of Ang's report: two pairs of normals whose parameters and whose distributions are unlike far apart.

`python -m natgrad_lab.papers.ang_2020.normals docs/images` draws it and prints the divergences.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import natgrad as ng
from natgrad_lab.figures import DASHES, PALETTE, put_legend_below, put_title, save_picture

PAIRS = (((0.0, 1000.0), (100.0, 1000.0)), ((0.0, 0.1), (0.1, 0.1)))
"""Mean and second number of each, as the report prints them."""
READINGS = {"a standard deviation": 2, "a variance": 1}
"""What the second number may be, and its power that is the variance."""
TITLE = "Ang 2020, figure 1: two pairs of normals, whose second number is a standard deviation or a variance"


def measure_divergence(pair: tuple[tuple[float, float], ...], power: int) -> float:
    """KL of the second from the first in nats."""
    family = ng.MultivariateNormal(1)
    numbers = (torch.tensor([mean, second**power], dtype=torch.float64) for mean, second in pair)
    return family.kl(*(family.from_mean_covariance(both[:1], both[1:, None]) for both in numbers)).item()


def fill(figure: Figure) -> None:
    """A row for each reading, a column for each pair: densities, distance of the means and KL."""
    grid = figure.subplots(len(READINGS), len(PAIRS), squeeze=False)
    for row, (reading, power) in zip(grid, READINGS.items(), strict=True):
        for axes, pair in zip(row, PAIRS, strict=True):
            means, deviation = [mean for mean, _ in pair], pair[0][1] ** (power / 2)
            x = np.linspace(min(means) - 3.5 * deviation, max(means) + 3.5 * deviation, 400)
            for number, (name, mean) in enumerate(zip(("first", "second"), means, strict=True)):
                density = np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi))
                axes.plot(x, density, color=PALETTE[number], linestyle=DASHES[number], label=f"the {name} of the pair")
            names = " and ".join(f"N({mean:g}, {second:g})" for mean, second in pair)
            axes.set_title(f"{names}: {measure_divergence(pair, power):.3g} nats", loc="left", fontsize=10)
            axes.set_yticks([])
            axes.locator_params(axis="x", nbins=5)
            axes.tick_params(labelsize=9)
            axes.set_xlabel("x", fontsize=9)
        row[0].set_ylabel(f"density, with\n{reading}", fontsize=9)
    put_legend_below(figure, grid[0][0])
    put_title(figure, TITLE)


def draw_all(folder: Path) -> None:
    """Write the picture as a PNG."""
    save_picture(fill, (8.0, 4.6), folder / "ang_normals")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
    for reading, power in READINGS.items():
        said = ", ".join(f"{measure_divergence(pair, power):.4g} nats" for pair in PAIRS)
        sys.stdout.write(f"{reading}: {said}\n")
