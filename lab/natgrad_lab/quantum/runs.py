"""Ground states by variational Monte Carlo: stochastic reconfiguration, SPRING, and Adam at its best rate.

Every contestant samples from chains of its own, has the same network and start, and the same budget: steps or CPU
seconds, whichever ends first. Adam's rates are tried from a seed of their own, and the best one runs from every seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import natgrad as ng
from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Numbers, Piece, PieceRun
from natgrad_lab.experiments.settings import change_defaults
from natgrad_lab.quantum import page

vmc = ng.vmc
TUNING_SEED = 1000
LOOKS = 60
"""Points of a curve at most."""


@dataclass(frozen=True)
class GroundStateSettings:
    """What `--set` can change."""

    system: str = "ising"  # ising, helium, H2 or LiH
    spins: int = 10  # of the chain
    samples: int = 400  # per step
    steps: int = 300  # at most
    seconds: float = 600.0  # of one thread of the processor, at most
    draws: int = 100  # of the energy at the end
    rates: str = "0.001,0.003,0.01,0.03"  # of Adam that are tried, comma-separated
    threads: int | None = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise LabError(f"system is {self.system}, expected one of {', '.join(SYSTEMS)}")
        for key in ("spins", "samples", "steps", "seconds", "draws"):
            if not getattr(self, key) > 0:
                raise LabError(f"{key} is {getattr(self, key)}, expected a number above 0")
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


class Stepper(Protocol):
    """A contestant at work."""

    def step(self, part: float) -> ng.vmc.EnergyEstimate:
        """One step, with that part of the budget spent: the energy before it."""
        ...


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
    rates = settings.adam_rates()
    found = [Piece(f"tune-{i}", f"Adam at {rate:g}", AdamTuning(rate), repeated=False) for i, rate in enumerate(rates)]
    found.append(Piece("adam", "Adam at its best rate", BestAdam()))
    found += [Piece(name, title, Reconfiguration(momentum)) for name, (title, momentum) in NATURAL.items()]
    return tuple(found)


NATURAL = {"sr": ("stochastic reconfiguration", 0.0), "spring": ("SPRING", 0.9)}


@dataclass(frozen=True)
class AdamTuning:
    """One rate of Adam, judged by its energy at the end."""

    rate: float

    def __call__(self, run: PieceRun) -> Numbers:
        problem = SYSTEMS[run.settings.system](run.settings, TUNING_SEED)
        return {"rate": self.rate, **train(problem, AdamSearch(problem, self.rate), run)}


@dataclass(frozen=True)
class BestAdam:
    """The best rate from one seed."""

    def __call__(self, run: PieceRun) -> Numbers:
        tuned = [run.earlier[f"tune-{i}"] for i in range(len(run.settings.adam_rates()))]
        rate = min(tuned, key=lambda one: math.inf if one["final"] is None else one["final"])["rate"]
        problem = SYSTEMS[run.settings.system](run.settings, run.seed)
        return {"rate": rate, **train(problem, AdamSearch(problem, rate), run)}


@dataclass(frozen=True)
class Reconfiguration:
    """Stochastic reconfiguration from one seed."""

    momentum: float

    def __call__(self, run: PieceRun) -> Numbers:
        problem = SYSTEMS[run.settings.system](run.settings, run.seed)
        return train(problem, Reconfigured(problem, self.momentum), run)


def train(problem: GroundStateProblem, stepper: Stepper, run: PieceRun) -> Numbers:
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
    return {
        "curve": curve,
        "exact": problem.exact,
        "steps": step,
        "seconds": spent,
        "final": final.mean,
        "error": final.error,
        "sampler": problem.sampler.report(),
    }


def measure(problem: GroundStateProblem, draws: int) -> ng.vmc.EnergyEstimate:
    """The energy of psi as it is."""
    small = isinstance(problem.hamiltonian, vmc.Hamiltonian)
    sampler = vmc.Enumerated(problem.hamiltonian.space) if small else problem.sampler
    search = vmc.GroundState(problem.hamiltonian, sampler, ng.stochastic_reconfiguration(problem.psi))
    return search.measure(1 if small else draws)


def study(name: str, summary: str, minutes: float, quick: dict[str, Any], **defaults: Any) -> Experiment:
    """The study of one system: the settings' defaults are its own."""
    kind = change_defaults(GroundStateSettings, **defaults)
    return Experiment(f"vmc_{name}", summary, kind, pieces, page.tell, seeds=5, minutes=minutes, quick=quick)


ISING = study(
    "ising", "Transverse Ising chain: natural gradient beside Adam, five minutes", 2, {"seeds": 1}, system="ising"
)
HELIUM = study(
    "helium",
    "Helium by an antisymmetric network: natural gradient beside Adam, forty minutes",
    60,
    {"seeds": 1, "steps": 200, "seconds": 10.0, "samples": 200, "draws": 20, "rates": "0.003"},
    system="helium",
    samples=500,
    steps=2000,
    seconds=120.0,
    rates="0.001,0.003,0.01",
)
