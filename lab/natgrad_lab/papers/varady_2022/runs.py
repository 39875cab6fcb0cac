"""Varady, Volpi, Malago & Ay 2022: wake-sleep, reweighted and natural, on Helmholtz machines.

Every contestant has the same number of settings. Each is tried from a seed of its own, for `tuning` epochs, and judged
on examples that are held out of training; the best one runs from every seed. The bound on the test examples is log of
the mean importance weight over `evaluation` draws; on the lines it is the exact log-likelihood.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import natgrad as ng
from natgrad.helmholtz import Classic, Reweighted
from natgrad_lab.data import Split, binarized_mnist, digits, fashion_mnist, fer2013
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Numbers, Piece, PieceRun
from natgrad_lab.experiments.settings import (
    StudySettings,
    change_defaults,
    check_counts,
    check_positive,
    check_word,
    split_words,
)
from natgrad_lab.experiments.training import Order, clock
from natgrad_lab.papers.varady_2022 import page

TUNING_SEED = 1000
PICTURES = 12  # images drawn at each look
RECENT = 9  # the mean of the iterates moves by RECENT / (t + RECENT) to the t-th: about the last ninth counts


@dataclass(frozen=True)
class VaradySettings(StudySettings):
    """What `--set` can change."""

    data: str = "digits"  # lines, digits, mnist, fashion or faces
    sizes: str = "32-16"  # of the hidden layers, from the data upwards
    epochs: int = 20  # of a run
    batch: int = 50  # examples per step
    samples: int = 5  # draws of the hidden units per example
    evaluation: int = 100  # draws for the bound; 0: the exact likelihood
    tuning: int = 8  # epochs of a tuning run
    train: int | None = None  # training examples at most; none: all
    test: int | None = None  # test examples at most; none: all
    looks: int = 1  # at the test bound per epoch
    damping: float = 0.03  # of the natural versions
    units: str = "01"  # 01 or signs
    contestants: str = "ws,rws,rws-adam,nws,nrws"  # who runs, comma-separated
    rates: str = ""  # nrws:.5/10,ws:.3/0: .5 / (1 + 10 t / T) and .3, T a run; of several the best; others try four
    averaged: bool = False  # whether the mean of the iterates, with weights 9 / (t + 9), is judged as well

    def __post_init__(self) -> None:
        check_word(self, "data", SETS)
        check_word(self, "units", ("01", "signs"))
        given = [name for name in ("train", "test") if getattr(self, name) is not None]
        check_counts(self, "epochs", "batch", "samples", "tuning", "looks", *given)
        if self.evaluation < 0:
            raise LabError(f"evaluation is {self.evaluation}, expected a number of draws, or 0 for the exact sum")
        check_positive(self, "damping")
        self.hidden_widths()
        self.names()
        self.rules()

    def names(self) -> list[str]:
        """The contestants' names."""
        return split_words("contestants", self.contestants, page.NAMES)

    def rules(self) -> dict[str, list[tuple[float, float]]]:
        """Rates and falls over a whole run of each contestant whose settings are given."""
        rules: dict[str, list[tuple[float, float]]] = {}
        for part in filter(None, self.rates.split(",")):
            name, _, rule = part.strip().partition(":")
            try:
                rate, fall = (float(number) for number in rule.split("/"))
            except ValueError:
                rate, fall = math.nan, math.nan
            if name not in page.NAMES or not (0 < rate < math.inf and 0 <= fall < math.inf):
                known = ", ".join(page.NAMES)
                raise LabError(f"rates is {self.rates}, expected parts such as nrws:.5/10, names among {known}")
            rules.setdefault(name, []).append((rate, fall))
        return rules

    def hidden_widths(self) -> list[int]:
        """The hidden layers' sizes."""
        try:
            sizes = [int(part) for part in self.sizes.split("-")]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1:
            raise LabError(f"sizes is {self.sizes}, expected hidden layers such as 32-16")
        return sizes


@dataclass(frozen=True)
class WakeSleepChoice:
    """A learning rate, and how it falls: rate / (1 + fall * step), or step / steps of a run where it is `by_run`."""

    rate: float
    fall: float
    by_run: bool = False

    def __str__(self) -> str:
        time = "t / T" if self.by_run else "t"
        return f"rate {self.rate:g}" + (f", / (1 + {self.fall:g} {time})" if self.fall else "")

    def find_rate(self, step: int, steps: int) -> float:
        """The rate of one step of a run of `steps`."""
        return self.rate / (1 + self.fall * (step / steps if self.by_run else step))


@dataclass(frozen=True)
class WakeSleepContestant:
    """An algorithm with its settings, for small images and for large ones. build(machine, rate, settings, seed)."""

    name: str
    title: str
    build: Callable[..., ng.WakeSleep]
    small: tuple[WakeSleepChoice, ...]
    large: tuple[WakeSleepChoice, ...]

    def choices(self, settings: VaradySettings) -> tuple[WakeSleepChoice, ...]:
        """The settings that are tried; one that is alone is not."""
        if self.name in (rules := settings.rules()):
            return tuple(WakeSleepChoice(*rule, by_run=True) for rule in rules[self.name])
        return self.small if settings.data in ("lines", "digits") else self.large


def _plain(algorithm: Any) -> Callable[..., ng.WakeSleep]:
    return lambda machine, rate, s, seed: ng.WakeSleep(machine, rate, samples=s.samples, algorithm=algorithm, seed=seed)


def _natural(algorithm: Any) -> Callable[..., ng.WakeSleep]:
    return lambda machine, rate, s, seed: ng.NaturalWakeSleep(
        machine, rate, samples=s.samples, damping=s.damping, algorithm=algorithm, seed=seed
    )


def _adam(machine: ng.HelmholtzMachine, rate: float, settings: VaradySettings, seed: int) -> ng.WakeSleep:
    return ng.WakeSleep(machine, samples=settings.samples, optimizer=lambda p: torch.optim.Adam(p, rate), seed=seed)


def list_choices(*pairs: tuple[float, float]) -> tuple[WakeSleepChoice, ...]:
    """Choices of (rate, fall)."""
    return tuple(WakeSleepChoice(*pair) for pair in pairs)


GRADIENT = list_choices((0.3, 0.0), (1.0, 0.0), (1.0, 0.005), (3.0, 0.005))
NATURAL = list_choices((0.15, 0.0), (0.5, 0.0), (0.5, 0.005), (1.0, 0.02))
ADAM = list_choices((0.01, 0.0), (0.03, 0.0), (0.1, 0.0), (0.1, 0.005))
# each around what was best in runs of 800 steps on MNIST
LARGE_GRADIENT = list_choices((0.1, 0.0), (0.3, 0.0), (0.3, 0.005), (1.0, 0.005))
LARGE_NATURAL = list_choices((0.2, 0.0), (0.5, 0.005), (1.0, 0.01), (1.0, 0.02))
LARGE_ADAM = list_choices((0.003, 0.0), (0.01, 0.0), (0.02, 0.002), (0.03, 0.005))
CONTESTANTS = (
    WakeSleepContestant("ws", "WS", _plain(Classic()), GRADIENT, LARGE_GRADIENT),
    WakeSleepContestant("rws", "RWS", _plain(Reweighted()), GRADIENT, LARGE_GRADIENT),
    WakeSleepContestant("rws-adam", "RWS, Adam", _adam, ADAM, LARGE_ADAM),
    WakeSleepContestant("nws", "NWS", _natural(Classic()), NATURAL, LARGE_NATURAL),
    WakeSleepContestant("nrws", "NRWS", _natural(Reweighted()), NATURAL, LARGE_NATURAL),
)


def pieces(settings: VaradySettings) -> tuple[Piece, ...]:
    """Tuning runs of every contestant that has a choice, then its race."""
    work: list[Piece] = []
    running = [contestant for contestant in CONTESTANTS if contestant.name in settings.names()]
    for contestant in running:
        choices = contestant.choices(settings)
        for i, choice in enumerate(choices if len(choices) > 1 else ()):
            tuning = partial(try_choice, contestant, choice)
            work.append(Piece(f"tune-{contestant.name}-{i}", f"{contestant.title}, {choice}", tuning, repeated=False))
    races = (Piece(f"race-{c.name}", f"{c.title} with its best setting", partial(run_best, c)) for c in running)
    return (*work, *races)


def try_choice(contestant: WakeSleepContestant, choice: WakeSleepChoice, run: PieceRun) -> Numbers:
    """One setting of one contestant, judged on what is held out after a whole run, though a short one."""
    settings = replace(run.settings, epochs=run.settings.tuning, averaged=False)
    training = WakeSleepTraining(settings, contestant, choice, TUNING_SEED)
    for _ in training.epochs(settings.epochs, run):
        if training.trainer.failures:
            break
    return {"choice": str(choice), "valid": training.estimate_bound(training.bits.valid), "seconds": training.seconds}


def run_best(contestant: WakeSleepContestant, run: PieceRun) -> Numbers:
    """The best setting of one contestant from one seed."""
    epochs, choices = run.settings.epochs, contestant.choices(run.settings)
    tuned = [
        run.earlier[f"tune-{contestant.name}-{i}"]["valid"] for i in range(len(choices) if len(choices) > 1 else 0)
    ]
    best = max(range(len(tuned)), key=lambda i: -math.inf if tuned[i] is None else tuned[i], default=0)
    training = WakeSleepTraining(run.settings, contestant, choices[best], run.seed)
    curve, looks = [training.point(0)], []
    for epoch in training.epochs(epochs, run, run.settings.looks):
        curve.append(training.point(epoch))
        if run.seed == 0 and epoch in (1, max(1, round(epochs**0.5)), epochs):
            looks.append({"epoch": round(epoch), "images": training.images()})
    shape = list(training.bits.shape)
    return {"choice": str(training.choice), "curve": curve, "looks": looks, "shape": shape, "steps": training.steps}


class WakeSleepTraining:
    """One machine under training."""

    def __init__(
        self, settings: VaradySettings, contestant: WakeSleepContestant, choice: WakeSleepChoice, seed: int
    ) -> None:
        self.settings, self.choice = settings, choice
        self.bits: BitImages = bits(settings.data, settings.train, settings.test, settings.units == "signs")
        torch.manual_seed(seed)
        width = self.bits.train.shape[1]
        values = (-1, 1) if settings.units == "signs" else (0, 1)
        self.machine = ng.HelmholtzMachine([width, *settings.hidden_widths()], units=values).to(settings.device)
        with torch.no_grad():  # visible biases at the data's log-odds: no contestant spends its first steps on these
            up = ((self.bits.train > 0).float().sum(0) + 1) / (len(self.bits.train) + 2)
            layer: Any = self.machine.generation[0]
            layer.weight[:, -1] = up.logit().to(layer.weight.device)
        self.trainer = contestant.build(self.machine, choice.rate, settings, seed)
        self.order = Order(len(self.bits.train), settings.batch, seed)
        self.steps, self.seconds = 0, 0.0
        self.mean = copy.deepcopy(self.machine) if settings.averaged else None

    def epochs(self, many: int, run: PieceRun, looks: int = 1) -> Iterator[float]:
        """Train, and stop `looks` times per epoch, where the epochs so far are told."""
        for look in range(1, many * looks + 1):
            while self.steps < round(look * self.order.per_epoch / looks):
                self._step()
                run.advance((self.steps / self.order.per_epoch) / many)
            yield look / looks

    def _step(self) -> None:
        start = clock(self.settings.device)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.choice.find_rate(self.steps, self.settings.epochs * self.order.per_epoch)
        rows = self.order.batch(self.steps, "cpu")
        self.trainer.step(self.bits.train[rows].to(self.settings.device))
        if self.mean is not None:  # moves to the newest iterate: the first step takes it there
            share = RECENT / (self.steps + RECENT)
            with torch.no_grad():
                for past, new in zip(self.mean.parameters(), self.machine.parameters(), strict=True):
                    past.lerp_(new, share)
        self.seconds += clock(self.settings.device) - start
        self.steps += 1

    def estimate_bound(self, x: Tensor, machine: ng.HelmholtzMachine | None = None) -> float:
        """Nats per example of a machine, none: the trained one, from the same draws every time."""
        generator = torch.Generator(self.settings.device).manual_seed(0)
        samples = self.settings.evaluation or None
        return float((machine or self.machine).log_likelihood(x.to(self.settings.device), samples, generator).mean())

    def point(self, epoch: float) -> Numbers:
        """One point of the learning curve."""
        numbers: Numbers = {"epoch": epoch, "seconds": self.seconds, "bound": self.estimate_bound(self.bits.test)}
        return numbers if self.mean is None else numbers | {"mean": self.estimate_bound(self.bits.test, self.mean)}

    def images(self) -> list[list[float]]:
        """Probabilities of the visible units in a few dreams."""
        generator = torch.Generator(self.settings.device).manual_seed(1)
        chances = self.machine.sample(PICTURES, generator, means=True)
        return [[round(v, 3) for v in image] for image in chances.tolist()]


# Binary images for Helmholtz machines: lines, digits, clothes, faces

HELD_OUT = 0.1  # share of the training examples that settings are judged on


@dataclass(frozen=True)
class BitImages:
    """Rows of 0 and 1 (or -1 and 1): (n, width) each, and the shape of one image."""

    train: Tensor
    valid: Tensor
    test: Tensor
    shape: tuple[int, int]


def bits(name: str, train: int | None, test: int | None, signs: bool) -> BitImages:
    """A set by name, cut to so many examples."""
    images = SETS[name]()
    scale = (lambda part: 2 * part - 1) if signs else (lambda part: part)
    return BitImages(scale(images.train[:train]), scale(images.valid[:test]), scale(images.test[:test]), images.shape)


def lines() -> BitImages:
    """3 x 3 rows or columns, on or off, neither all nor none: 12 patterns; log p is at most -log 12 = -2.48."""
    rows = [torch.tensor(on).repeat_interleave(3) for on in product((0.0, 1.0), repeat=3) if 0 < sum(on) < 3]
    patterns = torch.stack([*rows, *(row.view(3, 3).mT.flatten() for row in rows)])
    return BitImages(patterns.repeat(50, 1), patterns, patterns, (3, 3))


def _split(split: Split, shape: tuple[int, int]) -> BitImages:
    flat = split.flat()
    train, test = ((x > 0.5).float() for x in (flat.train_x, flat.test_x))
    if flat.valid_x is not None:
        mixed = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))  # published sorted by class
        return BitImages(train, (flat.valid_x > 0.5).float(), test[mixed], shape)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    cut = round(HELD_OUT * len(train))
    return BitImages(train[order[cut:]], train[order[:cut]], test, shape)


def faces() -> BitImages:
    """Faces of FER2013 at half their size, every pixel compared with the median of its image."""
    split = fer2013()

    def small(images: Tensor) -> Tensor:
        halved = torch.nn.functional.avg_pool2d(images.unsqueeze(1), 2).flatten(1)
        return (halved > halved.median(1, keepdim=True).values).float()

    order = torch.randperm(len(split.train_x), generator=torch.Generator().manual_seed(0))
    train = small(split.train_x)[order]
    cut = round(HELD_OUT * len(train))
    return BitImages(train[cut:], train[:cut], small(split.test_x), (24, 24))


SETS: dict[str, Callable[[], BitImages]] = {
    "lines": lines,
    "digits": lambda: _split(digits(), (8, 8)),
    "mnist": lambda: _split(binarized_mnist(), (28, 28)),
    "fashion": lambda: _split(fashion_mnist(), (28, 28)),
    "faces": faces,
}


def study(name: str, summary: str, minutes: float, seeds: int = 5, **defaults: Any) -> Experiment:
    """The study of one data set: the settings' defaults are its own."""
    kind = change_defaults(VaradySettings, **defaults)
    quick = {"seeds": 1, "epochs": 5, "tuning": 2}
    if minutes > 10:
        quick |= {"epochs": 2, "tuning": 1, "train": 2000, "test": 200}
    deep = {"sizes": "300-200-100-75-50-35-25-20-15-10-10"} if name == "mnist" else {}
    return Experiment(
        f"varady_2022_{name}", summary, kind, pieces, page.tell, seeds=seeds, minutes=minutes, quick=quick, paper=deep
    )


LINES = study(
    "lines",
    "wake-sleep, plain and natural, on 3 x 3 lines with the exact likelihood (9-6-1)",
    7,
    data="lines",
    sizes="6-1",
    epochs=50,
    batch=10,
    evaluation=0,
    tuning=25,
)
DIGITS = study("digits", "the same on embedded binarised digits (64-32-16)", 7, data="digits")
LARGE: dict[str, Any] = {
    "sizes": "200-200-10",
    "epochs": 4,
    "batch": 100,
    "evaluation": 20,
    "tuning": 1,
    "test": 1000,
    "looks": 5,
    "damping": 0.3,
}
MNIST = study("mnist", "the same on binarised MNIST (784-200-200-10)", 60, data="mnist", **LARGE)
FASHION = study("fashion", "the same on clothes, binarised (784-200-200-10)", 60, data="fashion", **LARGE)
FACES = study(
    "faces",
    "the same on binarised faces of FER2013, 24 x 24 (576-200-100-10)",
    60,
    data="faces",
    sizes="200-100-10",
    epochs=20,
    batch=50,
    evaluation=50,
    tuning=4,
    test=1000,
    damping=0.3,
)
