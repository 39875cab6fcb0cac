"""The page of `pascanu_2013_order`: the variance per segment (Fig. 3), its ratios, and what comes out of the claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from natgrad_lab.experiments.frame import Findings, Numbers
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.figures import PALETTE, put_legend_below, put_title
from natgrad_lab.words import plural, short

METHODS: tuple[str, ...] = ("msgd", "paper", "small")
DASHES = {"msgd": "--", "paper": (0, (2, 1.2)), "small": "-"}
COLOURS = {"msgd": PALETTE[1], "paper": PALETTE[2], "small": PALETTE[0]}


def names(settings: Any) -> dict[str, str]:
    """What the methods are called."""
    return {
        "msgd": "MSGD",
        "paper": f"natural gradient, damping {settings.damping:g}",
        "small": f"natural gradient, damping {settings.small_damping:g}",
    }


def tell(findings: Findings) -> Story:
    """What is finished of the methods, over the seeds from which all of them are."""
    s = findings.settings
    runs = [dict(zip(METHODS, numbers, strict=True)) for numbers in findings.by_seed(*METHODS)]
    sections = (_variance(runs, findings), _fairness(runs, findings)) if runs else (_waiting(findings),)
    lead = _lead(runs, names(s)) if runs else "No seed is finished for every method."
    return Story("How much each part of a stream shapes the model (Fig. 3)", lead, _method(s, len(runs)), sections)


def _method(s: Any, seeds: int) -> str:
    paper = (
        "The paper: an MLP of 500 hidden units on 32.7 million deformed NIST characters of 62 classes, batches of 512, "
        "damping 3, rates 0.2 (natural gradient) and 0.1 (MSGD)."
    )
    ours = {"mnist": "deformed MNIST digits", "omniglot": "deformed Omniglot characters"}[s.data]
    return (
        f"An online stream of {s.total:,} batches of {s.batch} {ours} of {s.side} x {s.side} pixels. Its first half is "
        f"cut into {s.segments} segments; for each, {s.runs} runs see {s.runs} other draws of that segment and the "
        f"same rest. One layer of {s.hidden} tanh units. The variance is that of the probabilities on {s.held_out:,} "
        f"held-out images over these runs, a mean over images and classes. MSGD has rate {s.rate:g}; the others' rates "
        "are matched on seeds of their own, so that all end with the same held-out loss. "
        f"The whole is repeated from {plural(seeds, 'seed')}: other stream, other initial weights. {paper}"
    )


def ratios(runs: Sequence[dict[str, Numbers]], method: str, segment: int | None = None) -> list[float]:
    """A method's variance over MSGD's, one per seed: of one segment, or of their mean."""
    return [_size(run[method], segment) / _size(run["msgd"], segment) for run in runs]


def _size(numbers: Numbers, segment: int | None) -> float:
    return fmean(numbers["variance"]) if segment is None else numbers["variance"][segment]


def fading(numbers: Numbers) -> float:
    """Variance of the first three segments over that of the last three: above 1, early examples weigh more."""
    variance = numbers["variance"]
    few = min(3, len(variance))
    return fmean(variance[:few]) / fmean(variance[-few:])


def shows(values: Sequence[float], margin: float = 0.0) -> str:
    """Whether ratios that a claim says to be above 1 are: the mean logarithm beyond two standard errors over seeds.

    margin: of the logarithm, within which nothing is said.
    """
    logs = [math.log(value) for value in values]
    if len(logs) < 2:
        return "one seed"
    if abs(fmean(logs)) <= margin + 2 * stdev(logs) / math.sqrt(len(logs)):
        return "not told apart"
    return "shows" if fmean(logs) > 0 else "the reverse shows"


def margin(matched: Numbers, tolerance: float) -> float:
    """By how much the variance's logarithm is uncertain because the rate was matched to a tolerance of the loss.

    A relative error e of the loss is one of e / s in the rate, where s = -d log loss / d log rate, and the variance
    goes with the square of the rate while steps are small.
    """
    near = sorted(matched["tried"], key=lambda one: abs(math.log(one[0] / matched["rate"])))[:2]
    (rate, loss), (other, there) = near
    return 2 * tolerance / max(abs(math.log(there / loss) / math.log(other / rate)), 1e-3)


def spread(values: Sequence[float]) -> tuple[str, str]:
    """Mean, and in small type the range over seeds."""
    among = f"{short(min(values))} – {short(max(values))}" if len(values) > 1 else ""
    return short(fmean(values)), among


def _lead(runs: Sequence[dict[str, Numbers]], called: dict[str, str]) -> str:
    told = [f"{fmean(ratios(runs, m)):.2f} times with the {called[m]}" for m in ("paper", "small")]
    return f"At equal held-out loss the outputs' variance is that of MSGD {' and '.join(told)}."


def _variance(runs: Sequence[dict[str, Numbers]], findings: Findings) -> Section:
    s, called = findings.settings, names(findings.settings)
    margins = {m: margin(findings.of(f"rate-{m}")[0], s.tolerance) for m in ("paper", "small")}
    picture = Picture("variance", "Variance of the outputs by resampled segment", _figure(runs, called), (9.0, 4.2))
    rows = tuple(
        (
            called[method],
            spread([fmean(run[method]["variance"]) for run in runs]),
            spread(ratios(runs, method)),
            spread(ratios(runs, method, 0)),
            spread([fading(run[method]) for run in runs]),
        )
        for method in METHODS
    )
    heads = ("", "mean variance", "over MSGD's", "first segment, over MSGD's", "first three / last three segments")
    note = "Means over seeds, the range in small type. The paper shows its variances in Fig. 3 alone, without numbers."
    table = Table("Variance of the outputs", heads, rows, note)
    return Section("Variance", _claims(runs, called, margins), (table,), (picture,))


def _claims(runs: Sequence[dict[str, Numbers]], called: dict[str, str], margins: dict[str, float]) -> str:
    early = {method: [fading(run[method]) for run in runs] for method in METHODS}
    first = ", ".join(f"{called[m]} {fmean(v):.2f} ({shows(v)})" for m, v in early.items())
    second = "; ".join(
        f"{called[m]}: {_change(ratios(runs, m), within)} overall, {_change(ratios(runs, m, 0), within)} for the first "
        "segment"
        for m, within in margins.items()
    )
    allowed = " and ".join(f"{100 * within:.0f} %" for within in margins.values())
    return (
        "Early examples weigh more, the paper says, for both methods. Variance of the first three segments over the "
        f"last three: {first}. The natural gradient has less variance, the paper says. Against MSGD, {second}. A claim "
        "shows where it holds by more than two standard errors over seeds, and the second by more than the matching of "
        f"the rates leaves open, {allowed} of the variance."
    )


def _change(values: Sequence[float], within: float) -> str:
    change = 100 * (fmean(values) - 1)
    return f"{abs(change):.0f} % {'less' if change < 0 else 'more'} ({shows([1 / v for v in values], within)})"


def _figure(runs: Sequence[dict[str, Numbers]], called: dict[str, str]) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for method in METHODS:
            lines = np.log10([run[method]["variance"] for run in runs])  # (seeds, segments)
            x = np.arange(1, lines.shape[1] + 1)
            colour = COLOURS[method]
            axes.fill_between(x, 10 ** lines.min(0), 10 ** lines.max(0), color=colour, alpha=0.16, linewidth=0)
            axes.plot(
                x, 10 ** lines.mean(0), color=colour, linestyle=DASHES[method], linewidth=2, marker="o", markersize=4,
                label=called[method],
            )  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("{x:.1g}")
        axes.set_xticks(x)
        axes.set_xlabel("resampled segment of the first half of the stream")
        axes.set_ylabel("variance of the outputs")
        put_title(
            figure,
            f"Networks on MNIST, {' and '.join(called[m] for m in METHODS)}: mean and range of {len(runs)} seeds",
        )
        axes.grid(visible=True, axis="y", which="both")
        put_legend_below(figure, axes, len(METHODS))

    return fill


def _fairness(runs: Sequence[dict[str, Numbers]], findings: Findings) -> Section:
    s, called = findings.settings, names(findings.settings)
    target = findings.of("level")[0]["loss"]
    theirs = {"msgd": "0.1", "paper": "0.2", "small": "-"}
    rows = tuple(
        (
            called[method],
            short(runs[0][method]["rate"]),
            theirs[method],
            spread([fmean(run[method]["loss"]) for run in runs]),
            spread([100 * fmean(run[method]["error"]) for run in runs]),
            "49.8" if method != "small" else "-",
        )
        for method in METHODS
    )
    heads = ("", "rate", "paper's rate", "held-out loss", "held-out error, %", "paper's, %")
    gaps = {m: [fmean(run[m]["loss"]) / fmean(run["msgd"]["loss"]) - 1 for run in runs] for m in ("paper", "small")}
    said = " and ".join(f"{called[m]} {100 * fmean(v):+.1f} %" for m, v in gaps.items())
    verdict = (
        f"On the tuning seeds MSGD ends at {target:.4f} nats, and the others within {100 * s.tolerance:g} % of it. On "
        f"the measured seeds the held-out loss differs from MSGD's by: {said}. With damping {s.damping:g} rate over "
        f"damping is {runs[0]['paper']['rate'] / s.damping:.3g}, beside MSGD's rate of {s.rate:g}: where the damping "
        "is far above the metric the two are the same method."
    )
    return Section("Equal held-out loss", verdict, (Table("Where the runs end", heads, rows),))


def _waiting(findings: Findings) -> Section:
    done = ", ".join(sorted({one.header["piece"] for one in findings.found}))
    return Section("Under way", f"Finished so far: {done}.")
