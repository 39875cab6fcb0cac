"""What Table 1 and Fig. 1 of Karakida, Okada & Amari 2016 come out as: steps, errors, time, curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.study import Findings, Numbers
from natgrad_lab.figures import DASHES, INK, PALETTE, put_legend_below

NAMES = {  # piece -> what the table calls it, its entry of the costs
    "sgd": ("SGD, V = v²", "SGD, single"),
    "eq4": ("ANG, eq. 4, V = exp v", "eq. 4"),
    "exact": ("ANG, exact, V = exp v", "exact"),
    "exact-square": ("ANG, exact, V = v²", "exact"),
    "ours-single": ("ng.ang, one example a step", "ours, single"),
    "ours": ("ng.ang, batches", "ours"),
    "tuned-sgd-single": ("SGD tuned, one example a step", "SGD, single"),
    "tuned-sgd": ("SGD tuned, batches", "SGD"),
    "tuned-adam": ("Adam tuned, batches", "Adam"),
}
HIGHEST = -10.0  # of the drawn losses: above, all methods fall alike
PRINTED = ("sgd", "eq4", "exact", "exact-square")
PAPER = {  # test error, steps to -28, time
    "sgd": ("-33.21 ± 2.25", "216,000", "1.00"),
    "eq4": ("-32.14 ± 3.58", "19,300", "0.34"),
}


def find_first_steps(found: Numbers, level: float) -> list[int | None]:
    """For every model the first step at which its test error lay below the level; None where it never did."""
    points = list(zip(found["steps"], found["errors"], strict=True))
    models = range(len(found["errors"][0]))
    return [next((step for step, errors in points if below(errors[m], level)), None) for m in models]


def below(error: float | None, level: float) -> bool:
    """Whether an error read back from a record, null where it was not finite, lies below the level."""
    return error is not None and error < level


def final(found: Numbers) -> list[float]:
    """The errors at the end, infinite where a model diverged."""
    return [math.inf if e is None or not math.isfinite(e) else e for e in found["errors"][-1]]


def count_degraded(found: Numbers, level: float) -> int:
    """How many models had reached the level and ended above it."""
    steps = find_first_steps(found, level)
    return sum(s is not None and not e < level for s, e in zip(steps, final(found), strict=True))


def pool_seeds(told: Findings, piece: str) -> tuple[list[int | None], list[float]]:
    """Steps to the level and final errors of all models from all seeds."""
    steps: list[int | None] = []
    ends: list[float] = []
    for found in told.of(piece):
        steps += find_first_steps(found, told.settings.level)
        ends += final(found)
    return steps, ends


def seconds(told: Findings, piece: str) -> float | None:
    """Mean steps to the level of the models that reach it, times the seconds of a step; None without either."""
    steps = [s for s in pool_seeds(told, piece)[0] if s is not None]
    costs = told.of("cost")
    return statistics.mean(steps) * costs[0][NAMES[piece][1]] if steps and costs else None


def table1(told: Findings) -> Story:
    """The page of Table 1."""
    return Story("Score matching by adaptive natural gradient (Table 1)", _lead(told), _method(told), _sections(told))


def figure1(told: Findings) -> Story:
    """The page of Fig. 1."""
    curves = _curves(told, ("sgd", "eq4", "exact", "ours-single"))
    section = Section("Test error on the way", _plateau(told), (), curves)
    return Story("Off the plateau (Fig. 1)", _plateau(told), _method(told), (section,))


def _lead(told: Findings) -> str:
    parts = [_sentence(told, piece) for piece in ("ours", "ours-single", "eq4", "sgd") if told.of(piece)]
    return " ".join(parts) or "Nothing is finished yet."


def _sentence(told: Findings, piece: str) -> str:
    steps, _ = pool_seeds(told, piece)
    there = [s for s in steps if s is not None]
    when = f", after {statistics.mean(there):,.0f} steps on average" if there else ""
    return f"{NAMES[piece][0]}: {len(there)} of {len(steps)} runs below {told.settings.level:g}{when}."


def _plateau(told: Findings) -> str:
    return " ".join(_sentence(told, piece) for piece in ("sgd", "eq4", "exact", "ours-single") if told.of(piece))


def _method(told: Findings) -> str:
    s = told.settings
    return (
        f"{s.examples} examples of eight variables in four subspaces, x = A s, s_i = u_i N(0, I), A a random "
        f"orthogonal matrix; {s.held_out} others for the test error. {s.runs} initial conditions per set of data, W ~ "
        f"{s.spread:g} N(0, 1), V ~ U(0, {s.pooling:g}), learn side by side and see one stream "
        "of examples. The mixing, the scale of the initial conditions and how V stays positive are not given in the "
        "paper and were chosen by us. At the "
        f"paper's rate of {s.rate:g}, ANG has G = I at first and eps = 1 / (t + 100) for eq. 4, 1 / (t + 30) for the "
        "exact update: with the printed 1 / t the first update forgets the start. Runs end when all models have "
        "reached the level and as many steps again have passed. Tuned: the best of five rates, by runs that reach the "
        "level and then by steps."
    )


def _sections(told: Findings) -> tuple[Section, ...]:
    free = ("ours", "ours-single", "tuned-sgd", "tuned-adam", "tuned-sgd-single")
    tables = _table(told, free, False), _costs(told)
    title = f"At the paper's rate, {told.settings.rate:g}"
    said = " ".join((_write_terminal_text(told), _tell_units(told, "exact")))
    printed = Section(title, said, (_table(told, PRINTED, True),), _curves(told, PRINTED))
    ours = Section("With rates of their own", _against(told), tables, _curves(told, free))
    return (printed, ours)


def _write_terminal_text(told: Findings) -> str:
    steps = {p: [s for s in pool_seeds(told, p)[0] if s is not None] for p in ("sgd", "eq4")}
    if not all(steps.values()):
        return "One of the two methods of the paper has not reached the level in its steps."
    ratio = statistics.mean(steps["sgd"]) / statistics.mean(steps["eq4"])
    return (
        f"SGD takes {ratio:.1f} times the steps of ANG by eq. 4 (the paper: 11.2), counting the runs that reach the "
        "level."
    )


def _tell_units(told: Findings, piece: str) -> str:
    """How many of the runs that reach the level, and of the others, have a unit that merges subspaces."""
    found = [one for one in told.of(piece) if "units" in one]
    if not found:
        return ""
    steps = [step for one in found for step in find_first_steps(one, told.settings.level)]
    merged = [units > 0 for one in found for _, units in one["units"]]
    there = [m for m, step in zip(merged, steps, strict=True) if step is not None]
    missed = [m for m, step in zip(merged, steps, strict=True) if step is None]
    return (
        f"{NAMES[piece][0]}: {sum(there)} of the {len(there)} runs that reach the level and {sum(missed)} of the "
        f"{len(missed)} others end with a unit that pools features of two subspaces."
    )


def _against(told: Findings) -> str:
    ours = {p: seconds(told, p) for p in ("ours", "ours-single")}
    theirs = {p: seconds(told, p) for p in ("tuned-sgd", "tuned-adam", "tuned-sgd-single")}
    known = {p: t for p, t in theirs.items() if t is not None and all(s is not None for s in pool_seeds(told, p)[0])}
    if ours["ours"] is None or not known:
        return "No tuned method reached the level from every initial condition, or costs are not measured yet."
    best = min(known, key=lambda p: known[p])
    return (
        f"To the level, ng.ang on batches takes {ours['ours'] / known[best]:.2f} of the time of the best tuned method "
        f"that reaches it from everywhere, {NAMES[best][0]}: mean steps times the seconds of a step of all runs side "
        "by side."
    )


def _table(told: Findings, pieces: tuple[str, ...], paper: bool) -> Table:
    base = seconds(told, "sgd")
    rows = tuple(_row(told, piece, base, paper) for piece in pieces if told.of(piece))
    heads = ("", "test error", f"steps to {told.settings.level:g}", "reached", "above it again", "time to SGD's")
    note = (
        "Test error: mean ± standard deviation over runs at their end. Steps: mean over the runs that reach the level, "
        "± standard deviation. Above it again: runs that reached the level and did not end below it. Time: steps times "
        "seconds per step, relative to SGD at the paper's rate. Small: the paper's numbers; the rate that was best."
    )
    return Table("Table 1" if paper else "With rates of their own", heads, rows, note)


def _row(told: Findings, piece: str, base: float | None, paper: bool) -> tuple[str | tuple[str, str], ...]:
    steps, ends = pool_seeds(told, piece)
    there, finite = [s for s in steps if s is not None], [e for e in ends if math.isfinite(e)]
    taken = seconds(told, piece)
    error = f"{statistics.mean(finite):.2f} ± {statistics.pstdev(finite):.2f}" if finite else "-"
    count = f"{statistics.mean(there):,.0f} ± {statistics.pstdev(there):,.0f}" if there else "-"
    time = "-" if taken is None or not base else f"{taken / base:.3g}"
    back = sum(count_degraded(found, told.settings.level) for found in told.of(piece))
    small = PAPER.get(piece, ("", "", "")) if paper else ("", "", "")
    rates = sorted({f"rate {found['rate']:g}" for found in told.of(piece) if "rate" in found})
    return (
        (NAMES[piece][0], ", ".join(rates)),
        (error, small[0]),
        (count, small[1]),
        f"{len(there)} of {len(steps)}",
        str(back),
        (time, small[2]),
    )


def _costs(told: Findings) -> Table:
    costs = told.of("cost")
    rows = ()
    if costs:
        base = costs[0]["SGD, single"]
        named = {name: value for name, value in costs[0].items() if name != "rounds"}
        rows = tuple((name, f"{1e6 * value:,.0f}", f"{value / base:.2f}") for name, value in named.items())
    note = "Medians over rounds in which the methods take turns; all runs side by side."
    return Table("A step", ("", "microseconds", "of SGD, one example"), rows, note)


def _curves(told: Findings, pieces: tuple[str, ...]) -> tuple[Picture, ...]:
    there = tuple(piece for piece in pieces if told.of(piece))
    if not there:
        return ()
    name = "curves-" + ("printed" if "sgd" in pieces else "own")
    return (Picture(name, "Test error", _draw(told, there), (8.0, 4.6)),)


def _draw(told: Findings, pieces: tuple[str, ...]) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, piece in enumerate(pieces):
            colour = INK if piece == "sgd" else PALETTE[place % len(PALETTE)]
            _lines(axes, told.of(piece)[0], colour, DASHES[place % len(DASHES)], NAMES[piece][0])
        level = told.settings.level
        axes.axhline(level, color=INK, linewidth=0.8, linestyle=":", label=f"level {level:g} that steps are counted to")
        drawn = [np.asarray(line.get_xydata(), dtype=float) for line in axes.lines[:-1]]
        starts = [float(points[points[:, 1] < HIGHEST, 0].min(initial=np.inf)) for points in drawn]
        axes.set_xscale("log")
        axes.set_ylim(-35, HIGHEST)
        axes.set_xlim(left=min((x for x in starts if np.isfinite(x)), default=1.0))
        axes.set(xlabel="steps", ylabel="loss on test data")
        axes.set_title("Two-layer model on ISA data, score matching: every start, and the median", loc="left")
        axes.grid(visible=True, axis="y")
        put_legend_below(figure, axes)

    return fill


def _lines(axes: Axes, found: Numbers, colour: str, dash: Any, name: str) -> None:
    errors = np.array([[math.nan if e is None else e for e in point] for point in found["errors"]], dtype=float)
    steps = np.maximum(found["steps"], 1)
    axes.plot(steps, errors, color=colour, linestyle="-", linewidth=0.7, alpha=0.35)
    axes.plot(steps, np.median(errors, axis=1), color=colour, linestyle=dash, linewidth=2.2, label=name)
