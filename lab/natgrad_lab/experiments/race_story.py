"""The page of a race: its tables, its plots, and how the numbers came about, from the finished runs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from scipy.special import stdtr

from natgrad_lab.experiments import race_summary
from natgrad_lab.experiments.base import LabError, Task
from natgrad_lab.experiments.records import FinishedPiece
from natgrad_lab.experiments.sections import Cell, Picture, Section, Story, Table
from natgrad_lab.figures import PALETTE, look, put_legend_below, put_title
from natgrad_lab.words import join_words, plural, short

CROWD = 6  # entries of a legend that stand below one another
SIZE = (4.5, 3.3)  # of a plot, inches


def tell_race(
    name: str, title: str, tasks: Sequence[Task], steps: int | None, pieces: Sequence[FinishedPiece]
) -> Story:
    """The story of a race: a section for every task that all contestants have finished from a seed."""
    runs = race_summary.read_runs(pieces)
    results = [numbers for task in tasks if (numbers := race_summary.result(task, runs)) is not None]
    if not results:
        raise LabError(f"{name} has no task on which every contestant finished: run the same command again")
    order = [contestant.name for contestant in tasks[0].contestants]
    seeds = plural(len({run.header["seed"] for run in runs if run.header["phase"] == "race"}), "seed")
    files = () if any(numbers.pairs for numbers in results) else (_overview(results, order, title, seeds),)
    sections = tuple(
        Section(
            numbers.task.title,
            numbers.verdict,
            (_paired_table(numbers), _differences(numbers)) if numbers.pairs else (_ranks(numbers),),
            tuple(plot.picture(numbers, order) for plot in plots(numbers)),
            subtitle=f"{numbers.parameters:,} parameters, {numbers.examples:,} training examples",
            folded=(_grid(numbers),),
        )
        for numbers in results
    )
    return Story(title, race_summary.lead(results), _method(results[0], steps, seeds), sections, files)


def _method(numbers: race_summary.Result, steps: int | None, seeds: str) -> str:
    choices = max(len(entry.grid) for entry in numbers.entries)
    if numbers.pairs:
        by = numbers.task.tuned_on.replace("valid_", "validation ")
        return (
            f"Every contestant was tuned over {plural(choices, 'choice')}, each trained once, to the end of its "
            f"updates, from a seed that is not used again; the choice with the lowest {by} then ran from {seeds}. A "
            "seed settles which examples are for training and validation and where the network starts, the same for "
            "all contestants."
        )
    bound = f"{steps} steps" if steps else "the same seconds"
    if not choices:
        return (
            f"Nobody was tuned: every contestant ran for {bound} from {seeds}. Evaluation does not count as training."
        )
    untuned = [entry.name for entry in numbers.entries if not entry.grid]
    but = f" but {join_words(untuned)}, not tuned at all," if untuned else ""
    return (
        f"Every contestant{but} was tuned over {plural(choices, 'choice')}, each trained once for {bound}, from a seed "
        f"that the race does not use; the choice with the lowest training loss then ran from {seeds}. Evaluation does "
        "not count as training."
    )


def _ranks(numbers: race_summary.Result) -> Table:
    """One row per contestant, best first."""
    with_error, target = any(entry.test_error is not None for entry in numbers.entries), short(numbers.target)
    heads = ("", "training loss", "test loss", *(["test error"] if with_error else []), "steps")
    heads += (f"steps to {target}", f"seconds to {target}", "chosen")
    rows = []
    for entry in numbers.entries:
        losses = [(short(loss.middle), between(loss)) for loss in (entry.train_loss, entry.test_loss)]
        middle = None if entry.test_error is None else entry.test_error.middle
        error = ["-" if middle is None else f"{100 * middle:.1f} %"] if with_error else []
        reached = count(entry.steps), count(entry.steps_to_target), short(entry.seconds_to_target.middle)
        rows.append((entry.name, *losses, *error, *reached, write_choice(entry.choice)))
    over = (
        "Medians over seeds, the lowest and the highest in small type. " if len(numbers.entries[0].records) > 1 else ""
    )
    note = (
        f"{over}Losses are in {numbers.task.unit}, at the end of training. {target} is the training loss that the "
        "second-best contestant ended with; a dash means that it was not reached. In the plots lines are medians and "
        f"bands reach from the lowest to the highest seed. {numbers.task.note}"
    )
    brief = (0, 1, 3, len(heads) - 4, len(heads) - 2)
    return Table("", heads, tuple(rows), note, words=(len(heads) - 1,), bold=(0,), brief=brief)


def _paired_table(numbers: race_summary.Result) -> Table:
    """One row per contestant in the paper's order, with its numbers beside."""
    heads = ("", "training loss", "paper", "test loss", "test error", "paper", "updates", "seconds", "chosen")
    rows = []
    for entry in numbers.entries:
        loss, error = (numbers.task.paper or {}).get(entry.name, (None, None))
        seconds = race_summary.Spread(tuple(record.end["seconds"] for record in entry.records))
        losses = write_mean(entry.train_loss), short(loss), write_mean(entry.test_loss)
        errors = write_mean(entry.test_error, 100, " %"), share(error)
        spent = count(entry.steps), short(seconds.middle)
        rows.append((entry.name, *losses, *errors, *spent, write_choice(entry.choice)))
    note = (
        f"Means over {plural(len(numbers.entries[0].records), 'seed')} at the end of training, standard errors in "
        f"small type; losses in {numbers.task.unit}. {numbers.task.note}"
    )
    return Table("", heads, tuple(rows), note, words=(8,), brief=(0, 1, 2, 4, 5, 6))


def _differences(numbers: race_summary.Result) -> Table:
    """One row per pair of contestants."""
    heads = ("first", "second", "training loss", "test loss", "test error", "paper", "lower test error")
    rows = []
    for pair in numbers.pairs:
        paper = "-" if pair.paper is None else f"{100 * pair.paper:+.2f}".replace("-", "−")
        agreed = {None: "", True: ", as in the paper", False: ", not as in the paper"}[pair.agrees]
        lower = "not told apart" if pair.lower is None else pair.lower + agreed
        losses = (write_difference(loss, lambda value: short(abs(value))) for loss in (pair.train_loss, pair.test_loss))
        error = write_difference(pair.test_error, lambda value: f"{100 * abs(value):.2f}")
        rows.append((pair.first, pair.second, *losses, error, paper, lower))
    seeds = len(numbers.entries[0].records)
    note = (
        f"First less second, seed by seed, over {plural(seeds, 'seed')}: the mean, and its standard error in small "
        "type; test errors in percentage points. Two contestants count as told apart beyond two standard errors, which "
        f"chance alone passes in about {100 * beyond(seeds):.0f} % of comparisons with as many seeds. In the plots "
        "lines are medians and bands reach from the lowest to the highest seed."
    )
    bold = tuple(place for place, row in enumerate(rows) if row[-1] != "not told apart")
    return Table("Paired differences", heads, tuple(rows), note, words=(0, 1, 6), bold=bold, brief=())


def _grid(numbers: race_summary.Result) -> Table:
    """Every choice of every contestant; the last cell tells which was chosen."""
    validated = ["validation error"] if numbers.pairs else []
    heads = ("contestant", "choice", "training loss", *validated, "steps", "")
    rows = []
    for entry in numbers.entries:
        for tried in entry.grid:
            last, chosen = race_summary.final_row(tried), tried.header["index"] == entry.records[0].header["index"]
            error = [share(last.get("valid_error"))] if validated else []
            ends = short(race_summary.final(tried)), *error, str(last["step"])
            rows.append((entry.name, write_choice(tried.header["choice"]), *ends, "chosen" if chosen else ""))
    dashes = ("-",) * (len(heads) - 3)
    rows += [(e.name, write_choice(e.choice), *dashes, "not tuned") for e in numbers.entries if not e.grid]
    bold, title = tuple(place for place, row in enumerate(rows) if row[-1]), "The grid, and what each choice gave"
    return Table(title, heads, tuple(rows), words=(1, len(heads) - 1), bold=bold, brief=())


def beyond(seeds: int) -> float:
    """P(|t| > 2) of Student's t with seeds - 1 degrees of freedom; 1 for one seed, which decides nothing."""
    return float(2 * stdtr(seeds - 1, -race_summary.DECIDED)) if seeds > 1 else 1.0


def write_mean(numbers: race_summary.Spread | None, times: float = 1, unit: str = "") -> Cell:
    """The mean over seeds, and its standard error."""
    if numbers is None or math.isnan(numbers.mean):
        return "-", ""
    words = (lambda value: f"{times * value:.2f}") if unit else short
    return words(numbers.mean) + unit, f"± {words(numbers.error)}" if math.isfinite(numbers.error) else ""


def write_difference(numbers: race_summary.Spread, words: Callable[[float], str]) -> Cell:
    """A difference with its sign, and its standard error."""
    if not math.isfinite(numbers.mean):
        return "-", ""
    sign = "−" if numbers.mean < 0 else "+"
    return sign + words(numbers.mean), f"± {words(numbers.error)}" if math.isfinite(numbers.error) else ""


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.2f} %"


def count(numbers: race_summary.Spread) -> str:
    """The median of a count."""
    return "-" if numbers.middle is None else f"{numbers.middle:.0f}"


def write_choice(choice: Mapping[str, float]) -> str:
    """A point of a grid in words."""
    words = {"batch": lambda v: f"batch {v:g}" if v else "all examples"}
    return ", ".join(words.get(name, lambda v, n=name: f"{n} {v:g}")(value) for name, value in choice.items())


def between(numbers: race_summary.Spread) -> str:
    """The range over seeds; nothing for one seed."""
    known = numbers.known_values
    return f"{short(min(known))} – {short(max(known))}" if len(known) > 1 else ""


@dataclass(frozen=True)
class Plot:
    """What is drawn against what: x and y name numbers of a row."""

    name: str
    title: str
    x: str
    y: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = True

    def picture(self, numbers: race_summary.Result, order: Sequence[str]) -> Picture:
        """Medians, and the range of the seeds as a band. order: of the contestants, for their colours."""

        def fill(figure: Figure) -> None:
            axes = figure.add_subplot()
            drawn = _lines(axes, self, numbers.entries, order)
            axes.set_title(numbers.task.title, loc="left", fontsize=9, wrap=True)
            if drawn > 1:
                axes.legend(**({"fontsize": 10} if drawn <= CROWD else {"fontsize": 7, "ncols": 2}), handlelength=2.2)

        return Picture(f"{numbers.task.name}-{self.name}", self.title, fill, SIZE)


def plots(numbers: race_summary.Result) -> list[Plot]:
    """The plots of a task, those for which its records have numbers."""
    paired, unit, seconds, precision = bool(numbers.pairs), numbers.task.unit, "seconds of training", "test_precision"
    updates, update = ("updates", "an update") if paired else ("steps", "a step")
    wanted = [
        ("precision-epochs", "Precision on the test part, by epoch", "epoch", precision, "epochs", "precision"),
        ("precision-seconds", "Precision on the test part, by second", "seconds", precision, seconds, "precision"),
    ]
    if paired:
        wanted += [
            ("loss-steps", "Training loss", "step", "train_loss", updates, unit),
            ("error-steps", "Test error", "step", "test_error", updates, "share of mistakes"),
            ("test-steps", "Test loss", "step", "test_loss", updates, unit),
        ]
    else:
        wanted += [
            ("loss-seconds", "Training loss against seconds", "seconds", "train_loss", seconds, unit),
            ("loss-steps", "Training loss against steps", "step", "train_loss", updates, unit),
            ("test-seconds", "Test loss against seconds", "seconds", "test_loss", seconds, unit),
        ]
    wanted += [
        ("kl-steps", f"KL moved by {update}, measured", "step", "kl_measured", updates, "nats per example"),
        ("damping-steps", "Damping", "step", "damping", updates, "damping"),
        ("solver-steps", "Products with the metric", "step", "solver_steps", updates, f"per {updates[:-1]}"),
    ]
    runs, plain = [run for entry in numbers.entries for run in entry.records], (precision, "solver_steps")
    return [
        Plot(*words, log_x=x == "step" and y not in plain and (y != "damping" or paired), log_y=y not in plain)
        for words in wanted
        if any(len(race_summary.curve(run, x := words[2], y := words[3])[0]) for run in runs)
    ]


def _overview(results: Sequence[race_summary.Result], order: Sequence[str], title: str, seeds: str) -> Picture:
    """The whole race in one figure: a row for each task, its training loss against seconds and against steps."""

    def fill(figure: Figure) -> None:
        panels = figure.subplots(len(results), 2, squeeze=False)
        for row, numbers in zip(panels, results, strict=True):
            columns = {plot.name: plot for plot in plots(numbers)}
            for axes, name in zip(row, ("loss-seconds", "loss-steps"), strict=True):
                _lines(axes, columns[name], numbers.entries, order)
            row[0].set_title(numbers.task.title, loc="left", fontsize=10)
        put_title(figure, f"{title}. Training loss, medians and ranges of {seeds}.")
        put_legend_below(figure, panels[0, 0], min(len(order), 4))

    return Picture("overview", "Overview", fill, (2 * SIZE[0], 2.7 * len(results) + 0.8))


def _lines(axes: Axes, plot: Plot, entries: Sequence[race_summary.Entry], order: Sequence[str]) -> int:
    """One panel without its title and legend; how many lines it has."""
    for entry in sorted(entries, key=lambda e: order.index(e.name)):
        x, low, middle, high = band([race_summary.curve(run, plot.x, plot.y) for run in entry.records], plot)
        if len(x):
            style = look(order.index(entry.name) % len(PALETTE), 2.0)
            axes.fill_between(x, low, high, color=style["color"], alpha=0.16, linewidth=0)
            axes.plot(x, middle, label=entry.name, **style)
    _scales(axes, plot)
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(visible=True, axis="y")
    axes.set_axisbelow(True)
    return len(axes.lines)


def band(
    curves: Sequence[tuple[np.ndarray, np.ndarray]], plot: Plot
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, lowest, median, highest) over curves, interpolated onto common points where all of them are known."""
    shown = [np.isfinite(y) & ((y > 0) | (not plot.log_y)) & ((x > 0) | (not plot.log_x)) for x, y in curves]
    positive = [(x[keep], y[keep]) for (x, y), keep in zip(curves, shown, strict=True) if keep.any()]
    if not positive:
        return np.empty(0), np.empty(0), np.empty(0), np.empty(0)
    first, last = max(x[0] for x, _ in positive), min(x[-1] for x, _ in positive)
    points = np.unique(np.concatenate([x for x, _ in positive]))
    points = points[(points >= first) & (points <= last)]
    values = np.stack([np.interp(points, x, np.log(y) if plot.log_y else y) for x, y in positive])
    low, middle, high = values.min(0), np.median(values, 0), values.max(0)
    back = np.exp if plot.log_y else np.asarray
    return points, back(low), back(middle), back(high)


def _scales(axes: Axes, plot: Plot) -> None:
    plain = FuncFormatter(lambda value, _: short(value))
    if plot.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    if not plot.log_y:
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    subs = (1.0, 2.0, 3.0, 5.0) if decades < 1.5 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12 if decades < 6 else 6))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
