"""When a structured optimizer last did what it does not do at every step, as plain numbers for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Clock = dict[str, Any]
WATCHED = 20  # steps after one that was near its bound
RAMP = 5  # steps after which the intervals between updates grow by one
TURNED = 2  # times as long they are once noise has hidden the gradient, and whitened inputs are all that is asked for
TOLERANCE = 0.1  # relative change of the running averages that one update may bring
FADES, SURE = 0.9, 10  # of the sums that tell signal from noise, per step; steps before they are believed
SOON = 10  # steps after a turn within which signal that shows again was hidden by steps too long for a valley
RISES = 3.0  # standard errors by which a loss is higher than before for more than chance
SPREAD = math.sqrt(2)  # standard deviation of rows' losses over their mean: of squared normal errors, of classes less
STERNER = 4.0  # times less signal it takes to turn again, after each return
UNKNOWN = 30.0  # times too small that the estimate of a step's KL may be, before any was compared
MARGIN = 5.0  # of the largest factor by which it was too small lately
FORGETS = 0.98  # of that factor, per comparison
SLOWEST, FASTEST = 0.5, 1.5  # factors on the interval, from one update to the next
SELDOM = 4  # times more seldom once steps are spectral
BEFORE = 2  # a measurement waits for as many steps as a run has had, over this
FORMED = 5  # steps for which the form of a step of fixed length is believed
MOST = 20  # steps between two updates, for which all rows are taken that a pass is asked for
LONG = 12  # steps between updates, of which two may be left out
GOLDEN = (math.sqrt(5) - 1) / 2
ROOM = 0.1  # share of its bound below which it is


def start_clock() -> Clock:
    """The clock of a fresh optimizer.

    Returns:
        Numbers by name:

        - `updated`, `inverted`, `measured`, `judged`: the step at which that happened last, -1 before.
        - `step`: steps so far.
        - `interval`: steps between updates that the statistics' drift asks for.
        - `failures`: steps, readings and inverses that came to nothing.
        - `refused`: steps that would have raised the loss.
        - `late`: steps in a row, up to now, whose statistics were due and not read.
        - `skipped`: steps in a row, up to now, that were skipped.
        - `seen`: examples, where the rule counts them.
        - `turned`: the step at which noise had hidden the gradient, -1 before and after a return.
        - `returns`: times that it showed again.
        - `signal`: what `follow_signal` knows.
        - `rose`: the step after which `follow_loss` turned, -1 for never.
        - `loss`: the last loss that it was told.
        - `doubt`: how many times the estimate of a step's KL may be too small.
        - `compared`: the step at which a step's KL was measured on its own batch last, or would have been.
        - `formed`: the step at which the blocks' form along a step of fixed length was last computed, -1 for never.
        - `form`: that form at a learning rate of 1.
        - `error`: the highest loss of a regression.
        - `sizes`: what `find_cut` knows.
        - `fallen`: the metric as it was measured along a step over what the blocks' running averages say, at most 1.
    """
    events = {"updated": -1, "inverted": -1, "measured": -1, "judged": -1}
    return {
        "step": 0,
        "interval": 1.0,
        **events,
        "failures": 0,
        "refused": 0,
        "late": 0,
        "skipped": 0,
        "seen": 0,
        "turned": -1,
        "returns": 0,
        "signal": [0.0, 0.0, 0.0],
        "rose": -1,
        "loss": math.inf,
        "doubt": UNKNOWN,
        "compared": 0,
        "formed": -1,
        "form": 0.0,
        "fallen": 1.0,
        "error": 0.0,
        "sizes": [0.0, 0.0],
    }


def due(clock: Clock, event: str, every: int) -> bool:
    """Whether it is time: after the interval, at most `every` steps apart.

    The interval is the drift's, and no shorter than one step in the first five, and one more after each five more. It
    is twice as long for a rule that has turned to directions of its own. Intervals that grow no more are shortened by a
    step now and then, so that they do not keep in step with tasks, experts or losses that take turns.
    """
    interval = find_interval(clock)
    if interval >= every:
        interval = every - vary(clock[event], every)
    return clock["step"] - clock[event] >= interval


def vary(step: int, every: int) -> int:
    """0 or 1, or 2 of long intervals, by the fractional part of a multiple of the golden ratio; 0 for every = 1."""
    return int(min(every, 2 if every < LONG else 3) * (step * GOLDEN % 1)) if every > 1 and step > 0 else 0


def find_interval(clock: Clock) -> int:
    """Steps between two updates that the drift and the age of a run ask for."""
    return max(int(clock["interval"]), 1 + clock["step"] // RAMP) * (1 if clock["turned"] < 0 else TURNED)


def part_of_rows(clock: Clock) -> float:
    """The part of the rows of a pass that an update needs: less where updates come sooner than they are due.

    Averages over as many more passes are as sure with as many fewer rows of each.
    """
    since = clock["step"] - clock["updated"] if clock["updated"] >= 0 else MOST
    return min(1.0, since / min(MOST, find_interval(clock)))


def due_to_measure(clock: Clock, every: int) -> bool:
    """Whether a step's length is to be measured: at the first steps, then ever more seldom, at most `every` apart.

    After a turn to directions whose length does not follow the gradient's, this only sharpens what is compared with a
    bound: at the turn, and then four times more seldom.
    """
    rare = SELDOM if clock["turned"] >= 0 and clock["measured"] >= 0 else 1
    return clock["step"] - clock["measured"] >= rare * min(every, max(1, clock["step"] // BEFORE))


def recent_form(clock: Clock, rate: float) -> float | None:
    """The blocks' form along a step of fixed length at this learning rate, as it was lately; None: compute it.

    Args:
        clock: Knows when it was computed.
        rate: The largest learning rate.
    """
    fresh = clock["formed"] >= 0 and clock["step"] - clock["formed"] < FORMED
    return clock["form"] * rate**2 if fresh else None


def keep_form(clock: Clock, form: float, rate: float) -> None:
    """Remember a form that was computed at this rate."""
    if rate > 0 and math.isfinite(form):
        clock |= {"formed": clock["step"], "form": form / rate**2}


def trust_form(clock: Clock, kl: float, bound: float) -> None:
    """Forget a form that was computed now, unless the step is far below its bound."""
    if clock["formed"] == clock["step"] and not kl < ROOM * bound:
        clock["formed"] = -1


def follow_fall(clock: Clock, measured: float, averaged: float) -> None:
    """Note how far the metric has fallen below its running averages, which forget slowly.

    Args:
        clock: Remembers it.
        measured: d^T G d along a step, from the pass of that step.
        averaged: The same from the averages, without damping.
    """
    known = math.isfinite(measured) and math.isfinite(averaged) and measured > 0 and averaged > 0
    clock["fallen"] = min(1.0, measured / averaged) if known else 1.0


def pace(clock: Clock, change: float | None, most: int) -> None:
    """The interval after an update that changed the averages by this share: one that would have brought the tolerance.

    Where the statistics stand still, an update's change is what is left of a batch's noise: less and less.
    """
    if change is not None:
        factor = min(max(TOLERANCE / max(change, 1e-9), SLOWEST), FASTEST)
        clock["interval"] = min(max(clock["interval"] * factor, 1.0), float(most))


def compare_kl(clock: Clock, found: float, expected: float, fixed: bool) -> None:
    """Learn from a step that was measured on its own batch how far estimates may be off.

    Args:
        clock: Holds the doubt, and the form along steps of fixed length, which is set right.
        found: Nats that the step moves; NaN where that could not be measured.
        expected: The estimate of it.
        fixed: True if the step is of such a length.
    """
    clock["compared"] = clock["step"]
    if math.isfinite(found) and expected > 0:
        past = MARGIN if clock["doubt"] == UNKNOWN else clock["doubt"]
        clock["doubt"] = max(MARGIN * max(found / expected, 1.0), FORGETS * past)
        if fixed and clock["formed"] >= 0:
            clock |= {"formed": clock["step"], "form": clock["form"] * found / expected}


def is_watched(clock: Clock) -> bool:
    """Whether steps were near their bound lately, so that the next may have to be measured."""
    return clock["step"] - clock["compared"] < WATCHED


def follow_signal(clock: Clock, sums: Sequence[float], least: float) -> bool:
    """Count one step's |m|^2, |g|^2 and noise; turn where the share of signal is low, return where it is high again.

    The share is (M - Z) / (G - Z) of the running sums M of |m|^2, G of |g|^2 and Z of what |m|^2 would be if gradients
    were noise alone. Steps that are too short for a curved valley make gradients that agree, where the longer ones
    before had thrown the run from side to side: within `SOON` steps of the turn that is a return, and the next turn
    takes a quarter of the share.

    Args:
        clock: Holds the running sums; this step is added.
        sums: |m|^2, |g|^2 and Z of this step.
        least: The share of signal below which to turn, and above which to return.

    Returns:
        True at the turn and at the return.
    """
    clock["signal"] = [FADES * before + (1 - FADES) * now for before, now in zip(clock["signal"], sums, strict=True)]
    mean, single, noise = clock["signal"]
    if clock["turned"] >= 0:
        late = clock["step"] - clock["turned"] > SOON  # where a loss comes near zero gradients agree too
        if late or clock["rose"] >= 0 or not mean - noise > least * (single - noise):
            return False
        clock |= {"turned": -1, "returns": clock["returns"] + 1}
        return True
    least /= STERNER ** clock["returns"]
    if clock["step"] + 1 < SURE or not mean - noise < least * (single - noise):
        return False
    clock["turned"] = clock["step"]
    return True


def follow_loss(clock: Clock, loss: Tensor, count_rows: Callable[[], float]) -> None:
    """Look at the loss of the first steps; turn where one raised it by more than chance.

    A natural step is as long as a model of the loss allows that knows one batch. Through many wide layers, each of
    which moves a tenth, that model fails, and the next steps fail again. The loss of the next batch tells: a mean over
    rows whose losses spread as far as squares of normal errors has an error of (2 / rows)^(1/2) times itself. After
    the first steps the share of signal decides.

    Args:
        clock: Remembers the last loss.
        loss: Of this step's batch, before the step, a scalar tensor; a loss that is at least 0.
        count_rows: Counts examples times positions in it.
    """
    if clock["turned"] >= 0 or clock["returns"] or clock["step"] >= SURE:
        return
    before, now = clock["loss"], float(loss)
    clock["loss"] = now if math.isfinite(now) else math.inf
    if not before < now < math.inf:
        return
    error = SPREAD * math.hypot(before, now) / math.sqrt(max(count_rows(), 1.0))
    if now - before > RISES * error:
        clock |= {"turned": clock["step"], "rose": clock["step"], "updated": -1, "inverted": -1, "measured": -1}
