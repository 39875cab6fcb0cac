"""Karakida, Okada & Amari 2016, Table 1 and Fig. 1: a two-layer model by score matching, ten runs side by side.

At the paper's rate, for both ways to keep V positive and three schedules of eps: gradient descent, adaptive natural
gradient by eq. 4 and exactly. Beside them gradient descent and Adam at the best of as many rates, and `ng.ang` with
nothing tuned. The goal is the paper's: test error below -28.
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
from natgrad.energies import TwoLayer
from natgrad.ground.spaces import Positive, Square, positive
from natgrad_lab.experiments.frame import Experiment, Numbers, Piece, PieceRun
from natgrad_lab.experiments.settings import StudySettings, change_defaults, check_counts, check_positive, check_word
from natgrad_lab.papers.karakida_2016 import page, two_layer
from natgrad_lab.papers.karakida_2016.page import FIGURE1_CELLS, GAP_CELLS, TABLE1_CELLS, PaperCell

DTYPES = {"float32": torch.float32, "float64": torch.float64}
LINKS: dict[str, Positive | Square] = {"square": Square(), "exp": positive}
RATES = {  # as many for each: the rates that are tried
    "SGD, single": (1e-4, 3e-4, 1e-3, 2e-3, 4e-3),
    "SGD": (1e-3, 3e-3, 1e-2, 2e-2, 4e-2),
    "Adam": (1e-3, 3e-3, 1e-2, 2e-2, 4e-2),
}


@dataclass(frozen=True)
class KarakidaSettings(StudySettings):
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
    scale: float = 1.0  # factor on the data; the mixing is not given in the paper
    own_examples: bool = False  # each run draws its own, in place of one stream for all; not given in the paper
    dtype: str = "float32"  # float32 or float64; at the paper's rate V = exp v has float64 always
    processes: int = 2  # pieces at a time, but for the costs
    rounds: int = 25  # of the measurement of costs; a fifth of them come first and do not count

    def __post_init__(self) -> None:
        check_counts(self, "runs", "examples", "held_out", "descent_steps", "natural_steps", "batch", "our_steps")
        check_counts(self, "every", "processes")
        check_counts(self, "tuned_steps", "our_single", least=10)
        check_counts(self, "rounds", least=5)
        check_positive(self, "rate", "spread", "pooling", "scale")
        check_word(self, "dtype", DTYPES)


def many(run: PieceRun, link: Positive | Square, times: int = 1) -> dict[str, Tensor]:
    """The initial conditions of this seed, `times` over."""
    s: KarakidaSettings = run.settings
    first = two_layer.starts(run.seed, s.runs, link, s.spread, s.pooling)
    return {name: p.repeat(times, 1, 1).to(s.device, DTYPES[s.dtype]) for name, p in first.items()}


def learn(run: PieceRun, learner: two_layer.Learner, looks: list[int], batch: int) -> Numbers:
    """Train to the last look, or until all reached the level and stayed for as long again; test errors at the looks.

    Examples are drawn with replacement, one stream for all models unless `own_examples`. Returns {"steps": [...],
    "errors": [one list per point]}: NaN where a model diverged.
    """
    s: KarakidaSettings = run.settings
    data = s.scale * two_layer.isa(run.seed, s.examples + s.held_out).to(s.device, DTYPES[s.dtype])
    train, test = data[: s.examples], data[s.examples :]
    generator = torch.Generator().manual_seed(run.seed)
    models, points, errors, reached = len(learner.params["W"]), [0], [measure_errors(learner, test)], None
    for look in looks:
        run.advance(points[-1] / looks[-1])
        shape = (models, batch) if s.own_examples else (batch,)
        for indices in torch.randint(s.examples, (look - points[-1], *shape), generator=generator):
            learner.step(train[indices].expand(models, -1, -1))
        points.append(look)
        errors.append(measure_errors(learner, test))
        if reached is None and all(e < s.level for e in errors[-1]):
            reached = look
        if not any(math.isfinite(e) for e in errors[-1]) or (reached is not None and look >= 2 * reached):
            break
    return {"steps": points, "errors": errors}


def place_looks(steps: int, number: int) -> list[int]:
    """So many steps, equally far apart, with the last."""
    every = max(steps // number, 1)
    return [*range(every, steps, every), steps]


def spread_looks(steps: int) -> list[int]:
    """Steps each 3 % after the one before, from a thousand (or a hundredth of all) on, with the last."""
    looks = [max(min(1000, steps // 100), 1)]
    while looks[-1] < steps:
        looks.append(min(max(int(1.03 * looks[-1]), looks[-1] + 1), steps))
    return looks


def measure_errors(learner: two_layer.Learner, test: Tensor) -> list[float]:
    """The mean of l over the test examples, for every model, to a thousandth."""
    errors = learner.model.loss(learner.params, test.expand(len(learner.params["W"]), -1, -1))
    return errors.double().round(decimals=3).tolist()


def start_cell(cell: PaperCell, run: PieceRun) -> two_layer.Learner:
    """The learner of a cell at its start."""
    link, rate = LINKS[cell.link], run.settings.rate
    model, params = TwoLayer(link), many(run, link)
    match cell.learner:
        case "sgd":
            return two_layer.DescentLearner(model, params, rate)
        case "eq4":
            return two_layer.Paper(model, params, rate, ng.FirstOrder(offset=cell.offset or 0.0))
        case "exact":
            return two_layer.Paper(model, params, rate, ng.Woodbury(offset=cell.offset or 0.0))
        case "literal":
            return two_layer.Paper(model, params, rate, None)
        case _:
            return two_layer.NatgradLearner(model, params, method=replace(ng.Averaged(), every=run.settings.every))


def run_cell(cell: PaperCell) -> Callable[[PieceRun], Numbers]:
    """A piece of work: test errors, updates that eq. 4 was refused, and the units at the end."""

    def work(run: PieceRun) -> Numbers:
        if cell.start is not None:
            spread, pooling, scale = cell.start
            run = replace(run, settings=replace(run.settings, spread=spread, pooling=pooling, scale=scale))
        if cell.link == "exp":  # in float32, G^-1 loses positivity where units vanish and their slopes with them
            run = replace(run, settings=replace(run.settings, dtype="float64"))
        s: KarakidaSettings = run.settings
        steps = {"sgd": s.descent_steps, "ours-single": s.our_single}.get(cell.learner, s.natural_steps)
        learner = start_cell(cell, run)
        with torch.inference_mode():
            numbers = learn(run, learner, spread_looks(steps), 1)
        units = two_layer.count_units(learner.params, learner.model.link, run.seed)
        return numbers | {"batch": 1, "refused": getattr(learner, "refused", 0), "units": units}

    return work


def ours(run: PieceRun) -> Numbers:
    """ng.ang on batches."""
    s: KarakidaSettings = run.settings
    learner = two_layer.NatgradLearner(TwoLayer(), many(run, positive))
    with torch.inference_mode():
        numbers = learn(run, learner, place_looks(s.our_steps, 60), s.batch)
    return numbers | {"batch": s.batch, "units": two_layer.count_units(learner.params, positive, run.seed)}


def choose_rate(kind: str) -> Callable[[PieceRun], Numbers]:
    """A piece of work: all rates at once, and the one that most models reach the level with, then soonest."""

    def work(run: PieceRun) -> Numbers:
        s: KarakidaSettings = run.settings
        rates, single = RATES[kind], kind.endswith("single")
        each = torch.tensor(rates, dtype=DTYPES[s.dtype], device=s.device).repeat_interleave(s.runs).view(-1, 1, 1)
        link = LINKS["square" if kind.startswith("SGD") else "exp"]
        learner = (two_layer.DescentLearner if kind.startswith("SGD") else two_layer.Adam)(
            TwoLayer(link), many(run, link, len(rates)), each
        )
        steps = s.tuned_steps if single else s.tuned_steps // 10
        with torch.inference_mode():
            together = learn(run, learner, place_looks(steps, 60), 1 if single else s.batch)
        by_rate = [
            {
                "steps": together["steps"],
                "errors": [point[n * s.runs : (n + 1) * s.runs] for point in together["errors"]],
            }
            for n in range(len(rates))
        ]
        best = min(range(len(rates)), key=lambda n: rank(by_rate[n], s.level))
        tried = {f"{rate:g}": list(rank(numbers, s.level)) for rate, numbers in zip(rates, by_rate, strict=True)}
        return by_rate[best] | {"rate": rates[best], "tried": tried, "batch": 1 if single else s.batch}

    return work


def rank(numbers: Numbers, level: float) -> tuple[int, float, float]:
    """How many models missed the level, the mean steps of those that reached it, the mean error at the end."""
    reached = page.find_first_steps(numbers, level)
    steps = [step for step in reached if step is not None]
    last = [e if math.isfinite(e) else math.inf for e in numbers["errors"][-1]]
    return len(reached) - len(steps), statistics.mean(steps) if steps else math.inf, statistics.mean(last)


def cost(run: PieceRun) -> Numbers:
    """Seconds per step of every method, all models at once; medians over rounds in which they take turns."""
    s: KarakidaSettings = run.settings
    data = two_layer.isa(run.seed, s.examples).to(s.device, DTYPES[s.dtype])
    rates = torch.full((s.runs, 1, 1), 1e-6, dtype=DTYPES[s.dtype])
    learners: dict[str, tuple[two_layer.Learner, int, int]] = {
        "SGD, single": (start_cell(PaperCell("sgd", "square"), run), 1, 40),
        "eq. 4": (start_cell(PaperCell("eq4", "square", 100.0), run), 1, 40),
        "exact": (start_cell(PaperCell("exact", "square", 100.0), run), 1, 40),
        "ours, single": (start_cell(PaperCell("ours-single", "square"), run), 1, 40),
        "SGD": (start_cell(PaperCell("sgd", "square"), run), s.batch, 8),
        "Adam": (two_layer.Adam(TwoLayer(), many(run, positive), rates), s.batch, 8),
        "ours": (two_layer.NatgradLearner(TwoLayer(), many(run, positive)), s.batch, 8),
    }
    taken: dict[str, list[float]] = {name: [] for name in learners}
    generator = torch.Generator().manual_seed(run.seed)
    with torch.inference_mode():
        for number in range(s.rounds):
            run.advance(number / s.rounds)
            for name, (learner, batch, steps) in learners.items():
                drawn = data[torch.randint(s.examples, (steps, batch), generator=generator)]
                begun = time.perf_counter()
                for examples in drawn:
                    learner.step(examples.expand(s.runs, -1, -1))
                taken[name].append((time.perf_counter() - begun) / steps)
    first = s.rounds // 5
    return {name: statistics.median(seconds[first:]) for name, seconds in taken.items()} | {"rounds": s.rounds - first}


COST = Piece("cost", "Seconds per step", cost, False)


def make_pieces(cells: tuple[PaperCell, ...]) -> tuple[Piece, ...]:
    """A piece for every cell."""
    return tuple(Piece(cell.name, cell.title, run_cell(cell), independent=True) for cell in cells)


QUICK = {"runs": 3, "descent_steps": 20_000, "natural_steps": 3000, "tuned_steps": 3000, "our_steps": 200}
QUICK |= {"seeds": 1, "our_single": 800}

TABLE1 = Experiment(
    "karakida_2016_table1",
    "Natural gradient of score matching against SGD and Adam, plain and tuned (Table 1)",
    KarakidaSettings,
    lambda settings: (  # the longest first, beside one another; the costs last, while nothing else runs
        *make_pieces(TABLE1_CELLS),
        Piece("tuned-adam", "Adam, tuned", choose_rate("Adam"), independent=True),
        Piece("tuned-sgd", "SGD, tuned", choose_rate("SGD"), independent=True),
        Piece("tuned-sgd-single", "SGD, tuned, single examples", choose_rate("SGD, single"), independent=True),
        Piece("ours", "ng.ang, batches", ours, independent=True),
        COST,
    ),
    page.table1,
    seeds=1,
    minutes=10,
    quick=QUICK,
)

FIGURE1 = Experiment(
    "karakida_2016_figure1",
    "Natural gradient of score matching leaves the plateau (Fig. 1)",
    KarakidaSettings,
    lambda settings: make_pieces(FIGURE1_CELLS),
    page.figure1,
    seeds=1,
    minutes=4,
    quick=QUICK,
)

GAP = Experiment(
    "karakida_2016_gap",
    "Which starts, data and schedule give Table 1's steps: SGD and adaptive natural gradient with V = v²",
    change_defaults(KarakidaSettings, descent_steps=500_000),  # time for gradient descent to end
    lambda settings: (*make_pieces(GAP_CELLS), COST),
    page.gap,
    seeds=3,
    minutes=15,
    quick=QUICK,
)
