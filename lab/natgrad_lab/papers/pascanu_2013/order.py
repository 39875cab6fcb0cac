"""How much each part of an online stream shapes the model: Pascanu & Bengio 2013, section 6 and Fig. 3.

The first half of the stream is cut into ten segments. For each of them five runs see five other draws of that segment
and the same rest. The variance of the outputs on held-out images at the end, over the five runs, is how much the
segment matters. All 50 runs of a method are one model with a leading axis (`parallel.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

import natgrad as ng
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Numbers, Piece, PieceRun
from natgrad_lab.papers.pascanu_2013 import order_page
from natgrad_lab.papers.pascanu_2013.deformed import SOURCES, ImageSource, Stream
from natgrad_lab.papers.pascanu_2013.parallel import (
    Batch,
    Direction,
    NaturalDirection,
    Perceptrons,
    gradient,
    losses,
    step,
)


@dataclass(frozen=True)
class OrderSettings:
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
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.data not in SOURCES:
            raise LabError(f"data is {self.data!r}, expected {' or '.join(SOURCES)}")
        for name in ("side", "hidden", "batch", "segments", "steps", "held_out", "products"):
            if getattr(self, name) < 1:
                raise LabError(f"{name} is {getattr(self, name)}, expected a positive number")
        for name in ("rate", "damping", "small_damping", "tolerance"):
            if not getattr(self, name) > 0:
                raise LabError(f"{name} is {getattr(self, name)}, expected a positive number")
        if not 2 <= self.runs <= 15:
            raise LabError(f"runs is {self.runs}, expected 2 to 15: a variance needs two")
        if self.total > 65_536:
            raise LabError(f"steps is {self.steps}, expected at most {32_768 // self.segments} with these segments")

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
    drawn_from: ImageSource
    seeds: list[int]
    draws: Draw
    rates: Tensor  # (R,)

    def __post_init__(self) -> None:
        s = self.settings
        self.streams = {seed: Stream(self.drawn_from, s.batch, s.side, seed) for seed in set(self.seeds)}
        self.model = Perceptrons(self.seeds, s.side**2, s.hidden, self.drawn_from.classes)

    def run(self, direction: Direction, advance: Callable[[float], None]) -> None:
        """Through the whole stream."""
        for number in range(self.settings.total):
            advance(number / self.settings.total)
            step(self.model, direction(self.model, self.batch(number)), self.rates)

    def batch(self, number: int) -> Batch:
        """Batch of that number for every run; what runs have in common is drawn once."""
        asked = self.draws(number)
        found = {which: self.streams[which[0]].batch(number, which[1]) for which in set(asked)}
        return tuple(torch.stack([found[which][part] for which in asked], 1) for part in (0, 1))  # type: ignore[return-value]

    def held_out(self) -> Batch:
        """The held-out images of every run's seed."""
        found = {seed: stream.held_out(self.settings.held_out) for seed, stream in self.streams.items()}
        return tuple(torch.stack([found[seed][part] for seed in self.seeds], 1) for part in (0, 1))  # type: ignore[return-value]


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
    """The rate with which a method ends at the level, by interpolation and new runs around it.

    LabError when no rate tried comes as near as the tolerance.
    """
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
        Piece(
            "paper",
            f"Natural gradient, damping {paper.damping:g}",
            lambda run: measure_direction(run, paper, "rate-paper"),
        ),
        Piece(
            "small",
            f"Natural gradient, damping {small.damping:g}",
            lambda run: measure_direction(run, small, "rate-small"),
        ),
    )


def measure_direction(run: PieceRun, direction: NaturalDirection, matched: str) -> Numbers:
    """The protocol at the rate that was matched."""
    return measure(run, direction, run.earlier[matched]["rate"])


QUICK = {"side": 7, "hidden": 20, "batch": 32, "segments": 4, "runs": 3, "held_out": 500, "tolerance": 0.1, "seeds": 2}
PAPER = {"hidden": 500, "batch": 512, "steps": 3193, "rate": 0.1, "side": 28, "data": "omniglot"}
STUDY = Experiment(
    "pascanu_2013_order",
    "How much each part of a stream shapes the model (Fig. 3; needs MNIST)",
    OrderSettings,
    pieces,
    order_page.tell,
    minutes=15,
    quick=QUICK,
    paper=PAPER,
)
