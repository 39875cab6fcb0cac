"""What the last steps of an optimizer did, in sentences, and what to try."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from natgrad.optim.state_report import StateReport, show
from natgrad.rules import NoiseAware, Rule, SpectralDescent

KEPT = 20  # steps that are looked back at
FEW = 3  # steps before anything is said of their course
LIMITED = 0.95  # of a bound: as good as at it, after round-off
WHOLE = 0.9  # of the proposal: as good as all of it
STILL = 0.01  # relative change of the loss that counts as none
SHORT = 1e-4  # of the KL bound: a step that moves the model by less hardly changes it
USUAL = (0.01, 2.0)  # between these a learning rate needs no remark, where the rule finds the length


@dataclass(frozen=True)
class Steps:
    """The last steps, and the settings that they were taken with.

    Attributes:
        reports: One a step, oldest first.
        bounds: Most nats per example that the rule allowed each step; inf where it had no bound.
        rule: How a direction becomes a step.
        lr: The least learning rate of the parameter groups, as far as it has fallen by itself.
        settings: Bounds that the parameter groups have, such as kl_share.
        turned: The step at which noise had hidden the gradient; -1 before, and after it showed again.
        returns: Times that it showed again.
        rose: The step after which a loss that had risen turned the rule; -1 for never.
    """

    reports: Sequence[StateReport]
    bounds: Sequence[float]
    rule: Rule
    lr: float
    settings: Mapping[str, float]
    turned: int = -1
    returns: int = 0
    rose: int = -1

    @property
    def last(self) -> StateReport:
        """The last step."""
        return self.reports[-1]

    def count_cut(self) -> int:
        """Steps whose length was set by the KL bound."""
        return sum(self._was_cut(*pair) and self._by_kl(*pair) for pair in self._pairs())

    def count_measured(self) -> int:
        """Steps that were shortened to the minimum along them: the metric was larger there than it was taken for."""
        return sum(
            allowed_rate(r) < WHOLE and not self._was_cut(r, b) and r.rate > 0 and self.length_of(r) is None
            for r, b in self._pairs()
        )

    def count_limited(self) -> int:
        """Steps that something else made shorter: the bound on layers' moves, or a search for the length."""
        return sum(self._was_cut(*pair) and not self._by_kl(*pair) for pair in self._pairs())

    def has_bound(self) -> bool:
        """Whether the rule allows a step so many nats at most, and so finds its length."""
        return any(bound < math.inf for bound in self.bounds)

    def has_odd_rate(self) -> bool:
        """Whether the learning rate is zero, or far from 1 where the rule finds the length."""
        return self.lr == 0 or (self.has_bound() and not USUAL[0] <= self.lr <= USUAL[1])

    def are_short(self) -> bool:
        """Whether natural steps hardly move the model, by far less than is allowed."""
        short = self.has_bound() and self.turned < 0
        return short and all(0 < r.kl < SHORT * bound for r, bound in self._pairs())

    def name_bound(self) -> str:
        """The setting that bounds the last step, with its value."""
        share, most = self.settings.get("kl_share"), self.settings.get("max_kl")
        if share is None:
            return "radius"
        if most is not None and LIMITED * most <= self.bounds[-1] <= most / LIMITED:
            return f"max_kl (now {show(float(most))})"
        return f"kl_share (now {show(float(share))})"

    def _pairs(self) -> list[tuple[StateReport, float]]:
        return list(zip(self.reports, self.bounds, strict=True))

    def _was_cut(self, report: StateReport, bound: float) -> bool:
        whole = self.length_of(report)
        return 0 < report.rate < LIMITED * (allowed_rate(report) if whole is None else whole)

    def length_of(self, report: StateReport) -> float | None:
        """The length of a spectral step, relative to its direction; None for steps of other kinds."""
        rule = self.rule.spectral if isinstance(self.rule, NoiseAware) else self.rule
        spectral = self.rule.turns_at is None or 0 <= self.turned < report.step - 1
        return rule.length if isinstance(rule, SpectralDescent) and spectral else None

    def _by_kl(self, report: StateReport, bound: float) -> bool:
        # a quarter of it: the rule counts the damping in, and so the metric alone moves less
        return bound < math.inf and report.kl >= 0.25 * bound * min(1.0, self.lr) ** 2


def allowed_rate(report: StateReport) -> float:
    """The length, relative to the proposal, at which the quadratic model with the metric as measured is least."""
    return 1 / max(1.0, report.excess) if math.isfinite(report.excess) else 1.0


def explain_steps(steps: Steps) -> str:
    """A sentence for each thing that decided how the last steps went, and what to try.

    Args:
        steps: The last steps.
    """
    if not steps.reports:
        return "No step yet: compute the loss with opt.loss(outputs, targets), call backward() on it, then opt.step()."
    tellers = (tell_course, tell_rate, tell_bounds, tell_noise, tell_failures, tell_judgement, tell_solver, tell_reach)
    return "\n".join(sentence for tell in tellers for sentence in tell(steps))


def tell_course(steps: Steps) -> Iterator[str]:
    """Whether the loss falls."""
    losses, last = [r.loss for r in steps.reports if math.isfinite(r.loss)], steps.last
    count = len(steps.reports)
    if len(losses) < FEW:
        yield f"Step {last.step}: {last.status}. Too few steps to say where the loss goes."
        return
    third = max(1, len(losses) // 3)
    before, after = median(losses[:third]), median(losses[-third:])
    change = (after - before) / max(abs(before), abs(after), 1e-30)
    verb = "stands still at" if abs(change) < STILL else "falls to" if change < 0 else "rises to"
    yield f"Step {last.step}: over the last {count} steps the loss {verb} {show(after)}, from {show(before)}."
    if change > STILL:
        yield "Try: a lower lr or a tighter bound (kl_share, max_kl, radius); larger batches if the loss only jumps."
    elif abs(change) < STILL and last.gradient == 0:
        yield "The gradient is zero: the loss does not depend on the parameters, or is at its minimum."
    elif abs(change) < STILL and (2 * steps.count_cut() > count or (steps.has_odd_rate() and steps.lr < 1)):
        return  # the next sentences say why
    elif abs(change) < STILL and steps.are_short():
        yield (
            f"A step moves the model by about {show(median(r.kl for r in steps.reports))} nats per example, where "
            f"{show(median(steps.bounds))} are allowed."
        )
        yield "Try: less damping or a larger lr, unless the loss is at its minimum."
    elif abs(change) < STILL:
        falls = "" if falls_by_itself(steps.rule) else "a schedule that lets lr fall, or "
        yield f"Try: {falls}larger batches, if gradients are noisy; else less damping."


def tell_rate(steps: Steps) -> Iterator[str]:
    """A learning rate that is zero, or unusual where the rule finds the length."""
    if steps.lr == 0:
        yield "lr is 0: no parameter moves."
    elif steps.has_odd_rate():
        yield f"lr is {show(steps.lr)}: it multiplies a step whose length is found already; 1 is usual."


def tell_bounds(steps: Steps) -> Iterator[str]:
    """What set the length of the steps."""
    count, cut = len(steps.reports), steps.count_cut()
    if count < FEW or steps.lr == 0 or (steps.has_odd_rate() and steps.lr < 1):
        return
    if cut:
        bound = show(next(b for b in reversed(steps.bounds) if b < math.inf))
        yield f"The KL bound cut {cut} of {count} steps: it was {bound} nats per example at the last of them."
    if 2 * cut > count:
        yield f"Try: a larger {steps.name_bound()} to go faster; a smaller one if the loss jumps."
    measured, limited = steps.count_measured(), steps.count_limited()
    if 2 * measured > count:
        rate = show(median(allowed_rate(r) for r in steps.reports))
        yield (
            f"{measured} of {count} steps were shortened to {rate} of the proposal, where the quadratic model is "
            "least: the metric along them was larger than its blocks say."
        )
        yield "Try: more damping, or a smaller update_every, so that the blocks are fresher."
    if 2 * limited > count:
        move = getattr(steps.rule, "move", math.inf)
        rate = show(median(r.rate for r in steps.reports))
        reason = f"a layer moves by at most {show(move)} of its size" if move < math.inf else "the rule found a length"
        yield f"{limited} of {count} steps were shortened to about {rate} of the proposal: {reason}."
        if move < math.inf:
            rule = f"natgrad.rules.NoiseAware(move={show(2 * move)}{list_changed(steps.rule)})"
            yield f"Try: rule={rule} if the loss falls steadily but slowly."
    unmoved = sum(r.rate == 0 and r.gradient > 0 and r.status != "skipped" for r in steps.reports)
    if 2 * unmoved > count and steps.lr > 0:
        yield f"{unmoved} of {count} steps moved nothing: the rule found no length at which the loss is lower."
        yield "Try: more damping; nothing, if the loss is at its minimum."
    if cut + measured + limited == 0 and steps.last.rate >= WHOLE and count >= FEW:
        yield "Steps were taken whole: lr and the damping set their length, no bound did."


def list_changed(rule: Rule) -> str:
    """What of a rule's shares is not as `NoiseAware` has it, as arguments after another."""
    usual, names = NoiseAware(), ("kl_share", "noise")
    asked = {name: getattr(rule, name, getattr(usual, name)) for name in names}
    return "".join(f", {name}={show(value)}" for name, value in asked.items() if value != getattr(usual, name))


def tell_noise(steps: Steps) -> Iterator[str]:
    """Whether the rule has turned to spectral steps, or back."""
    if steps.turned < 0 < steps.returns:
        yield "The gradient showed again after noise had hidden it: steps are natural ones as at the start."
    if steps.turned >= 0:
        why = "Noise has hidden the gradient since" if steps.rose < 0 else "A natural step had raised the loss before"
        yield (
            f"{why} step {steps.turned}: steps are spectral ones from there on, of a "
            f"{'size per layer that falls by itself' if falls_by_itself(steps.rule) else 'fixed size per layer'}."
        )
        if not falls_by_itself(steps.rule):
            yield 'Try: rate="auto", or a schedule that lets lr fall to zero; larger batches.'


def falls_by_itself(rule: Rule) -> bool:
    """Whether the learning rate of the rule's own directions falls without a scheduler."""
    return rule.rate_after(10**9) < 1


def tell_failures(steps: Steps) -> Iterator[str]:
    """Batches that were left out."""
    failed = steps.last.failures - steps.reports[0].failures + (steps.reports[0].status == "skipped")
    if failed > 0:
        yield (
            f"{failed} of the last {len(steps.reports)} steps were left out, or their statistics were: a number was "
            "not finite, or the loss far above all others."
        )
        yield 'Try: on_trouble="raise" to stop at the first one, and look at its batch.'


def tell_judgement(steps: Steps) -> Iterator[str]:
    """What the reduction ratio says, where a damping asks for it."""
    ratios = [r.ratio for r in steps.reports if r.ratio is not None and math.isfinite(r.ratio)]
    refused = steps.last.refused - steps.reports[0].refused + (steps.reports[0].status == "refused")
    if refused > 0:
        yield f"{refused} of the last {len(steps.reports)} steps were not taken, since they would have raised the loss."
    if ratios:
        found, damping = median(ratios), show(steps.last.damping)
        verdict = "as much as" if 0.75 <= found <= 1.5 else "less than" if found < 0.75 else "more than"
        yield (
            f"The loss falls {verdict} the quadratic model promises (ratio {show(found)}); the damping that follows "
            f"from it is {damping}."
        )


def tell_solver(steps: Steps) -> Iterator[str]:
    """How the solver ended."""
    count = len(steps.reports)
    stopped = sum(r.status == "max_steps" for r in steps.reports)
    if 2 * stopped > count:
        yield (
            f"The solver stopped at its limit in {stopped} of {count} steps, with a residual of "
            f"{show(steps.last.residual)} of the gradient."
        )
        yield "Try: a larger max_steps, more damping, or a preconditioner."
    curved = sum(r.status == "negative_curvature" for r in steps.reports)
    if curved:
        yield f"The solver met negative curvature in {curved} of {count} steps."
        yield "Try: ng.fisher or ng.gauss_newton for the metric, or solver=ng.MinresQLP()."


def tell_reach(steps: Steps) -> Iterator[str]:
    """Whether the metric sees the gradient."""
    outside = [r.outside for r in steps.reports if math.isfinite(r.outside)]
    if outside and median(outside) > 0.9:
        yield (
            f"{median(outside):.0%} of the gradient is left to the damping: steps are nearly plain gradient steps, "
            f"over {show(steps.last.damping)}."
        )
        yield "Try: less damping; the metric on the same data as the gradient."
