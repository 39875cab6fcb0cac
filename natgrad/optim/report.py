"""What an optimizer reports: the last step in numbers, and `explain()` in sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import combinations, pairwise
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from natgrad.ground.messages import write_table
from natgrad.optim.state import Noise
from natgrad.rules import NoiseAware, Rule, SpectralProgress, read_cut


class Row(NamedTuple):
    """One parameter in a `Report`.

    Attributes:
        parameter: Its name in the model.
        structure: The structure that it gets.
        size: Its number of entries.
        memory: The numbers remembered for it between steps.
    """

    parameter: str
    structure: str
    size: int
    memory: int


class Report(list[Row]):
    """Rows of `optimizer.report()`; prints as a table.

    Args:
        rows: One per parameter.
        note: What there is to say of the metric, after the rows.
    """

    def __init__(self, rows: Iterable[Row] = (), note: str = "") -> None:
        super().__init__(rows)
        self.note = note

    def _repr_html_(self) -> str:
        return write_table(Row._fields, [(p, s, f"{n:,}", f"{m:,}") for p, s, n, m in self]) + escape(self.note)

    def __str__(self) -> str:
        rows = [Row._fields, *((p, s, f"{n:,}", f"{m:,}") for p, s, n, m in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [f"{p:<{widths[0]}}  {s:<{widths[1]}}  {n:>{widths[2]}}  {m:>{widths[3]}}" for p, s, n, m in rows]
        return "\n".join([*lines, *[self.note] * bool(self.note)])


@dataclass(frozen=True, repr=False)
class StateReport:
    """The last step in numbers. NaN or None where a number was not needed and so not computed; those are not printed.

    Attributes:
        step: Steps taken so far.
        loss: The mean loss before the step.
        kl: Nats per example that the step moved, to second order.
        damping: The lambda that the system was solved with. Structured optimizers give it in units of a block's mean
            eigenvalue, as their first parameter group has it.
        ratio: True over predicted decrease of the loss.
        solver_steps: Steps of the solver.
        residual: Of the solve, relative to the norm of the gradient.
        status: How the solve ended.
        outside: |g - G x| / |g|, the share of the gradient that is divided by the damping alone. It is near 1 where
            the gradient lies outside the metric's range, as on other data, or where the damping is far above the
            metric.
        excess: d^T G d along the proposed step as it was last measured, over what the blocks (one per layer) predict.
            Above 1 a step is shortened by it.
        rate: Length of the step relative to the proposed one; 0 for a rejected step.
        gradient: Norm of the mean loss's gradient.
        failures: Steps since the start that were skipped for numerical trouble.
        refused: Steps since the start that were not taken because they raised the loss.
        cuts: How many times as long the step would be without a setting that bounds it, by the setting: 1 where it
            changes nothing.
        counts: What the structure counted: examples seen, updates refused, inverses kept.
    """

    step: int = 0
    loss: float = math.nan
    kl: float = math.nan
    damping: float = math.nan
    ratio: float | None = None
    solver_steps: int = 0
    residual: float = math.nan
    status: str = "no step yet"
    outside: float = math.nan
    excess: float = math.nan
    rate: float = math.nan
    gradient: float = math.nan
    failures: int = 0
    refused: int = 0
    cuts: Mapping[str, float] = field(default_factory=dict[str, float])
    counts: Mapping[str, float] = field(default_factory=dict[str, float])

    def list_known(self) -> dict[str, Any]:
        """What applies to this optimizer and was computed at this step, by name and in order."""
        solved = not math.isnan(self.residual) or self.solver_steps > 0
        judged = self.ratio is not None or self.refused > 0
        unknown = [("solver_steps", solved), ("refused", judged)]
        left_out = {"counts", "cuts"} | {name for name, known in unknown if not known}
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        own |= self.counts
        return {n: v for n, v in own.items() if v is not None and not (isinstance(v, float) and math.isnan(v))}

    def numbers(self) -> dict[str, float]:
        """What is known, as finite numbers for a logger.

        Example:
            >>> ng.optim.StateReport(step=3, loss=0.5, status="stepped").numbers()
            {'step': 3, 'loss': 0.5, 'failures': 0}
        """
        return {n: v for n, v in self.list_known().items() if not isinstance(v, str) and math.isfinite(v)}

    def __str__(self) -> str:
        return "  ".join(f"{name} {show(value)}" for name, value in self.list_known().items())

    def __repr__(self) -> str:
        return f"StateReport({', '.join(f'{name}={show(value)}' for name, value in self.list_known().items())})"

    def _repr_html_(self) -> str:
        return write_table(("", "last step"), [(name, show(value)) for name, value in self.list_known().items()])


def describe_memory(rows: Sequence[Row], width: int) -> Iterator[tuple[str, str]]:
    """Which structures there are for how many parameters, and the bytes between steps at `width` for a number."""
    if rows:
        kinds = Counter(row.structure for row in rows)
        yield "blocks", ", ".join(f"{kind} for {count} parameters" for kind, count in kinds.items())
        yield "memory", show_bytes(width * sum(row.memory for row in rows))


def show_bytes(count: int) -> str:
    """`1.5 MB`."""
    power = min(3, int(math.log(count, 1000))) if count else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def show(value: float | str | None) -> str:
    """A number in four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_cuts(cuts: Mapping[str, Any]) -> dict[str, float]:
    """What a rule says of its bounds, as numbers."""
    return {name: read_cut(cut) for name, cut in cuts.items()}


def state_report(numbers: Mapping[str, Any], step: int, failures: int, refused: int) -> StateReport:
    """From what a step told, tensors of one number among it, and the counts."""
    known: dict[str, Any] = {n: float(value) if isinstance(value, Tensor) else value for n, value in numbers.items()}
    left_out = "refused" if "ratio" in known else "skipped" if step else "no step yet"
    known = {"rate": 0.0 if step else math.nan, "status": "stepped" if "rate" in known else left_out} | known
    known["cuts"] = read_cuts(known.get("cuts", {}))
    return StateReport(step=step, failures=failures, refused=refused, **known)


# What the last steps of an optimizer did, in sentences, and what to try where that follows from their numbers

KEPT = 20  # steps that are looked back at
LONG = 100  # steps whose losses are looked back at where noise may hold them
FEW = 5  # steps before anything is said of their course: the fewest that can fall beyond chance
CHANCE = 2.0  # standard errors of a trend that chance alone makes
LONGER = 1.05  # times as long as a step was: less is round-off, and the slack of a bound that is measured
WHOLE = 0.9  # of the proposal: as good as all of it
STILL = 0.01  # relative change of the loss that counts as none
SHORT = 1e-4  # nats per example: a step that moves the model by less hardly changes it
MOST = 0.6  # of the steps
FAR = 0.1  # nats per example, or of the loss where that is above 1: a longer step leaves what was measured behind
SHRUNK = 0.005  # of a weight per step: spectral steps move a layer by some .075 of its size
ALL = 0.99  # of the system along a step, or of the gradient: as good as all of it


class PastLoss(NamedTuple):
    """The loss before a step, and the least learning rate of the step."""

    step: int
    lr: float
    loss: Tensor | float


def find_trend(losses: Sequence[float]) -> float:
    """Mann and Kendall's test, in standard errors: below 0 for losses that fall, whatever their size and scatter."""
    n, pairs = len(losses), combinations(losses, 2)
    excess = sum((after > before) - (after < before) for before, after in pairs)
    return math.copysign(max(abs(excess) - 1, 0), excess) / math.sqrt(max(n * (n - 1) * (2 * n + 5), 1) / 18)


@dataclass(frozen=True)
class Steps:
    """The last steps, and the settings that they were taken with."""

    reports: Sequence[StateReport]  # one a step, oldest first
    rule: Rule  # how a direction becomes a step
    # numbers that the parameter groups have, such as lr and kl_share: the least over the groups
    settings: Mapping[str, float]
    scheduled: bool = False  # True if a scheduler lowers the learning rate
    noise: Noise = Noise()  # whether the rule turned to directions of its own, and how much of the gradients is signal
    shrinkage: float = 0.0  # lr times weight_decay, the largest over the groups
    losses: Sequence[PastLoss] = ()  # of more steps, oldest first

    @property
    def last(self) -> StateReport:
        """The last step."""
        return self.reports[-1]

    def course(self) -> tuple[float, float] | None:
        """The loss in the first and in the last third of the steps; None where too few are known."""
        losses = [r.loss for r in self.reports if math.isfinite(r.loss)]
        third = len(losses) // 3
        return (median(losses[:third]), median(losses[-third:])) if len(losses) >= FEW else None

    def way(self) -> int:
        """-1 where the loss falls by more than chance, 1 where it rises so, else 0."""
        if (course := self.course()) is None or relative_change(*course) < STILL:
            return 0
        trend = find_trend([r.loss for r in self.reports if math.isfinite(r.loss)])
        return -1 if trend <= -CHANCE else 1 if trend >= CHANCE else 0

    def held_by_noise(self) -> int:
        """Over how many steps with directions of the rule's own the loss did not fall; 0 where it fell, or lr did."""
        past = [p for p in self.losses if p.step > self.noise.turned >= 0 and math.isfinite(p.loss)]
        if len(past) < KEPT or past[-1].lr < past[0].lr or self.count_unmoved():
            return 0
        return len(past) if find_trend([float(p.loss) for p in past]) > -CHANCE else 0

    def anneals(self) -> bool:
        """Whether the learning rate falls by itself, or a scheduler lets it fall."""
        return self.scheduled or self.rule.rate_after(10**9) < 1

    def count_unmoved(self) -> int:
        """Steps that changed no parameter, though there was a gradient; 0 where most changed some."""
        steps = sum(r.rate == 0 and r.gradient > 0 and r.status != "skipped" for r in self.reports)
        return steps if 2 * steps > len(self.reports) else 0

    def falls_steadily(self) -> bool:
        """True if most steps have a lower loss than the step before: then the fall is not noise of the batches."""
        losses = [r.loss for r in self.reports if math.isfinite(r.loss)]
        lower = sum(after < before for before, after in pairwise(losses))
        return lower >= MOST * (len(losses) - 1)

    def cut_by(self) -> dict[str, list[float]]:
        """For each setting that bound steps more than any other: how many times as long those would be without it."""
        lists = dict[str, list[float]]()
        for report in self.reports:
            longer = {name: factor for name, factor in report.cuts.items() if LONGER < factor < math.inf}
            if longer and report.rate > 0:
                name = max(longer, key=longer.__getitem__)
                lists.setdefault(name, []).append(longer[name])
        return lists

    def chief_cut(self) -> str | None:
        """The setting that bound most of the steps; None where none did."""
        lists = self.cut_by()
        name = max(lists, key=lambda setting: len(lists[setting]), default=None)
        return name if name is not None and 2 * len(lists[name]) > len(self.reports) else None

    def is_spectral(self, report: StateReport) -> bool:
        """Whether a step had a direction of the rule's own, and so a length of its own."""
        return self.rule.shapes and (self.rule.turns_at is None or 0 <= self.noise.turned < report.step - 1)

    def read_setting(self, name: str) -> float | None:
        """What a setting is now; None where nobody knows."""
        if name in self.settings:
            return self.settings[name]
        value: object = self.rule
        for part in name.split("."):
            value = getattr(value, part, None)
        return value if isinstance(value, float) else None


def relative_change(before: float, after: float) -> float:
    """|after - before|, relative to the larger one."""
    return abs(after - before) / max(abs(before), abs(after), 1e-30)


def explain_steps(steps: Steps) -> str:
    """A sentence for each thing that decided how the last steps went, and what to try."""
    if not steps.reports:
        return "No step yet: compute the loss with opt.loss(outputs, targets), call backward() on it, then opt.step()."
    lengths = tell_decay, tell_bounds, tell_damping, tell_noise, advise_length
    return "\n".join(
        sentence
        for tell in (tell_course, *lengths, tell_failures, tell_judgement, tell_solver)
        for sentence in tell(steps)
    )


def tell_course(steps: Steps) -> Iterator[str]:
    """Whether the loss falls."""
    last, course, count = steps.last, steps.course(), len(steps.reports)
    if course is None:
        why = "the losses of steps are not known: opt.step(closure) tells them" if count >= FEW else "too few steps"
        yield f"Step {last.step}: where the loss goes cannot be said, {why}."
    else:
        before, after = course
        still = relative_change(before, after) < STILL
        verb = "stands still at" if still else "falls to" if after < before else "rises to"
        chance = "" if still or steps.way() else ": no more than single steps differ"
        where = f"{verb} {show(after)}, from {show(before)}{chance}"
        yield f"Step {last.step}: over the last {count} steps the loss {where}."
    if last.gradient == 0:
        yield "The gradient is zero: the loss does not depend on the parameters, or is at its minimum."


def tell_decay(steps: Steps) -> Iterator[str]:
    """Whether weight decay shrinks weights as fast as steps move them, as AdamW's number does at a rate of 1."""
    if steps.shrinkage > SHRUNK:
        yield (
            f"lr times weight_decay shrinks weights by {steps.shrinkage:.1%} in each step. Try: a smaller "
            "weight_decay; AdamW's lr times its weight_decay is the same decay per step."
        )


def tell_bounds(steps: Steps) -> Iterator[str]:
    """What set the length of the steps, and which way to change it where the loss says so."""
    count = len(steps.reports)
    if steps.settings["lr"] == 0:
        yield "lr is 0: no parameter moves."
        return
    for name, times in steps.cut_by().items():
        free = "at 1" if name == "lr" else "without it"
        yield (
            f"{name} (now {show(steps.read_setting(name))}) bounds {len(times)} of {count} steps: {free} they would be "
            f"{show(median(times))} times as long."
        )
    natural = [r for r in steps.reports if not steps.is_spectral(r) and r.rate > 0]
    free = [r for r in natural if not any(factor > LONGER for factor in r.cuts.values())]
    if 2 * len(measured := [r for r in free if r.rate < WHOLE and r.excess > 1 / WHOLE]) > count:
        yield (
            f"{len(measured)} of {count} steps were shortened to {show(median(r.rate for r in measured))} of the "
            "proposed step, where the quadratic model of the loss is lowest: measured along them, the metric is larger "
            "than its blocks (one per layer) say."
        )
    elif 2 * len(searched := [r for r in free if r.rate < WHOLE]) > count:
        yield (
            f"{len(searched)} of {count} steps were shortened to about {show(median(r.rate for r in searched))} of the "
            "proposed step, the length that the rule chose."
        )
    elif count >= FEW and len(free) == count and steps.last.rate >= WHOLE:
        lr = show(steps.settings["lr"])
        yield f"Steps were taken in full: lr (now {lr}) and the damping set their length, and no bound shortened them."
    if unmoved := steps.count_unmoved():
        cuts = steps.last.cuts.items()
        none = [name for name, factor in cuts if name.endswith("kl_share") and not math.isfinite(factor)]
        why = ": at every length that the rule tried the loss was higher" * steps.rule.needs_loss
        why = f": {none[0]} is a share of the loss, and of a loss of {show(steps.last.loss)} is none" if none else why
        yield f"{unmoved} of {count} steps changed no parameter{why}."


def advise_length(steps: Steps) -> Iterator[str]:
    """One setting, and one way to change it."""
    way, name = steps.way(), steps.chief_cut()
    course = steps.course()
    if course is None:
        return
    natural = [r for r in steps.reports if not steps.is_spectral(r) and r.rate >= WHOLE]
    full = 2 * sum(not any(factor > LONGER for factor in r.cuts.values()) for r in natural) > len(steps.reports)
    hardly = relative_change(*course) < STILL and all(0 < r.kl < SHORT for r in steps.reports)
    far = median(r.kl for r in steps.reports) > FAR * max(1.0, abs(course[1]))
    if name == "lr" and steps.scheduled and way < 1:
        return
    if steps.held_by_noise() and not steps.anneals():
        yield 'Try: rate="auto", or a schedule that lets lr fall to zero.'
    elif way > 0 and (name or full):
        yield f"Try: a smaller {describe_setting(steps, name or 'lr', 0.5)}."
    elif steps.noise.turned >= 0:  # longer steps of a noisy gradient never helped where they were tried
        return
    elif name and ((way < 0 and (name == "lr" or steps.falls_steadily()) and not far) or hardly):
        yield f"Try: a larger {describe_setting(steps, name, 2.0)}{', up to 1' * (name == 'lr')}."


def describe_setting(steps: Steps, name: str, factor: float) -> str:
    """A setting, its value, and how it is written where it is no keyword of the recipe."""
    value = steps.read_setting(name)
    now = f"{name} (now {show(value)})"
    if value is None or name in steps.settings or not isinstance(steps.rule, NoiseAware):
        return now
    new = show(factor * value)
    spectral = type(steps.rule.spectral).__name__
    inner = f"move={new}" if name == "move" else f"spectral=natgrad.rules.{spectral}(kl_share={new})"
    return f"{now}, with rule=natgrad.rules.NoiseAware({inner}{list_changed(steps.rule)})"


def list_changed(rule: Rule) -> str:
    """What of a rule's shares is not as `NoiseAware` has it, as arguments after another."""
    usual, names = NoiseAware(), ("kl_share", "noise")
    asked = {name: getattr(rule, name, getattr(usual, name)) for name in names}
    return "".join(f", {name}={show(value)}" for name, value in asked.items() if value != getattr(usual, name))


def tell_damping(steps: Steps) -> Iterator[str]:
    """Whether the damping outweighs the metric."""
    along = [r.excess for r in steps.reports if math.isfinite(r.excess)]
    outside = [r.outside for r in steps.reports if math.isfinite(r.outside) and r.residual < 1 - ALL and r.rate > 0]
    damping = show(steps.last.damping) if math.isfinite(steps.last.damping) else "as it is"
    if along and median(along) < 1 - ALL and not steps.cut_by() and not steps.count_unmoved():
        share = 1 - median(along)
        yield f"The damping is {share:.1%} of G + damping along the steps: they are nearly plain gradient steps."
        yield "Try: less damping."
    elif outside and median(outside) > ALL:
        yield (
            f"{median(outside):.1%} of the gradient is divided by the damping alone (now {damping}), since the metric "
            "does not reach it: steps are nearly plain gradient steps."
        )


def tell_noise(steps: Steps) -> Iterator[str]:
    """Whether the rule has turned to spectral steps."""
    if steps.noise.turned < 0:
        return
    noisy = steps.noise.share < (steps.rule.turns_at or 0)
    why = (
        "mini-batch noise is larger than the gradient"
        if noisy
        else f"a natural step would move layers by more than {steps.read_setting('far')} of their size"
    )
    grows = isinstance(getattr(steps.rule, "spectral", None), SpectralProgress)
    size = "a share of its size" if grows else "a fixed length"
    falls = steps.rule.rate_after(10**9) < 1
    how = f"{size} that falls by itself" if falls else f"{size}, times lr (now {show(steps.settings['lr'])})"
    yield (
        f"Since step {steps.noise.turned} {why}, so steps are spectral: all directions of a layer move alike, by {how}."
    )
    if (held := steps.held_by_noise()) and not steps.anneals():
        yield f"Over the last {held} of them the loss falls by no more than single steps differ: noise limits it."


def tell_failures(steps: Steps) -> Iterator[str]:
    """Batches that were left out."""
    failed = steps.last.failures - steps.reports[0].failures + (steps.reports[0].status == "skipped")
    if failed > 0:
        yield (
            f"{failed} of the last {len(steps.reports)} steps were skipped, or their statistics were: a number was not "
            "finite, or the loss was far above all others."
        )
        yield 'Try: on_trouble="raise" to stop at the first one, and look at its batch.'


def tell_judgement(steps: Steps) -> Iterator[str]:
    """How far the loss fell beside what was predicted, where the damping is adapted to it."""
    ratios = [r.ratio for r in steps.reports if r.ratio is not None and math.isfinite(r.ratio)]
    refused = steps.last.refused - steps.reports[0].refused + (steps.reports[0].status == "refused")
    if refused > 0:
        yield f"{refused} of the last {len(steps.reports)} steps were not taken, since they would have raised the loss."
    if ratios:
        ratio, damping = median(ratios), show(steps.last.damping)
        verdict = "as much as" if 0.75 <= ratio <= 1.5 else "less than" if ratio < 0.75 else "more than"
        yield (
            f"The loss falls {verdict} the quadratic model predicts (ratio {show(ratio)}); the damping that follows "
            f"from it is {damping}."
        )


def tell_solver(steps: Steps) -> Iterator[str]:
    """Why the solver stopped."""
    count = len(steps.reports)
    stopped = sum(r.status == "max_steps" for r in steps.reports)
    if 2 * stopped > count:
        yield (
            f"The solver stopped at its limit in {stopped} of {count} steps, with a residual of "
            f"{show(steps.last.residual)} of the gradient."
        )
        yield "Try: a larger max_steps of the solver."
    curved = sum(r.status == "negative_curvature" for r in steps.reports)
    if curved:
        yield f"The solver met negative curvature in {curved} of {count} steps."
        yield "Try: ng.gauss_newton in place of ng.hessian for the metric."
