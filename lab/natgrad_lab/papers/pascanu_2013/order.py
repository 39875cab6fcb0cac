"""How much each part of an online stream shapes the model: Pascanu & Bengio 2013, section 6 and Fig. 3.

The first half of the stream is cut into ten segments. For each of them five runs see five other draws of that segment
and the same rest. The variance of the outputs on held-out images at the end, over the five runs, is how much the
segment matters. All 50 runs of a method are one model with a leading axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad_lab.data import Split, mnist, omniglot
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive, check_word
from natgrad_lab.figures import PALETTE, fill_axes
from natgrad_lab.words import plural, short


@dataclass(frozen=True)
class OrderSettings(StudySettings):
    """What `--set` can change. The paper's own size: hidden=500 batch=512 steps=3193 rate=.1 side=28 data=omniglot."""

    data: str = "mnist"  # deformed; or omniglot, 62 characters of it. The paper: NISTP, 62 classes, not to be had
    side: int = 14  # images are reduced to side x side; the paper: 32
    hidden: int = 100  # the paper: 500
    batch: int = 128  # for the gradient and the metric; the paper: 512
    segments: int = 10  # that the stream is cut into
    steps: int = 20  # per segment; the stream has twice as many segments. The paper: 3193
    runs: int = 5  # per segment
    held_out: int = 2000  # deformed images of the test part; the paper: 100,000
    # The others' rates are matched to the held-out loss it leads to. The paper: .1 in 64,000 steps. In 400 steps .1
    # leaves the model near its start, where late segments weigh more: .8 goes as far as is stable (2 diverges)
    rate: float = 0.8  # of MSGD
    damping: float = 3.0  # of the natural gradient, as in the paper
    small_damping: float = 0.1  # not in the paper; of 1, .3, .1, .03 the lowest held-out loss on tuning seeds
    tolerance: float = 0.002  # of the matched held-out loss, a fraction
    rtol: float = 0.03  # of the solve by conjugate gradients; not given in the paper
    products: int = 20  # with the metric per step, at most
    tuning_seed: int = 100  # and the next two: rates are matched on them; the measured runs have seeds 0, 1, 2 ...

    def __post_init__(self) -> None:
        check_word(self, "data", SOURCES)
        check_counts(self, "side", "hidden", "batch", "segments", "steps", "held_out", "products")
        check_positive(self, "rate", "damping", "small_damping", "tolerance")
        check_counts(self, "rtol", least=0)
        check_counts(self, "runs", least=2, most=15)  # a variance needs two, and `number` has room for 15 draws
        check_counts(self, "steps", most=32_768 // self.segments)  # and for 65,536 steps of the whole stream

    @property
    def total(self) -> int:
        """Steps of the whole stream: resampled and common half."""
        return 2 * self.segments * self.steps

    def natural(self, damping: float) -> NaturalDirection:
        """The natural gradient with that damping."""
        return NaturalDirection(damping, ng.CG(rtol=self.rtol, max_steps=self.products))


TUNING_SEEDS = 3
ROUNDS = 3
Draw = Callable[[int], list[tuple[int, int]]]  # step number -> (seed, draw) of every run


@dataclass
class ParallelTraining:
    """R runs side by side, each with its own seed, draws and rate."""

    settings: OrderSettings
    drawn_from: Split
    seeds: list[int]
    draws: Draw
    rates: Tensor  # (R,)

    def __post_init__(self) -> None:
        s = self.settings
        self.streams = {seed: Stream(self.drawn_from, s.batch, s.side, seed) for seed in set(self.seeds)}
        classes = int(self.drawn_from.train_y.max()) + 1
        self.model = Perceptrons(self.seeds, s.side**2, s.hidden, classes)

    def run(self, direction: Direction, advance: Callable[[float], None]) -> None:
        """Through the whole stream."""
        for number in range(self.settings.total):
            advance(number / self.settings.total)
            step(self.model, direction(self.model, self.batch(number)), self.rates)

    def batch(self, number: int) -> Batch:
        """Batch of that number for every run; what runs have in common is drawn once."""
        asked = self.draws(number)
        batches = {which: self.streams[which[0]].batch(number, which[1]) for which in set(asked)}
        return tuple(torch.stack([batches[which][part] for which in asked], 1) for part in (0, 1))  # type: ignore[return-value]

    def held_out(self) -> Batch:
        """The held-out images of every run's seed."""
        batches = {seed: stream.held_out(self.settings.held_out) for seed, stream in self.streams.items()}
        return tuple(torch.stack([batches[seed][part] for seed in self.seeds], 1) for part in (0, 1))  # type: ignore[return-value]


def measure(run: PieceRun, direction: Direction, rate: float) -> Numbers:
    """The whole protocol for one method: variance of the outputs for each segment, and how far the runs came."""
    s: OrderSettings = run.settings
    many = s.segments * s.runs

    def draws(number: int) -> list[tuple[int, int]]:
        now = number // s.steps  # run r has segment r // runs resampled; draw 0 is what all others see
        return [(run.seed, 1 + r % s.runs if r // s.runs == now else 0) for r in range(many)]

    training = ParallelTraining(s, SOURCES[s.data](), [run.seed] * many, draws, torch.full((many,), rate))
    training.run(direction, run.advance)
    loss, wrong, outputs = losses(training.model, training.held_out())
    variance = outputs.unflatten(1, (s.segments, s.runs)).var(2).mean((0, 2))
    return {"rate": rate, "variance": variance.tolist(), "loss": loss.tolist(), "error": wrong.tolist()}


def measure_last_losses(
    run: PieceRun, direction: Direction, rates: list[float], advance: Callable[[float], None]
) -> list[float]:
    """Held-out loss at the end of the stream for every rate, a mean over the tuning seeds."""
    s: OrderSettings = run.settings
    seeds = [s.tuning_seed + n for n in range(TUNING_SEEDS) for _ in rates]
    training = ParallelTraining(
        s, SOURCES[s.data](), seeds, lambda number: [(seed, 0) for seed in seeds], torch.tensor(rates * TUNING_SEEDS)
    )
    training.run(direction, advance)
    loss, _, _ = losses(training.model, training.held_out())
    return loss.unflatten(0, (TUNING_SEEDS, len(rates))).mean(0).tolist()


def level(run: PieceRun) -> Numbers:
    """The held-out loss that MSGD ends with at its rate: what the others' rates are matched to."""
    rate = run.settings.rate
    return {"rate": rate, "loss": measure_last_losses(run, gradient, [rate], run.advance)[0]}


def match(run: PieceRun, direction: NaturalDirection) -> Numbers:
    """The rate with which a method ends at the level, by interpolation and new runs around it. LabError for none."""
    s: OrderSettings = run.settings
    target, scale = run.earlier["level"]["loss"], s.rate * direction.damping  # of MSGD, where the damping is all
    rates, tried = [scale * 20 ** (n / 4) / 2 for n in range(5)], {}
    for number in range(ROUNDS):
        losses_ = measure_last_losses(run, direction, rates, lambda f, n=number: run.advance((n + f) / ROUNDS))
        tried.update((rate, loss) for rate, loss in zip(rates, losses_, strict=True) if math.isfinite(loss))
        if not tried:
            raise LabError(f"every rate from {rates[0]:.3g} to {rates[-1]:.3g} diverges: change rate or the damping")
        best = min(tried, key=lambda rate: abs(tried[rate] - target))
        if abs(tried[best] / target - 1) <= s.tolerance:
            return {"rate": best, "loss": tried[best], "target": target, "tried": sorted(tried.items())}
        middle = crossing(tried, target)
        rates = [middle * factor for factor in (0.97, 1.0, 1.03)]
    raise LabError(
        f"held-out loss {tried[best]:.4f} at rate {best:.3g} is not yet {target:.4f}: allow a larger tolerance"
    )


def crossing(tried: dict[float, float], target: float) -> float:
    """The smallest rate at which the loss falls to the target, interpolated in the logarithm of the rate."""
    points = sorted(tried.items())
    for (low, above), (high, below) in pairwise(points):
        if above >= target > below:
            part = (above - target) / (above - below)
            return math.exp(math.log(low) + part * math.log(high / low))
    ends = ", ".join(f"{rate:.3g}: {loss:.4f}" for rate, loss in points)
    raise LabError(f"no two of the rates tried have the held-out loss {target:.4f} between them ({ends}): change rate")


def pieces(settings: OrderSettings) -> tuple[Piece, ...]:
    """The level, the two matched rates, and the protocol for every method."""
    paper, small = settings.natural(settings.damping), settings.natural(settings.small_damping)
    return (
        Piece("level", "Held-out loss of MSGD", level, repeated=False),
        Piece("rate-paper", f"Matching the rate, damping {paper.damping:g}", lambda run: match(run, paper), False),
        Piece("rate-small", f"Matching the rate, damping {small.damping:g}", lambda run: match(run, small), False),
        Piece("msgd", "MSGD", lambda run: measure(run, gradient, settings.rate)),
        *(
            Piece(
                name,
                f"Natural gradient, damping {direction.damping:g}",
                lambda run, d=direction, n=name: measure(run, d, run.earlier[f"rate-{n}"]["rate"]),
            )
            for name, direction in (("paper", paper), ("small", small))
        ),
    )


# An endless stream of labelled images: random pictures of a set, each deformed anew. A batch is a function of the
# stream's seed, its number and which draw of it is wanted, so that any part can be drawn again, or replaced.


@dataclass(frozen=True)
class Deformation:
    """How far an image is bent: every number is the end of a uniform range around no change, but for `elastic`."""

    degrees: float = 20.0  # turned
    scale: float = 0.2  # stretched along each axis, a fraction
    shear: float = 0.2
    shift: float = 0.1  # of the width
    elastic: float = 0.05  # standard deviation of a displacement field on 5 x 5 knots, of half the width

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """images (b, h, w) -> the same shape, each bent its own way; what comes from outside is 0."""
        b, h, w = images.shape
        # (b, 2, 3): from the bent image's coordinates in [-1, 1] to the given one's
        turn, wide, high, shear, right, down = (2 * torch.rand(6, b, generator=generator) - 1).unbind()
        turn, shear = turn * math.radians(self.degrees), self.shear * shear
        wide, high = 1 + self.scale * wide, 1 + self.scale * high
        top = torch.stack([wide * turn.cos(), -high * turn.sin() + shear, 2 * self.shift * right], 1)
        bottom = torch.stack([wide * turn.sin(), high * turn.cos(), 2 * self.shift * down], 1)
        grid = functional.affine_grid(torch.stack([top, bottom], 1), [b, 1, h, w], align_corners=False)
        knots = self.elastic * torch.randn(b, 2, 5, 5, generator=generator)
        field = functional.interpolate(knots, (h, w), mode="bilinear", align_corners=True)
        bent = functional.grid_sample(images[:, None], grid + field.permute(0, 2, 3, 1), align_corners=False)
        return bent[:, 0]


def omniglot_characters(classes: int = 62) -> Split:
    """The first characters of Omniglot, as many as NIST has classes, four of their twenty writers held out."""
    split = omniglot()
    few = split.train_y < classes
    x, y = split.train_x[few], split.train_y[few]
    earlier = (y[:, None] == y).tril(-1).sum(1)  # images of the same character before this one
    held = earlier >= 16
    return Split(x[~held], y[~held], x[held], y[held])


SOURCES = {"mnist": mnist, "omniglot": omniglot_characters}


@dataclass(frozen=True)
class Stream:
    """Batches (b, side^2), (b,) out of a source, deformed and reduced to side x side by averaging."""

    source: Split
    size: int
    side: int
    seed: int
    deformation: Deformation = Deformation()

    def batch(self, step: int, draw: int = 0) -> tuple[Tensor, Tensor]:
        """Batch number `step`; another draw has other pictures, bent in other ways."""
        return self._draw(self.source.train_x, self.source.train_y, self.size, (0, step, draw))

    def held_out(self, size: int) -> tuple[Tensor, Tensor]:
        """So many deformed pictures of the part that is held out."""
        return self._draw(self.source.test_x, self.source.test_y, size, (1, 0, 0))

    def _draw(self, images: Tensor, labels: Tensor, size: int, which: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number(self.seed, *which))
        chosen = torch.randint(len(images), (size,), generator=generator)
        bent = self.deformation(images[chosen], generator)
        return functional.adaptive_avg_pool2d(bent[:, None], self.side).flatten(1), labels[chosen]


def number(seed: int, part: int, step: int, draw: int) -> int:
    """A seed of 32 bits, which is all that torch looks at, for seed < 2048, part < 2, step < 65,536, draw < 16."""
    return ((seed * 2 + part) * 65_536 + step) * 16 + draw


# Many small networks trained at once: one module whose parameters have a leading axis for the run. With the loss a mean
# over b examples and R runs, its gradient in run r's parameters is that of the run alone over R, and the Fisher matrix
# is block diagonal over runs, each block that of the run alone over R. So one solve with damping lambda / R on the
# joint model gives R natural-gradient steps with damping lambda.


class Perceptrons(nn.Module):
    """R perceptrons of one tanh layer: inputs (b, R, i) -> logits (b, R, classes).

    Glorot-uniform weights from the generator of each run's seed: equal seeds start equal. Zero biases.
    """

    def __init__(self, seeds: list[int], inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        drawn = {seed: _draw(seed, inputs, hidden, classes) for seed in set(seeds)}
        self.weight1 = nn.Parameter(torch.stack([drawn[seed][0] for seed in seeds]))
        self.bias1 = nn.Parameter(torch.zeros(len(seeds), 1, hidden))
        self.weight2 = nn.Parameter(torch.stack([drawn[seed][1] for seed in seeds]))
        self.bias2 = nn.Parameter(torch.zeros(len(seeds), 1, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.bias1, inputs.transpose(0, 1), self.weight1).tanh()
        return torch.baddbmm(self.bias2, hidden, self.weight2).transpose(0, 1)

    @property
    def runs(self) -> int:
        """R."""
        return len(self.weight1)


def _draw(seed: int, inputs: int, hidden: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (inputs, hidden), (hidden, classes)
    first, second = ((2 * torch.rand(s, generator=generator) - 1) * (6 / sum(s)) ** 0.5 for s in sizes)
    return first, second


Batch = tuple[Tensor, Tensor]  # inputs (b, R, i), labels (b, R)
Direction = Callable[[Perceptrons, Batch], list[Tensor]]  # per parameter (R, ...), of every run for itself


def gradient(model: Perceptrons, batch: Batch) -> list[Tensor]:
    """The gradient of every run's own mean loss."""
    return [model.runs * part for part in _joint(model, batch)]


def _joint(model: Perceptrons, batch: Batch) -> list[Tensor]:
    loss = functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    return list(torch.autograd.grad(loss, list(model.parameters())))


@dataclass(frozen=True)
class NaturalDirection:
    """(G + damping I)^-1 g of every run, the metric on the gradient's batch."""

    damping: float
    solver: ng.Solver

    def __call__(self, model: Perceptrons, batch: Batch) -> list[Tensor]:
        params = ng.trainable(model)
        space = ng.Space(params)
        metric = ng.fisher(model, ng.Categorical()).at(params, batch[0])
        rhs = space.flatten(dict(zip(params, _joint(model, batch), strict=True)))
        solution = ng.natural_gradient(metric, rhs, solver=self.solver, damping=self.damping / model.runs)
        return list(space.unflatten(solution.value).values())


def step(model: Perceptrons, direction: list[Tensor], rates: Tensor) -> None:
    """parameter <- parameter - rate * direction, a rate for every run: rates (R,)."""
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), direction, strict=True):
            parameter -= rates[:, None, None] * part


@torch.no_grad()
def losses(model: Perceptrons, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy (R,), share of mistakes (R,), probabilities (b, R, classes)) of every run."""
    logits = model(batch[0])
    labels = batch[1]
    nll = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    wrong = (logits.argmax(-1) != labels).to(nll.dtype)
    return nll.mean(0), wrong.mean(0), logits.softmax(-1)


# The page: the variance per segment (Fig. 3), its ratios, and what comes out of the claims

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
    done = ", ".join(sorted({piece.header["piece"] for piece in findings.finished}))
    waiting = Section("Under way", f"Finished so far: {done}.")
    sections = (_variance(runs, findings), _fairness(runs, findings)) if runs else (waiting,)
    lead = "No seed is finished for every method."
    if runs:
        said = [f"{fmean(ratios(runs, m)):.2f} times with the {names(s)[m]}" for m in ("paper", "small")]
        lead = f"At equal held-out loss the outputs' variance is that of MSGD {' and '.join(said)}."
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
    chosen = slice(None) if segment is None else slice(segment, segment + 1)
    return [fmean(run[method]["variance"][chosen]) / fmean(run["msgd"]["variance"][chosen]) for run in runs]


def fading(numbers: Numbers) -> float:
    """Variance of the first three segments over that of the last three: above 1, early examples weigh more."""
    variance = numbers["variance"]
    few = min(3, len(variance))
    return fmean(variance[:few]) / fmean(variance[-few:])


def shows(values: Sequence[float], margin: float = 0.0) -> str:
    """Whether ratios that a claim says to be above 1 are: by the mean logarithm, its error, and a margin of it."""
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
    near = sorted(matched["tried"], key=lambda point: abs(math.log(point[0] / matched["rate"])))[:2]
    (rate, loss), (other, there) = near
    return 2 * tolerance / max(abs(math.log(there / loss) / math.log(other / rate)), 1e-3)


def spread(values: Sequence[float]) -> tuple[str, str]:
    """Mean, and in small type the range over seeds."""
    among = f"{short(min(values))} – {short(max(values))}" if len(values) > 1 else ""
    return short(fmean(values)), among


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
    def draw(axes: Axes) -> None:
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
        axes.grid(visible=True, axis="y", which="minor")
        axes.set_xticks(x)

    axis = {"xlabel": "resampled segment of the first half of the stream", "ylabel": "variance of the outputs"}
    title = f"Networks on MNIST, {' and '.join(called[m] for m in METHODS)}: mean and range of {len(runs)} seeds"
    return fill_axes(draw, axis, title, len(METHODS))


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


QUICK = {"side": 7, "hidden": 20, "batch": 32, "segments": 4, "runs": 3, "held_out": 500, "tolerance": 0.1, "seeds": 2}
PAPER = {"hidden": 500, "batch": 512, "steps": 3193, "rate": 0.1, "side": 28, "data": "omniglot"}
STUDY = Experiment(
    "pascanu_2013_order",
    "How much each part of a stream shapes the model (Fig. 3; needs MNIST)",
    OrderSettings,
    pieces,
    tell,
    minutes=15,
    quick=QUICK,
    paper=PAPER,
)
