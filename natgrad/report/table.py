"""The final table, in text: for the page, and for the terminal."""

from __future__ import annotations

from rich.table import Table

from natgrad.report.summary import Entry, Result, Spread, short

Cell = tuple[str, str]  # what it says, and in small type below: the range over seeds


def rows(result: Result) -> tuple[list[str], list[list[Cell]]]:
    """(column heads, one row of cells per contestant, best first), for the page."""
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
        chosen(entry.choice),
    ]
    return [(entry.name, ""), *losses, *((word, "") for word in words)]


def percent(numbers: Spread | None) -> str:
    """The median of a share, in percent."""
    return "-" if numbers is None or numbers.middle is None else f"{100 * numbers.middle:.1f} %"


def count(numbers: Spread) -> str:
    """The median of a count."""
    return "-" if numbers.middle is None else f"{numbers.middle:.0f}"


def chosen(choice: dict[str, float]) -> str:
    """A point of a grid in words."""
    words = {"batch": lambda v: f"batch {v:g}" if v else "all examples"}
    return ", ".join(words.get(name, lambda v, n=name: f"{n} {v:g}")(value) for name, value in choice.items())


def terminal(result: Result) -> Table:
    """The table for a terminal of 80 columns: the page tells more."""
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
    known = numbers.known
    return f"{short(min(known))} – {short(max(known))}" if len(known) > 1 else ""


def when(entry: Entry) -> str:
    """Steps and seconds to the target."""
    steps, seconds = entry.steps_to_target.middle, entry.seconds_to_target.middle
    return "-" if steps is None or seconds is None else f"{steps:.0f} / {seconds:.2g} s"
