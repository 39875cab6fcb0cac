"""The page of `vmc_*`: the energies reached, with their errors, and the way there beside the exact line."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
from matplotlib.figure import Figure

from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Cell, Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, INK, PALETTE, put_legend_below

NAMES = {"sr": "stochastic reconfiguration", "spring": "SPRING", "adam": "Adam"}
COLOURS = dict(zip(NAMES, PALETTE[:3], strict=True))


def tell(findings: Findings) -> Story:
    """Sections for what is finished."""
    s = findings.settings
    races = {name: runs for name in NAMES if (runs := findings.of(name))}
    sections = ([_race(races)] if races else []) + [_tuning(findings)]
    system = f"Ising chain of {s.spins} spins at its critical field" if s.system == "ising" else s.system
    method = (
        f"{system}, {s.samples} samples a step from as many chains; at most {s.steps} steps and {s.seconds:g} CPU "
        "seconds of one thread each. Stochastic reconfiguration and SPRING (momentum .9) with damping .001, as they "
        f"come; Adam at the best of the rates {s.rates}, each tried from a seed of its own. The energy at the end is "
        "summed over all states for the chain, and averaged over fresh samples for molecules."
    )
    return Story(f"Ground state: {system}", _lead(races), method, tuple(sections))


def gap(run: Numbers) -> float:
    """Energy at the end above the exact one, over its size."""
    return (run["final"] - run["exact"]) / abs(run["exact"])


def _lead(races: dict[str, list[Numbers]]) -> str:
    if not races:
        return "Nothing has run yet."
    said = [f"{NAMES[name]} {median(abs(gap(run)) for run in runs):.1e}" for name, runs in races.items()]
    return f"Relative error of the energy at the end, medians over seeds: {', '.join(said)}."


def _race(races: dict[str, list[Numbers]]) -> Section:
    heads = ("", "energy", "error of the mean", "relative error", "steps", "CPU ms a step")
    rows = []
    for name, runs in races.items():
        finals, gaps = [run["final"] for run in runs], [gap(run) for run in runs]
        rows.append(
            (
                NAMES[name],
                _spread(finals, "{:.6f}"),
                f"{median(run['error'] for run in runs):.1e}",
                _spread(gaps, "{:.1e}"),
                f"{median(run['steps'] for run in runs):g}",
                f"{median(1000 * run['seconds'] / run['steps'] for run in runs):.1f}",
            )
        )
    exact = next(iter(races.values()))[0]["exact"]
    note = f"Medians over seeds; below, the lowest and the highest. Exact: {exact:.6f}."
    pictures = (
        Picture("energy", "Energy of the first seed, with two standard errors", _energies(races), (7.2, 3.8)),
        Picture("gap", "Distance from the exact energy, medians over seeds", _gaps(races), (7.2, 3.6)),
    )
    table = Table("Where they ended", heads, tuple(rows), note)
    return Section("Race", _lead(races), (table,), pictures)


def _spread(values: list[float], form: str) -> Cell:
    return form.format(median(values)), f"{form.format(min(values))} to {form.format(max(values))}"


def _energies(races: dict[str, list[Numbers]]) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        exact = next(iter(races.values()))[0]["exact"]
        lowest, tops = exact, []
        for name, runs in races.items():
            x, y, error = (np.array([one[key] for one in runs[0]["curve"]]) for key in ("seconds", "energy", "error"))
            dash = DASHES[list(NAMES).index(name)]
            axes.plot(x, y, color=COLOURS[name], linestyle=dash, linewidth=1.6, label=NAMES[name])
            axes.fill_between(x, y - 2 * error, y + 2 * error, color=COLOURS[name], alpha=0.2, linewidth=0)
            tops.append(np.median(y[len(y) // 10 :]))
            lowest = min(lowest, float((y - 2 * error)[len(y) // 4 :].min()))
        axes.axhline(exact, color=INK, linestyle=(0, (1, 3)), linewidth=1.2, label="exact")
        room = max(max(tops) - exact, abs(exact) * 2e-3)
        axes.set_ylim(min(lowest, exact) - 0.3 * room, exact + 4 * room)
        axes.set(xlabel="CPU seconds", ylabel="energy")
        axes.grid(visible=True, axis="y")
        put_legend_below(figure, axes, columns=4)

    return fill


def _gaps(races: dict[str, list[Numbers]]) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for name, runs in races.items():
            length = min(len(run["curve"]) for run in runs)
            x = np.median([[one["seconds"] for one in run["curve"][:length]] for run in runs], axis=0)
            y = [[abs(one["energy"] - run["exact"]) for one in run["curve"][:length]] for run in runs]
            dash = DASHES[list(NAMES).index(name)]
            axes.plot(x, np.median(y, axis=0), color=COLOURS[name], linestyle=dash, linewidth=1.6, label=NAMES[name])
        axes.set(xlabel="CPU seconds", ylabel="|energy - exact|, sampled", yscale="log")
        axes.grid(visible=True, axis="y")
        put_legend_below(figure, axes, columns=3)

    return fill


def _tuning(findings: Findings) -> Section:
    tried = [run for i in range(20) for run in findings.of(f"tune-{i}")]
    rows = tuple((f"{one['rate']:g}", f"{one['final']:.6f}", f"{gap(one):.1e}") for one in tried)
    return Section("Adam's rates", "One seed each.", (Table("Rates", ("rate", "energy", "relative error"), rows),))
