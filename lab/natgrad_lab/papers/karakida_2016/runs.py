"""Karakida, Okada & Amari 2016, Table 1 and Fig. 1: a two-layer model by score matching, ten runs side by side.

At the paper's rate: gradient descent, adaptive natural gradient by eq. 4 and exactly. Beside them gradient descent and
Adam at the best of as many rates, and `ng.ang` with nothing tuned. The goal is the paper's: test error below -28.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import natgrad as ng
from natgrad.applications import TwoLayer
from natgrad.ground.spaces import Positive, Square, positive
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.study import Numbers, Piece, Study, StudyRun
from natgrad_lab.papers.karakida_2016 import page
from natgrad_lab.papers.karakida_2016.two_layer_data import count_units, isa, starts
from natgrad_lab.papers.karakida_2016.two_layer_learners import Adam, DescentLearner, Learner, NatgradLearner, Paper

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SQUARE = Square()
RATES = {  # as many for each: the rates that are tried
    "SGD, single": (1e-4, 3e-4, 1e-3, 2e-3, 4e-3),
    "SGD": (1e-3, 3e-3, 1e-2, 2e-2, 4e-2),
    "Adam": (1e-3, 3e-3, 1e-2, 2e-2, 4e-2),
}


@dataclass(frozen=True)
class KarakidaSettings:
    """What `--set` can change. A seed is one set of data with its initial conditions."""

    runs: int = 10  # initial conditions, as in the paper
    examples: int = 5000  # as in the paper
    held_out: int = 5000  # not given in the paper
    level: float = -28.0  # the paper's
    rate: float = 5e-5  # the paper's, for gradient descent and ANG alike
    descent_steps: int = 400_000  # at most, of gradient descent at the paper's rate
    natural_steps: int = 60_000  # at most, of ANG at the paper's rate
    tuned_steps: int = 30_000  # at most, of single examples; a batch gets a tenth
    batch: int = 40  # not in the paper, whose steps see one example each
    our_steps: int = 600  # of ng.ang on batches
    our_single: int = 8000  # of ng.ang on single examples
    every: int = 10  # steps between factorisations, of ng.ang on single examples
    spread: float = 0.3  # standard deviation of W at first; not given in the paper
    pooling: float = 1.0  # V is uniform between 0 and this at first; not given in the paper
    dtype: str = "float32"  # float32 or float64
    square: bool = False  # the exact update with V = v^2 too
    processes: int = 2  # pieces at a time, but for the costs
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("runs", "examples", "held_out", "descent_steps", "natural_steps", "batch", "our_steps", "every"):
            if getattr(self, name) < 1:
                raise LabError(f"{name} is {getattr(self, name)}, expected a positive number")
        if self.tuned_steps < 10 or self.our_single < 10:
            raise LabError("tuned_steps and our_single: expected at least 10")
        for name in ("rate", "spread", "pooling"):
            if not getattr(self, name) > 0:
                raise LabError(f"{name} is {getattr(self, name)}, expected a positive number")
        if self.dtype not in DTYPES:
            raise LabError(f"dtype is {self.dtype!r}, expected {' or '.join(DTYPES)}")


def many(run: StudyRun, link: Positive | Square, times: int = 1) -> dict[str, Tensor]:
    """The initial conditions of this seed, `times` over."""
    s: KarakidaSettings = run.settings
    first = starts(run.seed, s.runs, link, s.spread, s.pooling)
    return {name: p.repeat(times, 1, 1).to(s.device, DTYPES[s.dtype]) for name, p in first.items()}


def learn(run: StudyRun, learner: Learner, steps: int, batch: int, every: int) -> Numbers:
    """Train to the end, or until all reached the level and stayed for as long again; test errors on the way.

    All models see one stream of examples, drawn with replacement. Returns {"steps": [...], "errors": [one list per
    point]}: NaN where a model diverged.
    """
    s: KarakidaSettings = run.settings
    data = isa(run.seed, s.examples + s.held_out).to(s.device, DTYPES[s.dtype])
    train, test = data[: s.examples], data[s.examples :]
    generator = torch.Generator().manual_seed(run.seed)
    models, points, errors, reached = len(learner.params["W"]), [0], [error(learner, test)], None
    for start in range(0, steps, every):
        run.advance(start / steps)
        count = min(every, steps - start)
        drawn = torch.randint(s.examples, (count, batch), generator=generator)
        for indices in drawn:
            learner.step(train[indices].expand(models, -1, -1))
        points.append(start + count)
        errors.append(error(learner, test))
        if reached is None and all(e < s.level for e in errors[-1]):
            reached = points[-1]
        if reached is not None and points[-1] >= 2 * reached:
            break
    return {"steps": points, "errors": errors}


def error(learner: Learner, test: Tensor) -> list[float]:
    """The mean of l over the test examples, for every model."""
    return learner.model.loss(learner.params, test.expand(len(learner.params["W"]), -1, -1)).tolist()


Made = Callable[[StudyRun], Learner]


def descent(run: StudyRun) -> Learner:
    """Gradient descent as the paper has it, with V = v^2, which suits it best."""
    return DescentLearner(TwoLayer(SQUARE), many(run, SQUARE), run.settings.rate)


def first_order(run: StudyRun) -> Learner:
    """Eq. 4, eps = 1 / (t + 100)."""
    return Paper(TwoLayer(), many(run, positive), run.settings.rate, ng.FirstOrder())


def exact(run: StudyRun) -> Learner:
    """The exact update, eps = 1 / (t + 30)."""
    return Paper(TwoLayer(), many(run, positive), run.settings.rate, ng.Woodbury())


def exact_square(run: StudyRun) -> Learner:
    """The exact update with V = v^2."""
    return Paper(TwoLayer(SQUARE), many(run, SQUARE), run.settings.rate, ng.Woodbury())


def ours(run: StudyRun) -> Learner:
    """ng.ang."""
    return NatgradLearner(TwoLayer(), many(run, positive))


def ours_single(run: StudyRun) -> Learner:
    """ng.ang on single examples."""
    return NatgradLearner(TwoLayer(), many(run, positive), method=replace(ng.Averaged(), every=run.settings.every))


def run_learner(made: Made, steps: str, batch: str | None, points: int) -> Callable[[StudyRun], Numbers]:
    """A piece of work: one learner, so many steps, test errors at so many points."""

    def work(run: StudyRun) -> Numbers:
        total = getattr(run.settings, steps)
        size = 1 if batch is None else getattr(run.settings, batch)
        learner = made(run)
        with torch.inference_mode():
            found = learn(run, learner, total, size, max(total // points, 1))
        units = count_units(learner.params, learner.model.link, run.seed)
        return found | {"batch": size, "refused": getattr(learner, "refused", 0), "units": units}

    return work


def choose_rate(kind: str) -> Callable[[StudyRun], Numbers]:
    """A piece of work: all rates at once, and the one that most models reach the level with, then soonest."""

    def work(run: StudyRun) -> Numbers:
        s: KarakidaSettings = run.settings
        rates, single = RATES[kind], kind.endswith("single")
        each = torch.tensor(rates, dtype=DTYPES[s.dtype], device=s.device).repeat_interleave(s.runs).view(-1, 1, 1)
        link: Positive | Square = SQUARE if kind.startswith("SGD") else positive
        learner = (DescentLearner if kind.startswith("SGD") else Adam)(
            TwoLayer(link), many(run, link, len(rates)), each
        )
        steps = s.tuned_steps if single else s.tuned_steps // 10
        with torch.inference_mode():
            whole = learn(run, learner, steps, 1 if single else s.batch, max(steps // 60, 1))
        found = [of_models(whole, n * s.runs, (n + 1) * s.runs) for n in range(len(rates))]
        best = min(range(len(rates)), key=lambda n: rank(found[n], s.level))
        tried = {f"{rate:g}": list(rank(one, s.level)) for rate, one in zip(rates, found, strict=True)}
        return found[best] | {"rate": rates[best], "tried": tried, "batch": 1 if single else s.batch}

    return work


def of_models(found: Numbers, start: int, stop: int) -> Numbers:
    """The errors of some of the models."""
    return {"steps": found["steps"], "errors": [point[start:stop] for point in found["errors"]]}


def rank(found: Numbers, level: float) -> tuple[int, float, float]:
    """How many models missed the level, the mean steps of those that reached it, the mean error at the end."""
    reached = page.find_first_steps(found, level)
    steps = [one for one in reached if one is not None]
    last = [e if math.isfinite(e) else math.inf for e in found["errors"][-1]]
    return len(reached) - len(steps), statistics.mean(steps) if steps else math.inf, statistics.mean(last)


def cost(run: StudyRun) -> Numbers:
    """Seconds per step of every method, all models at once; medians over rounds in which they take turns."""
    s: KarakidaSettings = run.settings
    data = isa(run.seed, s.examples).to(s.device, DTYPES[s.dtype])
    rates = torch.full((s.runs, 1, 1), 1e-6, dtype=DTYPES[s.dtype])
    learners: dict[str, tuple[Learner, int, int]] = {
        "SGD, single": (descent(run), 1, 40),
        "eq. 4": (first_order(run), 1, 40),
        "exact": (exact(run), 1, 40),
        "ours, single": (ours_single(run), 1, 40),
        "SGD": (descent(run), s.batch, 8),
        "Adam": (Adam(TwoLayer(), many(run, positive), rates), s.batch, 8),
        "ours": (ours(run), s.batch, 8),
    }
    taken: dict[str, list[float]] = {name: [] for name in learners}
    generator = torch.Generator().manual_seed(run.seed)
    rounds = 25
    with torch.inference_mode():
        for number in range(rounds):
            run.advance(number / rounds)
            for name, (learner, batch, steps) in learners.items():
                drawn = data[torch.randint(s.examples, (steps, batch), generator=generator)]
                begun = time.perf_counter()
                for examples in drawn:
                    learner.step(examples.expand(s.runs, -1, -1))
                taken[name].append((time.perf_counter() - begun) / steps)
    return {name: statistics.median(all_[5:]) for name, all_ in taken.items()} | {"rounds": rounds - 5}


def beside_others(name: str, title: str, work: Callable[[StudyRun], Numbers]) -> Piece:
    """A piece that needs no other."""
    return Piece(name, title, work, independent=True)


PRINTED = (
    beside_others("sgd", "SGD at the paper's rate", run_learner(descent, "descent_steps", None, 150)),
    beside_others("eq4", "ANG, eq. 4, at the paper's rate", run_learner(first_order, "natural_steps", None, 90)),
    beside_others("exact", "ANG, exact, at the paper's rate", run_learner(exact, "natural_steps", None, 90)),
)


def table1_pieces(settings: KarakidaSettings) -> tuple[Piece, ...]:
    """The longest first, beside one another; the costs last, while nothing else runs."""
    square = beside_others("exact-square", "ANG, exact, V = v²", run_learner(exact_square, "natural_steps", None, 90))
    return (
        *PRINTED,
        *((square,) if settings.square else ()),
        beside_others("tuned-adam", "Adam, tuned", choose_rate("Adam")),
        beside_others("tuned-sgd", "SGD, tuned", choose_rate("SGD")),
        beside_others("tuned-sgd-single", "SGD, tuned, single examples", choose_rate("SGD, single")),
        beside_others("ours-single", "ng.ang, single examples", run_learner(ours_single, "our_single", None, 80)),
        beside_others("ours", "ng.ang, batches", run_learner(ours, "our_steps", "batch", 60)),
        Piece("cost", "Seconds per step", cost, False),
    )


def figure1_pieces(settings: KarakidaSettings) -> tuple[Piece, ...]:
    """The paper's two curves, the exact update, and ours."""
    ours_too = beside_others("ours-single", "ng.ang, single examples", run_learner(ours_single, "our_single", None, 80))
    return (*PRINTED, ours_too)


TABLE1 = Study(
    "karakida_2016_table1",
    "Natural gradient of score matching against SGD and Adam, plain and tuned (Table 1)",
    KarakidaSettings,
    table1_pieces,
    page.table1,
    seeds=1,
)

FIGURE1 = Study(
    "karakida_2016_figure1",
    "Natural gradient of score matching leaves the plateau (Fig. 1)",
    KarakidaSettings,
    figure1_pieces,
    page.figure1,
    seeds=1,
)
