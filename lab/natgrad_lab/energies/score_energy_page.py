"""The page of `score_energy_net`: curves, densities, samples, cleaned digits."""

from __future__ import annotations

from statistics import median

import numpy as np
from matplotlib.figure import Figure

from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, INK, PALETTE, draw_images, put_legend_below, put_title

METHODS = ("K-FAC", "Adam")


def tell(findings: Findings) -> Story:
    """A section per task that is finished."""
    s = findings.settings
    told = {task: {m: found for m in METHODS if (found := findings.of(f"{task} {m}"))} for task in s.names}
    told = {task: methods for task, methods in told.items() if methods}
    method = (
        f"Energies with two hidden layers of {s.width} units ({4 * s.width} on images) and SiLU, denoising score "
        f"matching with noise {s.noise:g} ({s.image_noise:g} on pixels), batches of {s.batch}, {s.seconds:g} CPU s "
        f"each. ng.kfac has NoiseAware(move={s.move:g}, noise={s.signal:g}), spectral damping {s.whitening:g} and the "
        f"rate {s.kfac:g}, which falls with the power {s.fall:g} of the time that is left; Adam's rate of {s.adam:g} "
        "falls linearly to a twentieth. The loss is that of held-out examples with fixed noise, times "
        "noise^2 per variable: 1 for a network that says nothing. In two dimensions the exact score is known, and the "
        "distance is noise^2 times the mean square from it: what is left of the loss when it is 0 is noise. Samples: "
        "300 steps of Langevin dynamics with Metropolis' correction from a uniform start in two dimensions, 200 from "
        "noisy digits."
    )
    return Story(
        "Energy networks by denoising", _lead(told), method, tuple(_section(task, told[task]) for task in told)
    )


DATA = {"rings": "three rings", "spiral": "a spiral", "digits": "the embedded digits", "mnist": "MNIST"}
LOSS, DISTANCE = 2, 3
"""Places in a curve's points."""


def ends(found: list[Numbers], place: int | None = None) -> float:
    """What came out last, the median over seeds: by default the distance where it is known, the loss elsewhere."""
    shown = (DISTANCE if knows_distance(found) else LOSS) if place is None else place
    return median(one["curve"][-1][shown] for one in found)


def knows_distance(found: list[Numbers]) -> bool:
    """Whether the exact score of the task is known."""
    return found[0]["curve"][-1][DISTANCE] is not None


def _lead(told: dict[str, dict[str, list[Numbers]]]) -> str:
    both = {task: methods for task, methods in told.items() if len(methods) == len(METHODS)}
    lower = [task for task, methods in both.items() if ends(methods["K-FAC"]) < ends(methods["Adam"])]
    measure = "distance from the exact score, or held-out loss where that is not known,"
    return f"After the same CPU time K-FAC's {measure} is below Adam's on {len(lower)} of {len(both)} tasks."


def _section(task: str, methods: dict[str, list[Numbers]]) -> Section:
    known = knows_distance(next(iter(methods.values())))
    said = ", ".join(f"{name} {ends(found, LOSS):.4f}" for name, found in methods.items())
    if known:
        far = ", ".join(f"{name} {ends(found):.4f}" for name, found in methods.items())
        said += f". Distance from the exact score: {far}"
    rows = tuple(
        (
            name,
            f"{ends(found, LOSS):.4f}",
            f"{ends(found):.4f}" if known else "-",
            f"{median(one['steps'] for one in found):,}",
        )
        for name, found in methods.items()
    )
    heads = ("", "held-out loss", "distance from the exact score", "steps")
    table = Table("At the end, medians over seeds", heads, rows)
    looks = _densities(task, methods) if "map" in next(iter(methods.values()))[0] else _digits(task, methods)
    place = DISTANCE if known else LOSS
    curves = tuple(_curve(task, methods, axis, place) for axis in (0, 1))
    return Section(task, f"Held-out loss: {said}.", (table,), (*curves, looks))


def _curve(task: str, methods: dict[str, list[Numbers]], axis: int, place: int) -> Picture:
    title = f"Energy network on {DATA[task]}, {' and '.join(methods)}: a line per seed"

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (method, found) in enumerate(methods.items()):
            for seed, one in enumerate(found):
                across, up = ([point[i] for point in one["curve"]] for i in (axis, place))
                style = {"color": PALETTE[number], "linestyle": DASHES[number], "linewidth": 1.6}
                axes.plot(across, up, label=method if seed == 0 else None, **style)
        measure = {LOSS: "held-out loss per variable", DISTANCE: "distance from the exact score"}[place]
        axes.set(xlabel=("CPU seconds", "steps")[axis], ylabel=measure, yscale="log" if place == DISTANCE else "linear")
        axes.grid(visible=True, axis="y")
        put_title(figure, title)
        put_legend_below(figure, axes)

    return Picture(f"{task}-{('seconds', 'steps')[axis]}", ("Against seconds", "Against steps")[axis], fill, (5.0, 3.9))


def _densities(task: str, methods: dict[str, list[Numbers]]) -> Picture:
    def fill(figure: Figure) -> None:
        grid = figure.subplots(2, len(methods) + 1)
        first = next(iter(methods.values()))[0]
        grid[1, 0].set_axis_off()
        _points(grid[0, 0], first["data"], "data")
        for (upper, lower), (method, found) in zip(grid.T[1:], methods.items(), strict=True):
            height = np.array(found[0]["map"])
            highest = _at_data(height, np.array(first["data"])).max()  # where no data are, nothing holds the energy up
            density = np.exp(np.clip(height - highest, -12.0, 0.0))
            upper.imshow(density, origin="lower", extent=(-3.8, 3.8, -3.8, 3.8), cmap="magma")
            upper.set(xticks=[], yticks=[])
            upper.set_title(f"{method}: density", fontsize=10)
            _points(lower, found[0]["samples"], f"{method}: samples")
        parts = "bright: as high as anywhere on the data; the square from -3.8 to 3.8"
        figure.suptitle(f"Energy network on {DATA[task]}, first seed:\ndensity, {parts}", fontsize=9)

    return Picture(f"{task}-density", "Densities and samples, first seed", fill, (5.4, 4.0))


def _at_data(height: np.ndarray, data: np.ndarray) -> np.ndarray:
    """The map's values in the cells that hold the data."""
    column, row = np.clip(((data + 3.8) / 7.6 * (len(height) - 1)).round().astype(int), 0, len(height) - 1).T
    return height[row, column]


def _points(axes, points: list[list[float]], title: str) -> None:
    where = np.array(points)
    axes.scatter(where[:, 0], where[:, 1], s=2, color=INK, linewidths=0)
    axes.set(xticks=[], yticks=[], xlim=(-3.8, 3.8), ylim=(-3.8, 3.8), aspect="equal")
    axes.set_title(title, fontsize=10)


def _digits(task: str, methods: dict[str, list[Numbers]]) -> Picture:
    def fill(figure: Figure) -> None:
        first = next(iter(methods.values()))[0]
        rows = {"digits": first["data"], "noisy": first["noisy"]}
        for method, found in methods.items():
            rows |= {f"{method}: cleaned": found[0]["cleaned"], f"{method}: samples": found[0]["samples"]}
        grid = figure.subplots(len(rows), 1)
        for axes, (title, pixels) in zip(grid, rows.items(), strict=True):
            images = np.array(pixels)[:20]
            side = round(images.shape[1] ** 0.5)
            draw_images(axes, 1 - 2 * np.clip(images, 0, 1).reshape(-1, side, side), 20)
            axes.set_ylabel(title, rotation=0, ha="right", fontsize=9)

    return Picture(
        f"{task}-digits", "Digits, cleaned by the score, and drawn by Langevin from noisy ones", fill, (10.0, 4.2)
    )
