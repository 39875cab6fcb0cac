"""The final table, in text: for the page, and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.table import Table

from natgrad_lab.report.paired import Mean, Pair
from natgrad_lab.report.summary import Entry, Result, Spread, Tried
from natgrad_lab.words import short

Cell = tuple[str, str]  # what it says, and in small type below: the range over seeds
Rows = tuple[list[str], list[list[Cell]]]  # column heads, rows of cells


def rows(result: Result) -> Rows:
    """One row per contestant, best first, for the page; in the paper's order with its numbers beside where paired."""
    if result.pairs:
        heads = ["", "training loss", "paper", "test loss", "test error", "paper", "updates", "seconds", "chosen"]
        return heads, [_beside(entry, result) for entry in result.entries]
    with_error = any(entry.test_error is not None for entry in result.entries)
    target = short(result.target)
    heads = ["", "training loss", "test loss", *(["test error"] if with_error else []), "steps"]
    heads += [f"steps to {target}", f"seconds to {target}", "chosen"]
    return heads, [_cells(entry, with_error) for entry in result.entries]


def _cells(entry: Entry, with_error: bool) -> list[Cell]:
    losses = [(short(loss.middle), between(loss)) for loss in (entry.train_loss, entry.test_loss)]
    words = [percent(entry.test_error)] if with_error else []
    words += [
        count(entry.steps),
        count(entry.steps_to_target),
        short(entry.seconds_to_target.middle),
        write_choice(entry.choice),
    ]
    return [(entry.name, ""), *losses, *((word, "") for word in words)]


def _beside(entry: Entry, result: Result) -> list[Cell]:
    loss, error = (result.paper or {}).get(entry.name, (None, None))
    seconds = Spread(tuple(record.end["seconds"] for record in entry.records))
    return [
        (entry.name, ""),
        write_mean(entry.train_loss),
        (short(loss), ""),
        write_mean(entry.test_loss),
        write_mean(entry.test_error, 100, " %"),
        (share(error), ""),
        (count(entry.steps), ""),
        (short(seconds.middle), ""),
        (write_choice(entry.choice), ""),
    ]


def write_mean(numbers: Spread | None, times: float = 1, unit: str = "") -> Cell:
    """The mean over seeds, and its standard error."""
    if numbers is None or len(numbers.known_values) < len(numbers.values):
        return "-", ""
    mean = Mean(tuple(numbers.known_values))
    words = (lambda value: f"{times * value:.2f}") if unit else short
    return words(mean.mean) + unit, f"± {words(mean.error)}" if math.isfinite(mean.error) else ""


def differences(result: Result) -> Rows:
    """One row per pair of contestants, for the page."""
    heads = ["first", "second", "training loss", "test loss", "test error", "paper", "lower test error"]
    return heads, [_difference(pair) for pair in result.pairs]


def _difference(pair: Pair) -> list[Cell]:
    error = pair.test_error
    paper = "-" if pair.paper is None else f"{100 * pair.paper:+.2f}".replace("-", "−")
    agreed = {None: "", True: ", as in the paper", False: ", not as in the paper"}[pair.agrees]
    lower = "not told apart" if pair.lower is None else pair.lower + agreed
    return [
        (pair.first, ""),
        (pair.second, ""),
        write_difference(pair.train_loss, lambda value: short(abs(value))),
        write_difference(pair.test_loss, lambda value: short(abs(value))),
        write_difference(error, lambda value: f"{100 * abs(value):.2f}"),
        (paper, ""),
        (lower, ""),
    ]


def write_difference(numbers: Mean, words: Callable[[float], str]) -> Cell:
    """A difference with its sign, and its standard error."""
    if not math.isfinite(numbers.mean):
        return "-", ""
    sign = "−" if numbers.mean < 0 else "+"
    return sign + words(numbers.mean), f"± {words(numbers.error)}" if math.isfinite(numbers.error) else ""


def grid(result: Result) -> Rows:
    """Every choice of every contestant, for the page; the last cell tells which was chosen."""
    validated = bool(result.pairs)
    heads = ["contestant", "choice", "training loss", *(["validation error"] if validated else []), "steps", ""]
    body = [_describe_tried(entry.name, one, validated) for entry in result.entries for one in entry.grid]
    return heads, body + [_mark_untuned(entry, len(heads)) for entry in result.entries if not entry.grid]


def _mark_untuned(entry: Entry, cells: int) -> list[Cell]:
    words = [entry.name, write_choice(entry.choice), *["-"] * (cells - 3), "not tuned"]
    return [(word, "") for word in words]


def _describe_tried(name: str, one: Tried, validated: bool) -> list[Cell]:
    words = [name, write_choice(one.choice), short(one.loss), *([share(one.valid_error)] if validated else [])]
    return [(word, "") for word in (*words, str(one.steps), "chosen" if one.chosen else "")]


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.2f} %"


def percent(numbers: Spread | None) -> str:
    """The median of a share, in percent."""
    return "-" if numbers is None or numbers.middle is None else f"{100 * numbers.middle:.1f} %"


def count(numbers: Spread) -> str:
    """The median of a count."""
    return "-" if numbers.middle is None else f"{numbers.middle:.0f}"


def write_choice(choice: dict[str, float]) -> str:
    """A point of a grid in words."""
    words = {"batch": lambda v: f"batch {v:g}" if v else "all examples"}
    return ", ".join(words.get(name, lambda v, n=name: f"{n} {v:g}")(value) for name, value in choice.items())


def terminal(result: Result) -> Table:
    """The table for a terminal of 80 columns: the page tells more.

    Args:
        result: A task's numbers.
    """
    return _write_pairs(result) if result.pairs else _write_ranks(result)


def _write_pairs(result: Result) -> Table:
    table = Table(
        title=result.title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    table.add_column("", no_wrap=True)
    for head in ("train loss", "paper", "test error", "", "paper", "updates"):
        table.add_column(head, justify="right", no_wrap=True)
    for cells in rows(result)[1]:
        name, loss, paper_loss, _, error, paper_error, updates = cells[:7]
        table.add_row(name[0], loss[0], paper_loss[0], *error, paper_error[0], updates[0])
    return table


def _write_ranks(result: Result) -> Table:
    table = Table(
        title=result.title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    with_error = any(entry.test_error is not None for entry in result.entries)
    target = short(result.target)
    heads = ["train loss", "over seeds", "test error" if with_error else "test loss", "steps", f"to {target}"]
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for number, entry in enumerate(result.entries):
        test = percent(entry.test_error) if with_error else short(entry.test_loss.middle)
        loss = entry.train_loss
        cells = [short(loss.middle), between(loss), test, count(entry.steps), when(entry)]
        table.add_row(entry.name, *cells, style="bold" if number == 0 else "")
    return table


def between(numbers: Spread) -> str:
    """The range over seeds; nothing for one seed."""
    known = numbers.known_values
    return f"{short(min(known))} – {short(max(known))}" if len(known) > 1 else ""


def when(entry: Entry) -> str:
    """Steps and seconds to the target."""
    steps, seconds = entry.steps_to_target.middle, entry.seconds_to_target.middle
    return "-" if steps is None or seconds is None else f"{steps:.0f} / {seconds:.2g} s"
