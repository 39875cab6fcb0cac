"""Ratio matching and score matching where the truth is known, and a Boltzmann machine on binary images.

Three parts: a machine of a few spins learnt from its exact distribution; the precision of a Gauss-Markov field, whose
optimum is known in closed form; and couplings between all pixels of handwritten digits, by seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import natgrad as ng
from natgrad.applications.gauss_markov import lattice
from natgrad.ground.linalg import eigh
from natgrad.ground.spaces import Space
from natgrad_lab.energies import boltzmann_page
from natgrad_lab.energies.boltzmann_exact import LOSSES, ExactMachine, descend, natural, path
from natgrad_lab.energies.boltzmann_images import CONTESTANTS, EnergyContestant, draws, images, train
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Numbers, Piece, PieceRun
from natgrad_lab.experiments.settings import check_counts, check_positive

SCALES = (0.3, 0.6, 1.0)
RATES = tuple(2.0**power for power in range(-6, 4))  # of gradient descent; 8 diverges for every loss and scale
PARTS = ("exact", "field", "images")
FLOORS = (1.0, 0.1, 0.01, 0.001)  # the lowest eigenvalue of the field's precision


@dataclass(frozen=True)
class BoltzmannRatioSettings:
    """What `--set` can change. In full size: data=mnist seconds=120."""

    units: int = 6  # of the machine that is learnt from its exact distribution
    more: int = 12  # units of a larger one, for the natural gradient alone; 20 takes an hour
    goal: float = 1e-4  # KL in nats that ends a run
    steps: int = 20_000  # of gradient descent, at most
    field: int = 8  # the field is a lattice of field x field
    examples: int = 5000  # drawn from the field
    data: str = "digits"  # or mnist: 784 pixels, 307,720 parameters
    batch: int = 500  # images per step
    seconds: float = 6.0  # of training per run on images, processor time
    tuning: float = 0.4  # the part of it that a choice of rate gets
    looked_at: int = 2000  # test images
    sweeps: int = 200  # of Gibbs sampling, for the pictures
    parts: str = "exact,field,images"  # what is done, comma-separated
    methods: str = "all"  # or names of contestants on images, semicolons between
    tuning_seed: int = 100
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 2 <= self.units <= 10 or not 2 <= self.more <= 20:
            raise LabError(f"units is {self.units} and more {self.more}, expected 2 to 10 and 2 to 20")
        check_counts(self, "steps", "examples", "batch", "looked_at", "sweeps")
        check_positive(self, "goal", "seconds")
        if self.field < 2:
            raise LabError(f"field is {self.field}, expected at least 2")
        if not 0 < self.tuning <= 1:
            raise LabError(f"tuning is {self.tuning}, expected a part of the seconds, above 0 and at most 1")
        if self.data not in ("digits", "mnist"):
            raise LabError(f"data is {self.data!r}, expected digits or mnist")
        if not set(self.parts.split(",")) <= set(PARTS):
            raise LabError(f"parts is {self.parts!r}, expected some of {', '.join(PARTS)}, comma-separated")
        self.contestants()

    def contestants(self) -> dict[str, EnergyContestant]:
        """Who runs on images."""
        if self.methods == "all":
            return CONTESTANTS
        names = self.methods.split(";")
        if not set(names) <= set(CONTESTANTS):
            raise LabError(f"methods is {self.methods!r}, expected some of {'; '.join(CONTESTANTS)}")
        return {name: CONTESTANTS[name] for name in names}


def exact(run: PieceRun) -> Numbers:
    """For every scale and loss: KL after each natural step, and how many steps gradient descent takes."""
    s: BoltzmannRatioSettings = run.settings
    found: Numbers = {}
    for place, scale in enumerate(SCALES):
        known = ExactMachine(s.units, scale, run.seed)
        found[f"{scale:g}"] = {}
        for number, loss in enumerate(LOSSES):
            begun = (len(LOSSES) * place + number) / (len(SCALES) * len(LOSSES))
            found[f"{scale:g}"][loss] = compare_directions(run, known, loss, begun)
    return found


def compare_directions(run: PieceRun, known: ExactMachine, loss: str, begun: float) -> Numbers:
    """Both directions on one loss; gradient descent at the best of ten rates."""
    s: BoltzmannRatioSettings = run.settings
    rates = torch.tensor(RATES, dtype=torch.float64)
    taken = descend(known, loss, rates, s.goal, s.steps, lambda: run.advance(begun))
    reached = [(count, rate) for count, rate in zip(taken, RATES, strict=True) if count is not None]
    count, rate = min(reached, default=(None, None))
    return {
        "natural": natural(known, loss, s.goal, 100),
        "descent": count,
        "rate": rate,
        "path": [] if rate is None or count is None else path(known, loss, rate, count),
    }


def larger(run: PieceRun) -> Numbers:
    """Natural steps of ratio matching on a larger machine, couplings scaled to drive each unit as strongly."""
    s: BoltzmannRatioSettings = run.settings
    found: Numbers = {}
    for place, scale in enumerate(SCALES):
        run.advance(place / len(SCALES))
        known = ExactMachine(s.more, scale * math.sqrt(s.units / s.more), run.seed)
        found[f"{scale:g}"] = natural(known, "ratio matching", s.goal, 100)
    return found


def field(run: PieceRun) -> Numbers:
    """Precision recovery on a lattice: one natural step, and steps of gradient descent at its best rate."""
    return {f"{floor:g}": recover_optimum(run, floor, place / len(FLOORS)) for place, floor in enumerate(FLOORS)}


def recover_optimum(run: PieceRun, floor: float, begun: float) -> Numbers:
    """From the identity to the optimum; distances are relative to the optimum's length."""
    s: BoltzmannRatioSettings = run.settings
    model = ng.GaussMarkov(s.field**2, lattice(s.field, s.field))
    truth = laplacian(model, floor)
    x = model.condense(model.sample(truth, s.examples, generator=torch.Generator().manual_seed(run.seed)))
    space, params = Space(truth), model.parameters(torch.eye(model.size, dtype=torch.float64))
    best = space.flatten(model.fit(x)).detach()
    metric = ng.score_metric(model).at(params, x)
    loss = ng.score_matching_loss(model, params, x)
    gradient = space.flatten(dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)))
    begin = space.flatten(params).detach()
    end = begin - ng.natural_gradient(metric, gradient).value
    curvature = metric.dense()
    low, high = eigh(curvature)[0][[0, -1]].tolist()
    steps = descent(run, curvature, begin - best, 2 / (low + high), 1e-3 * float(best.norm()), begun)
    return {
        "condition": high / low,
        "natural": float((end - best).norm() / best.norm()),
        "descent": steps,
        "truth": float((best - space.flatten(truth).detach()).norm() / best.norm()),
    }


def laplacian(model: ng.GaussMarkov, floor: float) -> dict[str, Tensor]:
    """Every edge at -1, the diagonal so large that the lowest eigenvalue is `floor`, for the constant vector."""
    first, second = torch.tensor(model.edges).T
    matrix = torch.zeros(model.size, model.size, dtype=torch.float64)
    matrix[first, second] = matrix[second, first] = -1.0
    return model.parameters(torch.diag(floor - matrix.sum(1)) + matrix)


def descent(run: PieceRun, curvature: Tensor, error: Tensor, rate: float, close: float, begun: float) -> int | None:
    """Steps of gradient descent on a quadratic until the error is that short; None if that takes over a million."""
    for step in range(1, 1_000_001):
        error = error - rate * (curvature @ error)
        if step % 1000 == 0:
            run.advance(begun)
        if float(error.norm()) <= close:
            return step
    return None


def choice(run: PieceRun) -> Numbers:
    """Every contestant's best rate, by its own loss on the last training images after a part of the seconds."""
    s: BoltzmannRatioSettings = run.settings
    apart = images(s.data, s.looked_at).hold_out()
    found: Numbers = {}
    among = s.contestants()
    for place, (name, one) in enumerate(among.items()):
        found[name] = {}
        for number, rate in enumerate(one.rates):
            run.advance((place + number / len(one.rates)) / len(among))
            *_, last = train(one, rate, apart, s.batch, s.tuning * s.seconds, s.tuning_seed, 1)
            found[name][str(rate)] = last[one.loss]
    return found


def best(tried: Numbers) -> float:
    """The rate with the lowest loss; not finite counts as worst."""
    losses = {
        float(rate): math.inf if loss is None or not math.isfinite(loss) else loss for rate, loss in tried.items()
    }
    return min(losses, key=lambda rate: losses[rate])


def race(run: PieceRun) -> Numbers:
    """Test losses over seconds of every contestant at its rate, and draws from what it has learnt."""
    s: BoltzmannRatioSettings = run.settings
    shown, found = images(s.data, s.looked_at), {}
    among = s.contestants()
    for place, (name, one) in enumerate(among.items()):
        points: list[Numbers] = []
        for point in train(one, best(run.earlier["choice"][name]), shown, s.batch, s.seconds, run.seed):
            run.advance((place + min(0.99, point["seconds"] / s.seconds)) / len(among))
            points.append(point)
        params = points[-1].pop("params")
        found[name] = {"points": points, "draws": draws(params, shown, 8, s.sweeps)}
    return {"side": shown.side, "contestants": found, "real": shown.test[:: len(shown.test) // 8][:8].int().tolist()}


def pieces(settings: BoltzmannRatioSettings) -> tuple[Piece, ...]:
    """The exact machines, the field, and the images: first the rates, then the race."""
    of = {
        "exact": (
            Piece("exact", f"{settings.units} spins, exact", exact),
            Piece("larger", f"{settings.more} spins, exact", larger),
        ),
        "field": (Piece("field", "Gauss-Markov field", field),),
        "images": (Piece("choice", "Rates on images", choice, repeated=False), Piece("race", "Images", race)),
    }
    return tuple(piece for part in PARTS if part in settings.parts.split(",") for piece in of[part])


STUDY = Experiment(
    "boltzmann_ratio",
    "Boltzmann machines by ratio matching and a Gauss-Markov field: exact, then on digits",
    BoltzmannRatioSettings,
    pieces,
    boltzmann_page.tell,
    seeds=3,
    minutes=3,
    quick={"seeds": 1, "seconds": 1.5, "more": 8},
)
