"""When a step does what it does not do at every step: functions of frozen values, that return new ones.

`Pace` says when what was done last, `Length` what is known of the metric along steps, `Noise` whether noise has hidden
the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from natgrad.optim.state import Length, Noise, Pace

RAMP = 5  # steps after which the intervals between updates grow by one
TURNED = 2  # times as long they are once noise has hidden the gradient, and whitened inputs are all that is asked for
TOLERANCE = 0.1  # relative change of the running averages that one update may bring
SLOWEST, FASTEST = 0.5, 1.5  # factors on the interval, from one update to the next
LONG = 12  # steps between updates, of which two may be left out
GOLDEN = (math.sqrt(5) - 1) / 2
MOST = 20  # steps between two updates, for which all rows are taken that a pass is asked for
SELDOM = 4  # times more seldom a length is measured once steps are spectral
BEFORE = 2  # a measurement waits for as many steps as a run has had, over this
FORMED = 5  # steps for which the form of a step of fixed length is believed
ROOM = 0.1  # share of its bound below which it is
WATCHED = 20  # steps after one that was near its bound
UNKNOWN = Length().doubt  # times too small that the estimate of a step's KL may be, before any was compared
MARGIN = 5.0  # of the largest factor by which it was too small lately
FORGETS = 0.98  # of that factor, per comparison
FADES, SURE = 0.9, 10  # of the sums that tell signal from noise, per step; steps before they are believed
SOON = 10  # steps after a turn within which signal that shows again was hidden by steps too long for a valley
STERNER = 4.0  # times less signal it takes to turn again, after each return
RISES = 3.0  # standard errors by which a loss is higher than before for more than chance
SPREAD = math.sqrt(2)  # standard deviation of rows' losses over their mean: of squared normal errors, of classes less


# updates of the statistics


def find_interval(pace: Pace, step: int, turned: bool) -> int:
    """Steps between two updates that the drift and the age of a run ask for.

    The drift's, no shorter than one step in the first five and one more after each five more, and twice that for a rule
    that has turned to directions of its own.
    """
    return max(int(pace.interval), 1 + step // RAMP) * (TURNED if turned else 1)


def is_due(pace: Pace, last: int, step: int, turned: bool, every: int) -> bool:
    """Whether it is time for what was done last at step `last`: after the interval, at most `every` steps apart.

    Intervals that grow no more are shortened by a step now and then, so that they do not keep in step with tasks,
    experts or losses that take turns.
    """
    interval = find_interval(pace, step, turned)
    return step - last >= (every - vary_interval(last, every) if interval >= every else interval)


def vary_interval(step: int, every: int) -> int:
    """0 or 1, or 2 of long intervals, by the fractional part of a multiple of the golden ratio; 0 for every = 1."""
    return int(min(every, 2 if every < LONG else 3) * (step * GOLDEN % 1)) if every > 1 and step > 0 else 0


def part_of_rows(pace: Pace, step: int, turned: bool) -> float:
    """The part of the rows of a pass that an update needs: less where updates come sooner than they are due.

    Averages over as many more passes are as sure with as many fewer rows of each.
    """
    since = step - pace.updated if pace.updated >= 0 else MOST
    return min(1.0, since / min(MOST, find_interval(pace, step, turned)))


def follow_drift(pace: Pace, change: float | None, most: int) -> Pace:
    """The interval after an update that changed the averages by this share: one that would have brought the tolerance.

    Where the statistics stand still, an update's change is what is left of a batch's noise: less and less.
    """
    if change is None:
        return pace
    factor = min(max(TOLERANCE / max(change, 1e-9), SLOWEST), FASTEST)
    return replace(pace, interval=min(max(pace.interval * factor, 1.0), float(most)))


def start_afresh(pace: Pace) -> Pace:
    """Ask for statistics, inverses and a measurement at the next step."""
    return replace(pace, updated=-1, inverted=-1, measured=-1)


# lengths


def is_due_to_measure(pace: Pace, step: int, turned: bool, every: int) -> bool:
    """Whether a step's length is to be measured: at the first steps, then ever more seldom, at most `every` apart.

    After a turn to directions whose length does not follow the gradient's, this only sharpens what is compared with a
    bound: at the turn, and then four times more seldom.
    """
    rare = SELDOM if turned and pace.measured >= 0 else 1
    return step - pace.measured >= rare * min(every, max(1, step // BEFORE))


def recent_form(length: Length, step: int, rate: float) -> float | None:
    """The blocks' form along a step of fixed length at this learning rate, as it was lately; None: compute it."""
    fresh = length.formed >= 0 and step - length.formed < FORMED
    return length.form * rate**2 if fresh else None


def keep_form(length: Length, step: int, form: float, rate: float) -> Length:
    """Remember a form that was computed at this rate."""
    known = rate > 0 and math.isfinite(form)
    return replace(length, formed=step, form=form / rate**2) if known else length


def trust_form(length: Length, step: int, kl: float, bound: float) -> Length:
    """Forget a form that was computed now, unless the step is far below its bound."""
    return replace(length, formed=-1) if length.formed == step and not kl < ROOM * bound else length


def follow_fall(length: Length, measured: float, averaged: float) -> Length:
    """Note how far d^T G d of a pass has fallen below that of the running averages, which forget slowly."""
    known = math.isfinite(measured) and math.isfinite(averaged) and measured > 0 and averaged > 0
    return replace(length, fallen=min(1.0, measured / averaged) if known else 1.0)


def compare_kl(length: Length, step: int, found: float, expected: float, fixed: bool) -> Length:
    """Learn from a step that was measured on its own batch how far estimates may be off.

    found: nats that the step moves, NaN where that could not be measured. fixed: a step whose length does not follow
    the gradient's: its form is set right.
    """
    length = replace(length, compared=step)
    if not math.isfinite(found) or not expected > 0:
        return length
    past = MARGIN if length.doubt == UNKNOWN else length.doubt
    length = replace(length, doubt=max(MARGIN * max(found / expected, 1.0), FORGETS * past))
    if fixed and length.formed >= 0:
        length = replace(length, formed=step, form=length.form * found / expected)
    return length


def is_watched(length: Length, step: int) -> bool:
    """Whether steps were near their bound lately, so that the next may have to be measured."""
    return step - length.compared < WATCHED


# noise


def follow_signal(noise: Noise, step: int, sums: Sequence[float], least: float) -> Noise:
    """Count one step's |m|^2, |g|^2 and noise; turn where the share of signal is low, return where it is high again.

    The share is (M - Z) / (G - Z) of the running sums M of |m|^2, G of |g|^2 and Z of what |m|^2 would be if gradients
    were noise alone. Steps that are too short for a curved valley make gradients that agree, where the longer ones
    before had thrown the run from side to side: within `SOON` steps of the turn that is a return, and the next turn
    takes a quarter of the share.
    """
    mean, single, chance = (FADES * old + (1 - FADES) * now for old, now in zip(noise.signal, sums, strict=True))
    noise = replace(noise, signal=(mean, single, chance))
    if noise.turned >= 0:
        late = step - noise.turned > SOON  # where a loss comes near zero gradients agree too
        if late or noise.rose >= 0 or not mean - chance > least * (single - chance):
            return noise
        return replace(noise, turned=-1, returns=noise.returns + 1)
    least /= STERNER**noise.returns
    shows = step + 1 < SURE or not mean - chance < least * (single - chance)
    return noise if shows else replace(noise, turned=step)


def follow_loss(noise: Noise, step: int, loss: Tensor, count_rows: Callable[[], float]) -> Noise:
    """Look at the loss of the first steps, one that is at least 0; turn where a step raised it by more than chance.

    A natural step is as long as a model of the loss allows that knows one batch. Through many wide layers, each of
    which moves a tenth, that model fails, and the next steps fail again. The loss of the next batch tells: a mean over
    rows whose losses spread as far as squares of normal errors has an error of (2 / rows)^(1/2) times itself. After
    the first steps the share of signal decides.
    """
    if noise.turned >= 0 or noise.returns or step >= SURE:
        return noise
    before, now = noise.loss, float(loss)
    noise = replace(noise, loss=now if math.isfinite(now) else math.inf)
    if not before < now < math.inf:
        return noise
    error = SPREAD * math.hypot(before, now) / math.sqrt(max(count_rows(), 1.0))
    return replace(noise, turned=step, rose=step) if now - before > RISES * error else noise
