"""Why draws of a Boltzmann machine of all pixels have too little or too much ink, and machines whose draws are digits.

The first part fits the fully visible machine by pseudo-likelihood, follows the ink of Gibbs chains that start at digits
and at noise, and goes on by maximum likelihood with persistent chains. The second part trains machines with a layer of
hidden bits, along the plain and the natural gradient, on equal seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import natgrad as ng
from natgrad.energies import PersistentLikelihood, RestrictedBoltzmann
from natgrad.ground.linalg import require_inverse
from natgrad_lab.energies.boltzmann_images import CONTESTANTS, SETS, Images, draw_noise, find_log_odds, images, train
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive, check_word
from natgrad_lab.figures import fill_lines, fill_strips, take_columns

PLAIN, NATURAL = "plain gradient", "natural gradient"
LIKELIHOOD = "maximum likelihood"
METHOD = (
    "Boltzmann machines on binary images. All pairs of pixels: fits by pseudo-likelihood and by ratio matching, then "
    "maximum likelihood with persistent chains that start at digits, from the first fit. Hidden bits: persistent "
    "chains from noise, a sweep per step, visible biases started at the pixels' log-odds, the best of three rates per "
    "direction on held-out images; log p by annealed importance sampling. Natural steps take the joint Fisher matrix "
    "as if both layers were independent. Ink is the number of dark pixels. Fresh draws start from noise with every "
    "pixel's own mean. Seconds are of processor time on one thread, of the steps alone."
)

SHOWN = 12  # draws in a row of a picture
FITS = {"pseudo-likelihood, SGD": 0.3, "ratio matching, natural": 0.6}
"""Losses of the fully visible machine and the rates that `boltzmann_ratio` chooses on MNIST."""
RATES = {PLAIN: (0.1, 0.3, 1.0), NATURAL: (0.01, 0.03, 0.1)}


@dataclass(frozen=True)
class BoltzmannDigitsSettings(StudySettings):
    """What `--set` can change."""

    data: str = "mnist"  # or digits: 64 pixels
    fit: float = 6.0  # seconds of each fit of the fully visible machine, processor time
    likelihood: float = 10.0  # seconds of maximum likelihood after the first fit
    hidden: int = 200  # hidden bits of the second part
    seconds: float = 8.0  # of training per run of the second part
    tuning: float = 0.4  # the part of it that a choice of rate gets
    batch: int = 100  # images per step; the fits take 1000
    chains: int = 100  # Gibbs chains of the first part
    damping: float = 1.0  # of the natural steps, in units of the mean variance
    sweeps: int = 100  # of Gibbs sampling, for fresh draws
    levels: int = 500  # of annealed importance sampling
    looked_at: int = 1000  # test images
    tuning_seed: int = 100

    def __post_init__(self) -> None:
        check_word(self, "data", SETS)
        check_counts(self, "hidden", "batch", "chains", "sweeps", "levels", "looked_at", least=2)
        check_positive(self, "fit", "likelihood", "seconds", "tuning", "damping")


def visible(run: PieceRun) -> Numbers:
    """Ink of chains of both fits, and of the machine after maximum likelihood; draws."""
    s: BoltzmannDigitsSettings = run.settings
    shown = images(s.data, s.looked_at)
    machine = ng.Boltzmann(shown.side**2)
    numbers: Numbers = {"data": write_ink(shown.test), "real": list_images(shown.test), "side": shown.side}
    fitted = {}
    for place, (name, rate) in enumerate(FITS.items()):
        for point in train(CONTESTANTS[name], rate, shown, 1000, s.fit, run.seed):
            run.advance((place + min(point["seconds"] / s.fit, 0.9)) / 4)
            fitted[name] = point.get("params")
        numbers[name] = follow_ink(run, machine, fitted[name], shown)
    params, chains = raise_likelihood(run, machine, fitted[next(iter(FITS))], shown)
    numbers[LIKELIHOOD] = {"kept": write_ink(chains), "kept draws": list_images(chains)}
    numbers[LIKELIHOOD] |= follow_ink(run, machine, params, shown)
    return numbers


def follow_ink(run: PieceRun, machine: ng.Boltzmann, params: dict[str, Tensor], shown: Images) -> Numbers:
    """Mean and deviation of the number of dark pixels after 1, 3, 10 ... sweeps from digits and from noise."""
    s: BoltzmannDigitsSettings = run.settings
    generator = torch.Generator().manual_seed(run.seed)
    ink: Numbers = {}
    for name, x in (("digits", shown.test[: s.chains]), ("noise", draw_noise(shown, s.chains, generator))):
        done, ink[name] = 0, []
        for upto in [*(n for n in (1, 3, 10, 30, 100, 300, 1000) if n < s.sweeps), s.sweeps]:
            run.advance(0.75)
            x, done = machine.gibbs(params, x, sweeps=upto - done, generator=generator), upto
            ink[name].append([upto, *write_ink(x)])
        ink[f"{name} draws"] = list_images(x)
    return ink


def raise_likelihood(
    run: PieceRun, machine: ng.Boltzmann, params: dict[str, Tensor], shown: Images
) -> tuple[dict[str, Tensor], Tensor]:
    """Natural steps of maximum likelihood on all pairs of pixels, chains started at digits; the chains too."""
    # the Fisher matrix of centred pairs as that of a normal with the data's covariance C: C D C = S, off the diagonal
    s: BoltzmannDigitsSettings = run.settings
    generator = torch.Generator().manual_seed(run.seed)
    params = {name: p.detach().clone() for name, p in params.items()}
    chains, mean = shown.train[: 5 * s.chains], shown.train.mean(0)
    second = shown.train.mT @ shown.train / len(shown.train)
    covariance = second - torch.outer(mean, mean)
    covariance.diagonal().add_(LIKELIHOOD_DAMPING * covariance.diagonal().mean())
    inverse = require_inverse(covariance, "the pixels' covariance has no inverse")
    spent = 0.0
    while spent < s.likelihood:
        run.advance(0.5 + 0.25 * spent / s.likelihood)
        began = time.process_time()
        rate = LIKELIHOOD_RATE * (1 - spent / s.likelihood)
        chains = machine.gibbs(params, chains, generator=generator)
        drawn = chains.mean(0)
        gap = chains.mT @ chains / len(chains) - second
        gap -= torch.outer(drawn - mean, mean) + torch.outer(mean, drawn - mean)
        step = (inverse @ gap.fill_diagonal_(0.0) @ inverse).fill_diagonal_(0.0)
        params["J"] -= rate * machine.pairs(step)
        params["h"] -= rate * (inverse @ (drawn - mean) - step @ mean)
        spent += time.process_time() - began
    return params, chains


LIKELIHOOD_RATE, LIKELIHOOD_DAMPING = 0.003, 0.3
"""Of the natural steps on all pairs; the damping in units of the mean variance. Not tuned."""


class HiddenRun(NamedTuple):
    """What a run of the second part ends with."""

    curve: list[list[float]]  # seconds, steps, log-likelihood, its error
    params: dict[str, Tensor]
    chains: Tensor


def learn(
    s: BoltzmannDigitsSettings,
    name: str,
    rate: float,
    shown: Images,
    seconds: float,
    seed: int,
    looks: int,
    advance: Callable[[float], None],
) -> HiddenRun:
    """Persistent chains from noise; the rate falls in a line to a fiftieth over the seconds of the steps alone."""
    machine, generator = RestrictedBoltzmann(shown.side**2, s.hidden), torch.Generator().manual_seed(seed)
    params, base = machine.parameters(generator=generator), find_log_odds(shown.train)
    with torch.no_grad():
        params["b"].copy_(base)
    trainer = PersistentLikelihood(
        machine,
        params,
        draw_noise(shown, s.chains, generator),
        rate,
        natural=name == NATURAL,
        damping=s.damping,
        generator=generator,
    )
    spent, steps, curve = 0.0, 0, []
    while True:
        if spent >= seconds * (len(curve) + 1) / looks:
            curve.append([spent, float(steps), *measure_likelihood(s, machine, params, base, shown.test)])
            if spent >= seconds:
                return HiddenRun(curve, params, trainer.chains)
        advance(spent / seconds)
        began = time.process_time()
        trainer.lr = rate * max(0.02, 1 - spent / seconds)
        trainer.step(shown.train[torch.randint(len(shown.train), (s.batch,), generator=generator)])
        spent, steps = spent + time.process_time() - began, steps + 1


def measure_likelihood(
    s: BoltzmannDigitsSettings, machine: RestrictedBoltzmann, params: dict[str, Tensor], base: Tensor, x: Tensor
) -> tuple[float, float]:
    """log p of images in nats, by annealed importance sampling, and the error of its constant."""
    if not all(bool(p.isfinite().all()) for p in params.values()):
        return -math.inf, math.inf
    generator = torch.Generator().manual_seed(0)
    constant, error = machine.estimate_log_partition(
        params, base, levels=s.levels, chains=s.chains, generator=generator
    )
    with torch.no_grad():
        return float(machine.log_p(params, x).mean() - constant), float(error)


def choice(run: PieceRun) -> Numbers:
    """log p of training images that are held out, for each rate."""
    s: BoltzmannDigitsSettings = run.settings
    held = images(s.data, s.looked_at).hold_out()
    ends: Numbers = {}
    for place, (name, rates) in enumerate(RATES.items()):
        ends[name] = {}
        for number, rate in enumerate(rates):
            begun = (place + number / len(rates)) / len(RATES)
            end = learn(s, name, rate, held, s.tuning * s.seconds, s.tuning_seed, 1, lambda _, b=begun: run.advance(b))
            ends[name][str(rate)] = end.curve[-1][2]
    return ends


def race(run: PieceRun) -> Numbers:
    """Both directions at their best rates: likelihood over seconds, states of the chains, fresh draws."""
    s: BoltzmannDigitsSettings = run.settings
    shown, runs = images(s.data, s.looked_at), {}
    for place, name in enumerate(RATES):
        tried = run.earlier["choice"][name]
        rate = max(tried, key=lambda r, t=tried: -math.inf if t[r] is None else t[r])
        end = learn(
            s, name, float(rate), shown, s.seconds, run.seed, 4, lambda f, p=place: run.advance((p + 0.9 * f) / 2)
        )
        generator = torch.Generator().manual_seed(run.seed)
        machine = RestrictedBoltzmann(shown.side**2, s.hidden)
        fresh = machine.gibbs(end.params, draw_noise(shown, s.chains, generator), sweeps=s.sweeps, generator=generator)
        runs[name] = {
            "rate": float(rate),
            "curve": end.curve,
            "ink": write_ink(fresh),
            "fresh draws": list_images(fresh),
            "kept draws": list_images(end.chains),
        }
    return {"side": shown.side, "real": list_images(shown.test), "data": write_ink(shown.test), "runs": runs}


def write_ink(x: Tensor) -> list[float]:
    """Mean and deviation of the number of dark pixels."""
    return [x.sum(1).mean().item(), x.sum(1).std().item()]


def list_images(x: Tensor) -> list[list[int]]:
    """Some rows, evenly spaced."""
    return x[:: max(1, len(x) // SHOWN)][:SHOWN].int().tolist()


def tell(findings: Findings) -> Story:
    """Sections for the parts that are finished."""
    sections = []
    if visibles := findings.of("visible"):
        sections.append(_visible(visibles[0]))
    if runs := findings.of("race"):
        sections.append(_hidden(runs))
    lead = sections[-1].verdict if sections else "Nothing is finished yet."
    return Story("Draws of Boltzmann machines", lead, METHOD, tuple(sections))


def _visible(numbers: Numbers) -> Section:
    fits = {name: fit for name, fit in numbers.items() if isinstance(fit, dict)}
    sweeps = [str(count) for count, *_ in next(iter(fits.values()))["noise"]]
    rows = tuple(
        (f"{name}, from {start}", *(_write_ink(point[1:]) for point in fit[start]))
        for name, fit in fits.items()
        for start in ("digits", "noise")
    )
    note = f"Dark pixels, mean (deviation between images). Test images: {_write_ink(numbers['data'])}."
    table = Table("Ink by sweeps of Gibbs sampling", ("", *sweeps), rows, note)
    said = [f"{name} {fit['noise'][-1][1]:.0f}" for name, fit in fits.items()]
    verdict = f"Ink of draws from noise: {', '.join(said)}; of test images {numbers['data'][0]:.0f}."
    shown: dict[str, Any] = {"test images": numbers["real"]}
    shown |= {f"{name}: chains from noise": fit["noise draws"] for name, fit in fits.items()}
    shown["maximum likelihood: chains that were kept"] = fits[LIKELIHOOD]["kept draws"]
    picture = _draws("visible", "Draws of machines of all pairs of pixels", shown, numbers["side"])
    return Section("All pairs of pixels", verdict, (table,), (picture,))


def _write_ink(pair: list[float]) -> str:
    return f"{pair[0]:.0f} ({pair[1]:.0f})"


def _hidden(runs: list[Numbers]) -> Section:
    names = list(runs[0]["runs"])
    rows = []
    for name in names:
        mine = [run["runs"][name] for run in runs]
        steps, values = ([run["curve"][-1][place] for run in mine] for place in (1, 2))
        likelihood = f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
        ink = f"{median(run['ink'][0] for run in mine):.0f}"
        rows.append((name, f"{mine[0]['rate']:g}", f"{median(steps):,.0f}", likelihood, ink))
    heads = ("", "rate", "steps", "log p of a test image, nats", "ink of fresh draws")
    note = f"Medians over {len(runs)} seeds, ranges in brackets. Ink of test images: {_write_ink(runs[0]['data'])}."
    shown: dict[str, Any] = {"test images": runs[0]["real"]}
    for name in names:
        first = runs[0]["runs"][name]
        shown |= {f"{name}: fresh draws": first["fresh draws"], f"{name}: chains that were kept": first["kept draws"]}
    ends = {name: median(run["runs"][name]["curve"][-1][2] for run in runs) for name in names}
    said = ", ".join(f"{name} {value:.1f}" for name, value in ends.items())
    pictures = (_curves(runs), _draws("hidden", "Draws of machines with hidden bits", shown, runs[0]["side"]))
    return Section("Hidden bits", f"log p in nats: {said}.", (Table("At the end", heads, tuple(rows), note),), pictures)


def _curves(runs: list[Numbers]) -> Picture:
    lines = take_columns({name: [run["runs"][name] for run in runs] for name in runs[0]["runs"]}, 0, 2)
    axis = {"xlabel": "CPU seconds", "ylabel": "log p of a test image, nats"}
    title = f"Machines with hidden bits: a line per seed (of {len(runs)})"
    return Picture("likelihood", "log p over seconds", fill_lines(lines, axis, title), (5.0, 3.9))


def _draws(stem: str, title: str, shown: dict[str, Any], side: int) -> Picture:
    return Picture(f"draws-{stem}", title, fill_strips(shown, side), (8.0, 1.0 * len(shown)))


def pieces(settings: BoltzmannDigitsSettings) -> tuple[Piece, ...]:
    """The visible machine, then the rates and the race of those with hidden bits."""
    return (
        Piece("visible", "All pairs of pixels", visible, repeated=False),
        Piece("choice", "Rates with hidden bits", choice, repeated=False),
        Piece("race", "Hidden bits", race),
    )


STUDY = Experiment(
    "boltzmann_digits",
    "Draws of Boltzmann machines on MNIST: the ink of chains, and hidden bits by maximum likelihood",
    BoltzmannDigitsSettings,
    pieces,
    tell,
    seeds=3,
    minutes=8,
    quick={"seeds": 1, "data": "digits", "fit": 2.0, "likelihood": 3.0, "seconds": 4.0, "hidden": 50},
)
