"""The report page of a race."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr

from natgrad_lab.report.paired import DECIDED
from natgrad_lab.report.summary import Result, Summary, lead
from natgrad_lab.report.table import differences, grid, rows
from natgrad_lab.report.template import Provenance, fill
from natgrad_lab.words import join_words, plural, short

DASHES = ("none", "9 3", "4 3", "7 2 2 2", "2 2", "1 2", "10 2 3 2", "5 2 1 2 1 2", "13 4", "4 1")


@dataclass(frozen=True)
class Drawn:
    """A plot as an <svg> element."""

    title: str
    svg: str
    wide: bool = False


def render(summary: Summary, drawn: dict[str, list[Drawn]], order: list[str], defaults: dict[str, Any]) -> str:
    """The page as text. drawn: task -> its plots. order: contestants as coloured. defaults: of the settings."""
    return fill(
        "html.j2",
        summary=summary,
        title=summary.title or write_title(summary.experiment, order),
        lead=lead(summary.results),
        method=method(summary),
        order=order,
        dashes=DASHES,
        parts=[_part(result, drawn[result.name]) for result in summary.results],
        command=command(summary, defaults),
        facts=facts(summary),
    )


def write_title(experiment: str, order: list[str]) -> str:
    """A title that lists the contestants."""
    return f"{experiment.capitalize()}: {' against '.join(order[:1])} beside {' and '.join(order[1:])}"


def method(summary: Summary) -> str:
    """How the numbers came about, in a few sentences."""
    return _paired_method(summary) if summary.results[0].pairs else _race_method(summary)


def _paired_method(summary: Summary) -> str:
    choices, seeds = len(summary.results[0].entries[0].grid), plural(len(summary.seeds), "seed")
    by = {"valid_error": "validation error", "valid_loss": "validation loss"}[summary.results[0].tuned_on]
    return (
        f"Every contestant was tuned over {plural(choices, 'choice')}, each trained once, to the end of its updates, "
        f"from a seed that is not used again; the choice with the lowest {by} then ran from {seeds}. A seed settles "
        "which examples are for training and validation and where the network starts, the same for all contestants."
    )


def _race_method(summary: Summary) -> str:
    steps = summary.settings["steps"]
    entries = summary.results[0].entries
    choices = max(len(entry.grid) for entry in entries)
    bound = f"{steps} steps" if steps else "the same seconds"
    seeds = plural(len(summary.seeds), "seed")
    if not choices:
        return (
            f"Nobody was tuned: every contestant ran for {bound} from {seeds}. Evaluation does not count as training."
        )
    untuned = [entry.name for entry in entries if not entry.grid]
    but = f" but {join_words(untuned)}, not tuned at all," if untuned else ""
    return (
        f"Every contestant{but} was tuned over {plural(choices, 'choice')}, each trained once for {bound}, from a seed "
        f"that the race does not use; the choice with the lowest training loss then ran from {seeds}. Evaluation does "
        "not count as training."
    )


def command(summary: Provenance, defaults: dict[str, Any]) -> str:
    """The command that gives this report again. defaults: settings that need not be said."""
    words = ["natgrad", "run", summary.experiment, "--seeds", str(len(summary.seeds))]
    for key, value in summary.settings.items():
        if key not in defaults or defaults[key] != value:
            words += ["--set", f"{key}={'none' if value is None else value}"]
    return shlex.join(words)


def facts(summary: Provenance) -> list[tuple[str, str]]:
    """Settings, versions, threads, device, seeds: names and values to print."""
    versions = [", ".join(f"{name} {version}" for name, version in each.items()) for each in summary.versions]
    return [
        ("versions", "; ".join(versions)),
        ("threads", ", ".join(map(str, summary.threads))),
        ("device", ", ".join(summary.devices)),
        ("seeds", ", ".join(map(str, summary.seeds))),
        *(
            (name, "none" if value is None else str(value))
            for name, value in summary.settings.items()
            if name != "device"
        ),
    ]


def _part(result: Result, plots: list[Drawn]) -> dict[str, Any]:
    heads, body = rows(result)
    return {
        "result": result,
        "heads": heads,
        "rows": body,
        "plots": plots,
        "grid": grid(result),
        "note": note(result),
        "differences": differences(result) if result.pairs else None,
        "differences_note": differences_note(result),
    }


def note(result: Result) -> str:
    """What the table's numbers are."""
    seeds = len(result.entries[0].records)
    if result.pairs:
        return (
            f"Means over {plural(seeds, 'seed')} at the end of training, standard errors in small type; losses in "
            f"{result.unit}. {result.note}"
        )
    over = "Medians over seeds, the lowest and the highest in small type. " if seeds > 1 else ""
    return (
        f"{over}Losses are in {result.unit}, at the end of training. {short(result.target)} is the training loss that "
        "the second-best contestant ended with; a dash means that it was not reached. In the plots lines are medians "
        f"and bands reach from the lowest to the highest seed. {result.note}"
    )


def differences_note(result: Result) -> str:
    """What the paired differences are."""
    seeds = len(result.entries[0].records)
    return (
        f"First less second, seed by seed, over {plural(seeds, 'seed')}: the mean, and its standard error in small "
        "type; test errors in percentage points. Two contestants count as told apart beyond two standard errors, which "
        f"chance alone passes in about {100 * beyond(seeds):.0f} % of comparisons with as many seeds. In the plots "
        "lines are medians and bands reach from the lowest to the highest seed."
    )


def beyond(seeds: int) -> float:
    """P(|t| > 2) of Student's t with seeds - 1 degrees of freedom; 1 for one seed, which decides nothing."""
    return float(2 * stdtr(seeds - 1, -DECIDED)) if seeds > 1 else 1.0
