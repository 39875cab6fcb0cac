"""The page of `boltzmann_digits`: ink over sweeps, likelihood over seconds, and draws."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, PALETTE, put_legend_below, put_title

PLAIN, NATURAL = "plain gradient", "natural gradient"
LIKELIHOOD = "maximum likelihood"
METHOD = (
    "Boltzmann machines on binary images. All pairs of pixels: fits by pseudo-likelihood and by ratio matching, then "
    "maximum likelihood with persistent chains that start at digits, from the first fit. Hidden bits: persistent "
    "chains from noise, a sweep per step, visible biases started at the pixels' log-odds, the best of three rates per "
    "direction on held-out images; log p by annealed importance sampling. Natural steps take the joint Fisher matrix "
    "as if both layers were independent. Ink is the number of dark pixels. Fresh draws start from noise with every "
    "pixel's own mean. Seconds are of processor time on one thread, of the steps alone."
)


def tell(findings: Findings) -> Story:
    """Sections for the parts that are finished."""
    sections = []
    if found := findings.of("visible"):
        sections.append(_visible(found[0]))
    if runs := findings.of("race"):
        sections.append(_hidden(runs))
    lead = sections[-1].verdict if sections else "Nothing is finished yet."
    return Story("Draws of Boltzmann machines", lead, METHOD, tuple(sections))


def _visible(found: Numbers) -> Section:
    fits = {name: one for name, one in found.items() if isinstance(one, dict)}
    sweeps = [str(count) for count, *_ in next(iter(fits.values()))["noise"]]
    rows = tuple(
        (f"{name}, from {start}", *(_write_ink(point[1:]) for point in one[start]))
        for name, one in fits.items()
        for start in ("digits", "noise")
    )
    note = f"Dark pixels, mean (deviation between images). Test images: {_write_ink(found['data'])}."
    table = Table("Ink by sweeps of Gibbs sampling", ("", *sweeps), rows, note)
    said = [f"{name} {one['noise'][-1][1]:.0f}" for name, one in fits.items()]
    verdict = f"Ink of draws from noise: {', '.join(said)}; of test images {found['data'][0]:.0f}."
    shown: dict[str, Any] = {"test images": found["real"]}
    shown |= {f"{name}: chains from noise": one["noise draws"] for name, one in fits.items()}
    shown["maximum likelihood: chains that were kept"] = fits[LIKELIHOOD]["kept draws"]
    return Section(
        "All pairs of pixels",
        verdict,
        (table,),
        (_draws("visible", "Draws of machines of all pairs of pixels", shown, found["side"]),),
    )


def _write_ink(pair: list[float]) -> str:
    return f"{pair[0]:.0f} ({pair[1]:.0f})"


def _hidden(runs: list[Numbers]) -> Section:
    names = list(runs[0]["runs"])
    rows = tuple(_row(name, [run["runs"][name] for run in runs]) for name in names)
    heads = ("", "rate", "steps", "log p of a test image, nats", "ink of fresh draws")
    note = f"Medians over {len(runs)} seeds, ranges in brackets. Ink of test images: {_write_ink(runs[0]['data'])}."
    shown: dict[str, Any] = {"test images": runs[0]["real"]}
    for name in names:
        one = runs[0]["runs"][name]
        shown |= {f"{name}: fresh draws": one["fresh draws"], f"{name}: chains that were kept": one["kept draws"]}
    ends = {name: median(run["runs"][name]["curve"][-1][2] for run in runs) for name in names}
    said = ", ".join(f"{name} {value:.1f}" for name, value in ends.items())
    pictures = (_curves(runs), _draws("hidden", "Draws of machines with hidden bits", shown, runs[0]["side"]))
    return Section("Hidden bits", f"log p in nats: {said}.", (Table("At the end", heads, rows, note),), pictures)


def _row(name: str, runs: list[Numbers]) -> tuple[str, ...]:
    ends = [run["curve"][-1] for run in runs]
    values = [end[2] for end in ends]
    return (
        name,
        f"{runs[0]['rate']:g}",
        f"{median(end[1] for end in ends):,.0f}",
        f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})",
        f"{median(run['ink'][0] for run in runs):.0f}",
    )


def _curves(runs: list[Numbers]) -> Picture:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for colour, dash, name in zip(PALETTE, DASHES, runs[0]["runs"], strict=False):
            for number, run in enumerate(runs):
                seconds, _, values, _ = zip(*run["runs"][name]["curve"], strict=True)
                label = name if number == 0 else None
                axes.plot(seconds, values, color=colour, linestyle=dash, marker=".", label=label)
        axes.set(xlabel="CPU seconds", ylabel="log p of a test image, nats")
        axes.grid(visible=True, axis="y")
        put_title(figure, f"Machines with hidden bits: a line per seed (of {len(runs)})")
        put_legend_below(figure, axes)

    return Picture("likelihood", "log p over seconds", fill, (5.0, 3.9))


def _draws(stem: str, title: str, shown: dict[str, Any], side: int) -> Picture:
    def fill(figure: Figure) -> None:
        grid = figure.subplots(len(shown), 1)
        for axes, (name, rows) in zip(np.atleast_1d(grid), shown.items(), strict=True):
            tiles = [np.pad(np.array(row).reshape(side, -1), 1) for row in rows]
            axes.imshow(np.concatenate(tiles, axis=1), cmap="gray_r", interpolation="nearest")
            axes.set_title(name, loc="left", fontsize=9)
            axes.set_axis_off()

    return Picture(f"draws-{stem}", title, fill, (8.0, 1.0 * len(shown)))
