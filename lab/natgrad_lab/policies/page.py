"""The page of `policy_*`: returns at the marks, learning curves with bands, and every setting that was tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean, median, stdev

import numpy as np
from matplotlib.figure import Figure

from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Cell, Picture, Section, Story, Table
from natgrad_lab.figures import DASHES, INK, PALETTE, put_legend_below

NAMES = {"natgrad": "ng.TRPO", "sb3": "sb3-contrib's TRPO"}
COLOURS = dict(zip(NAMES, PALETTE[:2], strict=True))
GOALS = {
    "CartPole-v1": ((30_000, 475.0), (100_000, 500.0)),
    "Acrobot-v1": ((100_000, -85.0),),
    "Pendulum-v1": ((100_000, -180.0),),
}


def tell(findings: Findings) -> Story:
    """Sections for what is finished."""
    s = findings.settings
    races = {name: runs for name in NAMES if (runs := findings.of(f"race-{name}"))}
    sections = ([_race(s.env, races)] if races else []) + [_settings(findings)]
    method = (
        f"{s.env}, {s.envs} environments at a time, networks of two tanh layers of 64 for policy and critic. Each "
        f"contestant has three settings, tried for {s.tuning} steps from a seed of their own; the best one runs from "
        f"every seed. A look is {s.episodes} episodes without exploration, from the same beginnings for everybody, at "
        "the last update before the mark. The training return is the mean of the last 20 training episodes, "
        "exploration and all. Seconds are of collecting and learning, looks left out."
    )
    return Story(f"Policies on {s.env}", _lead(s.env, races), method, tuple(sections))


def at(run: Numbers, mark: int, key: str = "test") -> float:
    """What a run showed at a mark; NaN where it did not look then."""
    found = [one[key] for one in run["curve"] if one["mark"] == mark]
    return math.nan if not found or found[0] is None else found[0]


def _lead(env: str, races: dict[str, list[Numbers]]) -> str:
    if "natgrad" not in races:
        return "ng.TRPO has not run yet."
    said = []
    for mark, goal in GOALS[env]:
        values = [at(run, mark) for run in races["natgrad"]]
        if not any(math.isnan(v) for v in values):
            verb = "reaches" if mean(values) >= goal else "misses"
            said.append(f"{mean(values):.1f} at {mark:,} steps, which {verb} the goal of {goal:g}")
    return (
        f"ng.TRPO: {'; '.join(said)}. Means of {len(races['natgrad'])} seeds."
        if said
        else "No goal's mark was looked at."
    )


def _race(env: str, races: dict[str, list[Numbers]]) -> Section:
    last = max(one["mark"] for runs in races.values() for one in runs[0]["curve"])
    marks = [mark for mark, _ in GOALS[env] if mark < last] + [last]
    heads = ("", "setting", *(f"return at {mark:,}" for mark in marks), f"training return at {last:,}", "s per update")
    rows = []
    for name, runs in races.items():
        tests = [_spread([at(run, mark) for run in runs]) for mark in marks]
        update = [run["curve"][-1]["update"] for run in runs]
        train = _spread([at(run, last, "train") for run in runs])
        speed = (f"{median(update):.2f}", f"of {runs[0]['batch']} steps")
        rows.append((NAMES[name], runs[0]["choice"], *tests, train, speed))
    note = "Means over seeds with their standard deviation; below, the lowest and the highest seed."
    pictures = (
        Picture(
            "test",
            "Return without exploration: median and quartiles over seeds",
            _curves(env, races, "test"),
            (4.5, 3.6),
        ),
        Picture(
            "train", "Return of the training episodes: median and quartiles", _curves(env, races, "train"), (4.5, 3.6)
        ),
    )
    return Section("Learning", _verdict(races, last), (Table("Contestants", heads, tuple(rows), note),), pictures)


def _verdict(races: dict[str, list[Numbers]], mark: int) -> str:
    """Both beside each other at the last mark, in return and in time."""
    if len(races) < len(NAMES):
        return f"{', '.join(NAMES[name] for name in NAMES if name not in races)} has not run."
    said = [f"{NAMES[name]} {mean(at(run, mark) for run in runs):.1f}" for name, runs in races.items()]
    each = {
        name: median(1000 * run["curve"][-1]["update"] / run["batch"] for run in runs) for name, runs in races.items()
    }
    return (
        f"At {mark:,} steps: {', '.join(said)}. For a thousand steps we take {each['natgrad'] / each['sb3']:.2f} of "
        "the other's time, each with its best setting; a fair clock is `python -m benchmarks policy`."
    )


def _spread(values: list[float]) -> Cell:
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return ("-", "")
    deviation = f" ± {stdev(known):.1f}" if len(known) > 1 else ""
    return (f"{mean(known):.1f}{deviation}", f"{min(known):.1f} to {max(known):.1f}")


def _curves(env: str, races: dict[str, list[Numbers]], key: str) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for name, runs in races.items():
            marks = [one["mark"] for one in runs[0]["curve"]]
            y = np.array([[at(run, mark, key) for mark in marks] for run in runs])
            low, middle, high = np.nanpercentile(y, [25, 50, 75], axis=0)
            x = np.array(marks) / 1000
            dash = DASHES[list(NAMES).index(name)]
            axes.plot(x, middle, color=COLOURS[name], linestyle=dash, linewidth=1.8, label=NAMES[name])
            axes.fill_between(x, low, high, color=COLOURS[name], alpha=0.18, linewidth=0)
        marks, goals = zip(*GOALS[env], strict=True)
        at_marks = [mark / 1000 for mark in marks]
        axes.plot(at_marks, goals, marker="_", markersize=14, color=INK, linestyle="none", label="goal")
        axes.set(xlabel="steps in the environment, thousands", ylabel="return of an episode")
        axes.set_title(f"{env}: {' and '.join(NAMES[name] for name in races)}", loc="left")
        axes.grid(visible=True, axis="y")
        put_legend_below(figure, axes, columns=3)

    return fill


def _settings(findings: Findings) -> Section:
    rows = []
    for name, title in NAMES.items():
        tried = [numbers for i in range(9) for numbers in findings.of(f"tune-{name}-{i}")]
        rows += [(title, one["choice"], _number(one["test"]), _number(one["train"])) for one in tried]
    table = Table("Every setting", ("", "setting", "return", "training return"), tuple(rows))
    return Section("Settings", f"After {findings.settings.tuning} steps, one seed.", (table,))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
