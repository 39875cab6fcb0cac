"""Ground states by variational Monte Carlo: stochastic reconfiguration, SPRING, and Adam at its best rate.

Every contestant samples from chains of its own, has the same network and start, and the same budget: steps or CPU
seconds, whichever ends first. Adam's rates are tried from a seed of their own, and the best one runs from every seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

import natgrad as ng
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, change_defaults, check_positive, check_word
from natgrad_lab.figures import INK, fill_axes, look
from natgrad_lab.words import span

vmc = ng.vmc
TUNING_SEED = 1000
LOOKS = 60  # points of a curve at most
NAMES = {"sr": "stochastic reconfiguration", "spring": "SPRING", "adam": "Adam"}
MOMENTA = {"sr": 0.0, "spring": 0.9}


@dataclass(frozen=True)
class GroundStateSettings(StudySettings):
    """What `--set` can change."""

    system: str = "ising"  # ising, helium, H2 or LiH
    spins: int = 10  # of the chain
    samples: int = 400  # per step
    steps: int = 300  # at most
    seconds: float = 600.0  # of one thread of the processor, at most
    draws: int = 100  # of the energy at the end
    rates: str = "0.001,0.003,0.01,0.03"  # of Adam that are tried, comma-separated

    def __post_init__(self) -> None:
        check_word(self, "system", SYSTEMS)
        check_positive(self, "spins", "samples", "steps", "seconds", "draws")
        self.adam_rates()

    def adam_rates(self) -> list[float]:
        """The rates as numbers. LabError for anything else."""
        try:
            return [float(part) for part in self.rates.split(",")]
        except ValueError as error:
            raise LabError(f"rates is {self.rates}, expected numbers such as 0.001,0.01") from error


@dataclass(frozen=True)
class GroundStateProblem:
    """A Hamiltonian with a fresh network, its sampler and what is known of it."""

    hamiltonian: Any
    psi: ng.LogAmplitude
    sampler: ng.vmc.Metropolis
    exact: float
    clip: float | None = None


def build_ising(settings: GroundStateSettings, seed: int) -> GroundStateProblem:
    """The closed chain at its critical field with an RBM; the exact energy by Lanczos."""
    h = vmc.TransverseIsing(settings.spins, field=1.0)
    psi = ng.LogAmplitude(vmc.RBM(settings.spins, seed=seed, dtype=torch.float64))
    return GroundStateProblem(
        h, psi, vmc.Metropolis(h.space, samples=settings.samples, seed=seed), vmc.lowest_energy(h)
    )


def build_molecule(molecule: ng.vmc.Molecule, exact: float) -> Callable[[GroundStateSettings, int], GroundStateProblem]:
    """A molecule with the antisymmetric network."""

    def build(settings: GroundStateSettings, seed: int) -> GroundStateProblem:
        net = vmc.AntisymmetricNet(molecule, seed=seed, dtype=torch.float64)
        psi = ng.LogAmplitude(net, head=vmc.read_sign)
        return GroundStateProblem(
            molecule, psi, vmc.Metropolis(molecule, samples=settings.samples, sweep=20, seed=seed), exact, 5.0
        )

    return build


SYSTEMS: dict[str, Callable[[GroundStateSettings, int], GroundStateProblem]] = {
    "ising": build_ising,
    "helium": build_molecule(ng.vmc.Molecule.helium(), -2.903724),
    "H2": build_molecule(ng.vmc.Molecule.hydrogen_molecule(), -1.174476),
    "LiH": build_molecule(ng.vmc.Molecule.lithium_hydride(), -8.0705),
}


class Reconfigured:
    """`ng.stochastic_reconfiguration`. Molecules take steps that shrink to a fifth, and that walkers can follow."""

    def __init__(self, problem: GroundStateProblem, momentum: float) -> None:
        self.lr, self.falls = (0.05, False) if problem.clip is None else (0.5, True)
        rule = ng.TrustRegion(radius=0.01 if self.falls else 0.1)
        sr = ng.stochastic_reconfiguration(problem.psi, self.lr, 1e-3, momentum, clip=problem.clip, rule=rule)
        self.search = vmc.GroundState(problem.hamiltonian, problem.sampler, sr)

    def step(self, part: float) -> ng.vmc.EnergyEstimate:
        """One step."""
        rate = self.lr / (1 + 4 * part) if self.falls else self.lr
        self.search.optimizer.optimizer.param_groups[0]["lr"] = rate
        return self.search.step()


class AdamSearch:
    """torch's Adam on the energy's gradient, 2 Re Cov(O, e), with a rate that falls to a tenth."""

    def __init__(self, problem: GroundStateProblem, rate: float) -> None:
        self.problem, self.rate = problem, rate
        self.adam = torch.optim.Adam(problem.psi.parameters(), lr=rate)

    def step(self, part: float) -> ng.vmc.EnergyEstimate:
        """One step."""
        psi, states = self.problem.psi, self.problem.sampler.draw(self.problem.psi).states
        local = vmc.local_energies(psi, self.problem.hamiltonian, states)
        self.adam.param_groups[0]["lr"] = self.rate / (1 + 9 * part)
        self.adam.zero_grad()
        weights = clip_energies(local.flatten(), self.problem.clip)
        log = psi.take_moving(psi(states.flatten(0, 1)))
        (2 * (weights - weights.mean()) * log).mean().backward()
        self.adam.step()
        return vmc.estimate_energy(local)


def clip_energies(local: Tensor, width: float | None) -> Tensor:
    """Local energies within that many mean absolute deviations of their median, as FermiNet has it."""
    if width is None:
        return local
    centre = local.median()
    reach = width * (local - centre).abs().mean()
    return local.clamp(centre - reach, centre + reach)


def pieces(settings: GroundStateSettings) -> tuple[Piece, ...]:
    """Adam's rates, then everybody from every seed."""
    rates = enumerate(settings.adam_rates())
    return (
        *(Piece(f"tune-{i}", f"Adam at {rate:g}", partial(try_rate, rate, TUNING_SEED), False) for i, rate in rates),
        Piece("adam", "Adam at its best rate", run_best_rate),
        *(Piece(name, NAMES[name], partial(reconfigure, momentum)) for name, momentum in MOMENTA.items()),
    )


def try_rate(rate: float, seed: int, run: PieceRun) -> Numbers:
    """One rate of Adam, judged by its energy at the end."""
    problem = SYSTEMS[run.settings.system](run.settings, seed)
    return {"rate": rate, **train(problem, AdamSearch(problem, rate), run)}


def run_best_rate(run: PieceRun) -> Numbers:
    """Adam's best rate from one seed."""
    tuned = [run.earlier[f"tune-{i}"] for i in range(len(run.settings.adam_rates()))]
    rate = min(tuned, key=lambda run: math.inf if run["final"] is None else run["final"])["rate"]
    return try_rate(rate, run.seed, run)


def reconfigure(momentum: float, run: PieceRun) -> Numbers:
    """Stochastic reconfiguration from one seed."""
    problem = SYSTEMS[run.settings.system](run.settings, run.seed)
    return train(problem, Reconfigured(problem, momentum), run)


def train(problem: GroundStateProblem, stepper: Reconfigured | AdamSearch, run: PieceRun) -> Numbers:
    """Steps until the budget is spent, then the energy that was reached: by enumeration where that is possible."""
    settings, curve, spent, step = run.settings, [], 0.0, 0
    every = max(1, settings.steps // LOOKS)
    while step < settings.steps and spent < settings.seconds:
        part = max(step / settings.steps, spent / settings.seconds)
        run.advance(part)
        start = time.process_time()
        energy = stepper.step(part)
        spent += time.process_time() - start
        if step % every == 0 or step == settings.steps - 1:
            curve.append({"step": step, "seconds": spent, "energy": energy.mean, "error": energy.error})
        step += 1
    final = measure(problem, settings.draws)
    ends = {"steps": step, "seconds": spent, "final": final.mean, "error": final.error}
    return {"curve": curve, "exact": problem.exact, **ends, "sampler": problem.sampler.report()}


def measure(problem: GroundStateProblem, draws: int) -> ng.vmc.EnergyEstimate:
    """The energy of psi as it is."""
    small = isinstance(problem.hamiltonian, vmc.Hamiltonian)
    sampler = vmc.Enumerated(problem.hamiltonian.space) if small else problem.sampler
    search = vmc.GroundState(problem.hamiltonian, sampler, ng.stochastic_reconfiguration(problem.psi))
    return search.measure(1 if small else draws)


def tell(findings: Findings) -> Story:
    """Sections for what is finished."""
    s, races = findings.settings, findings.collect(NAMES)
    system = f"Ising chain of {s.spins} spins at its critical field" if s.system == "ising" else s.system
    method = (
        f"{system}, {s.samples} samples a step from as many chains; at most {s.steps} steps and {s.seconds:g} CPU "
        "seconds of one thread each. Stochastic reconfiguration and SPRING (momentum .9) with damping .001, as they "
        f"come; Adam at the best of the rates {s.rates}, each tried from a seed of its own. The energy at the end is "
        "summed over all states for the chain, and averaged over fresh samples for molecules."
    )
    said = [f"{NAMES[name]} {median(abs(gap(run)) for run in runs):.1e}" for name, runs in races.items()]
    lead = f"Relative error of the energy at the end, medians over seeds: {', '.join(said)}."
    tried = [run for i in range(20) for run in findings.of(f"tune-{i}")]
    rows = tuple((f"{run['rate']:g}", f"{run['final']:.6f}", f"{gap(run):.1e}") for run in tried)
    tuning = Section("Adam's rates", "One seed each.", (Table("Rates", ("rate", "energy", "relative error"), rows),))
    sections = (_race(races, lead), tuning) if races else (tuning,)
    return Story(f"Ground state: {system}", lead if races else "Nothing has run yet.", method, sections)


def gap(run: Numbers) -> float:
    """Energy at the end above the exact one, over its size."""
    return (run["final"] - run["exact"]) / abs(run["exact"])


def _race(races: dict[str, list[Numbers]], lead: str) -> Section:
    heads = ("", "energy", "error of the mean", "relative error", "steps", "CPU ms a step")
    rows = tuple(
        (
            NAMES[name],
            span([run["final"] for run in runs], "{:.6f}"),
            f"{median(run['error'] for run in runs):.1e}",
            span([gap(run) for run in runs], "{:.1e}"),
            f"{median(run['steps'] for run in runs):g}",
            f"{median(1000 * run['seconds'] / run['steps'] for run in runs):.1f}",
        )
        for name, runs in races.items()
    )
    exact = next(iter(races.values()))[0]["exact"]
    note = f"Medians over seeds; below, the lowest and the highest. Exact: {exact:.6f}."
    energy = {"xlabel": "CPU seconds", "ylabel": "energy"}
    energies = fill_axes(partial(_draw_energies, races, exact), energy, columns=4)
    distance = {"xlabel": "CPU seconds", "ylabel": "|energy - exact|, sampled", "yscale": "log"}
    gaps = fill_axes(partial(_draw_gaps, races), distance, columns=3)
    pictures = (
        Picture("energy", "Energy of the first seed, with two standard errors", energies, (7.2, 3.8)),
        Picture("gap", "Distance from the exact energy, medians over seeds", gaps, (7.2, 3.6)),
    )
    return Section("Race", lead, (Table("Where they ended", heads, rows, note),), pictures)


def _draw_energies(races: dict[str, list[Numbers]], exact: float, axes: Axes) -> None:
    lowest, tops = exact, []
    for name, runs in races.items():
        x, y, error = (np.array([point[key] for point in runs[0]["curve"]]) for key in ("seconds", "energy", "error"))
        style = look(list(NAMES).index(name))
        axes.plot(x, y, label=NAMES[name], **style)
        axes.fill_between(x, y - 2 * error, y + 2 * error, color=style["color"], alpha=0.2, linewidth=0)
        tops.append(np.median(y[len(y) // 10 :]))
        lowest = min(lowest, float((y - 2 * error)[len(y) // 4 :].min()))
    axes.axhline(exact, color=INK, linestyle=(0, (1, 3)), linewidth=1.2, label="exact")
    room = max(max(tops) - exact, abs(exact) * 2e-3)
    axes.set_ylim(min(lowest, exact) - 0.3 * room, exact + 4 * room)


def _draw_gaps(races: dict[str, list[Numbers]], axes: Axes) -> None:
    for name, runs in races.items():
        length = min(len(run["curve"]) for run in runs)
        x = np.median([[point["seconds"] for point in run["curve"][:length]] for run in runs], axis=0)
        y = [[abs(point["energy"] - run["exact"]) for point in run["curve"][:length]] for run in runs]
        axes.plot(x, np.median(y, axis=0), label=NAMES[name], **look(list(NAMES).index(name)))


def search_ground_state(name: str, summary: str, minutes: float, quick: dict[str, Any], **defaults: Any) -> Experiment:
    """The experiment of one system: the settings' defaults are its own."""
    kind = change_defaults(GroundStateSettings, **defaults)
    return Experiment(f"vmc_{name}", summary, kind, pieces, tell, seeds=5, minutes=minutes, quick=quick)


ISING = search_ground_state(
    "ising", "Transverse Ising chain: natural gradient beside Adam", 2, {"seeds": 1}, system="ising"
)
HELIUM = search_ground_state(
    "helium",
    "Helium by an antisymmetric network: natural gradient beside Adam",
    60,
    {"seeds": 1, "steps": 200, "seconds": 10.0, "samples": 200, "draws": 20, "rates": "0.003"},
    system="helium",
    samples=500,
    steps=2000,
    seconds=120.0,
    rates="0.001,0.003,0.01",
)
