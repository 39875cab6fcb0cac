"""Ground states of spin lattices at equal CPU seconds of one thread: `ng.vmc` beside NetKet and Adam.

All have the same network, a restricted Boltzmann machine, as many samples per step, chains that are continued, and rate
and damping alike. Who has something to choose is tuned on the first seed: ours over momentum, NetKet over that, its
chains and the sweeps it leaves out, Adam over its rates. The energy at the end is that over all states, by the same
code for all: NetKet's parameters are read into our network. NetKet's seconds begin after its compilation. It is no
package that the benchmarks install: where it lacks, its column says what to install.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

import natgrad as ng
from benchmarks.tables import ChosenTables
from benchmarks.variants import check_names, race_variants, write_errors

vmc = ng.vmc
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

RATE, DAMPING, MOMENTUM = 0.05, 1e-3, 0.9
ADAM_RATES = (0.003, 0.01, 0.03)
MOMENTA = (0.0, MOMENTUM)
CHAINS = (16, None)  # of NetKet: its own number, and one per sample as here
DISCARDED = (None, 0)  # sweeps that NetKet leaves out between two draws: as it comes, and none as here
TOGETHER = 10  # steps that NetKet takes in one call
MISSING = "pip install netket"


@dataclass(frozen=True)
class Lattice:
    """A Hamiltonian with its network and its budget."""

    name: str
    hamiltonian: Any
    hidden: int  # units per spin
    samples: int  # per step
    seconds: float  # of CPU time

    def network(self, seed: int) -> ng.LogAmplitude:
        """The network at its start."""
        count = self.hamiltonian.count
        return ng.LogAmplitude(vmc.RBM(count, self.hidden * count, scale=0.01, seed=seed, dtype=torch.float64))

    @cached_property
    def lowest(self) -> float:
        """The exact energy, by Lanczos."""
        return vmc.lowest_energy(self.hamiltonian)

    def error(self, psi: ng.LogAmplitude) -> float:
        """(E - E_0) / |E_0|, E over all states."""
        every = vmc.Enumerated(self.hamiltonian.space)
        search = vmc.GroundState(self.hamiltonian, every, ng.stochastic_reconfiguration(psi))
        return (search.measure().mean - self.lowest) / abs(self.lowest)


def ising() -> Lattice:
    """The closed chain at its critical field."""
    return Lattice("transverse Ising, N = 10", vmc.TransverseIsing(10, field=1.0), 1, 400, 3.0)


def chain() -> Lattice:
    """Heisenberg's closed chain with Marshall's signs."""
    return Lattice("Heisenberg chain, N = 20", vmc.Heisenberg(20, sublattice=range(0, 20, 2)), 1, 500, 15.0)


def square() -> Lattice:
    """J1-J2 at J2 = J1 / 2 with Marshall's signs."""
    near, far = vmc.square_edges(4, 4), vmc.square_edges(4, 4, diagonal=True)
    sublattice = [4 * i + j for i in range(4) for j in range(4) if (i + j) % 2]
    h = vmc.Heisenberg(16, [*near, *far], [1.0] * len(near) + [0.5] * len(far), sublattice=sublattice)
    return Lattice("J1-J2, 4 x 4, J2 = J1 / 2", h, 2, 500, 20.0)


LATTICES = {"ising": ising, "heisenberg": chain, "j1j2": square}
Reader = Callable[[], ng.LogAmplitude]
Contestant = Callable[[Lattice, int], Iterator[Reader]]
"""A lattice and a seed -> what reads psi, after step after step; the first one comes when everything is ready."""


def by_library(lattice: Lattice, seed: int, momentum: float) -> Iterator[Reader]:
    """`ng.stochastic_reconfiguration` with its Markov chains."""
    psi = lattice.network(seed)
    sr = ng.stochastic_reconfiguration(psi, RATE, DAMPING, momentum)
    sampler = vmc.Metropolis(lattice.hamiltonian.space, samples=lattice.samples, seed=seed)
    search = vmc.GroundState(lattice.hamiltonian, sampler, sr)
    while True:
        yield lambda: psi
        search.step()


def by_adam(lattice: Lattice, seed: int, rate: float) -> Iterator[Reader]:
    """Adam on the energy's gradient, 2 Re Cov(O, e)."""
    psi = lattice.network(seed)
    sampler = vmc.Metropolis(lattice.hamiltonian.space, samples=lattice.samples, seed=seed)
    adam = torch.optim.Adam(psi.parameters(), rate)
    while True:
        yield lambda: psi
        states = sampler.draw(psi).states.flatten(0, 1)
        local = vmc.local_energies(psi, lattice.hamiltonian, states)
        adam.zero_grad()
        (2 * (local - local.mean()) * psi(states)).mean().backward()
        adam.step()


def by_netket(
    lattice: Lattice, seed: int, momentum: float, chains: int | None, discarded: int | None
) -> Iterator[Reader]:
    """NetKet's SR, or SPRING with momentum, on its own operators and Metropolis sampler."""
    nk: Any = importlib.import_module("netket")
    operator, sampler = build_netket(nk, lattice, chains or lattice.samples)
    count = lattice.samples // sampler.n_chains * sampler.n_chains
    model = nk.models.RBM(alpha=lattice.hidden)
    state = nk.vqs.MCState(sampler, model, seed=seed, sampler_seed=seed, n_samples=count)
    rule = nk.optimizer.Sgd(RATE)
    driver = nk.driver.VMC_SR(operator, rule, diag_shift=DAMPING, momentum=momentum or None, variational_state=state)
    driver.run(2, out=(), show_progress=False)  # compiles; without the first sweeps its energy is not a number
    if discarded is not None:
        state.n_discard_per_chain = discarded
        driver.run(1, out=(), show_progress=False)
    while True:
        yield lambda: read_netket(lattice, state.parameters)
        driver.run(TOGETHER, out=(), show_progress=False)


def build_netket(nk: Any, lattice: Lattice, chains: int) -> tuple[Any, Any]:
    """The same Hamiltonian and moves: a flip, or the exchange of any two spins."""
    h, count = lattice.hamiltonian, lattice.hamiltonian.count
    if isinstance(h, vmc.TransverseIsing):
        hilbert = nk.hilbert.Spin(0.5, count)
        graph = nk.graph.Graph([tuple(pair) for pair in h.edges_or_chain])
        operator = nk.operator.Ising(hilbert, graph, h=h.field, J=-1.0)
        return operator, nk.sampler.MetropolisLocal(hilbert, n_chains=chains, sweep_size=count)
    hilbert, signs = nk.hilbert.Spin(0.5, count, total_sz=0), set(h.sublattice)
    couplings = np.broadcast_to(h.coupling, len(h.edges_or_chain))
    operator: Any = 0.0
    for (i, j), coupling in zip(h.edges_or_chain, couplings, strict=True):
        turn = -1.0 if (i in signs) != (j in signs) else 1.0
        edge = nk.graph.Graph([(i, j)], n_nodes=count)
        bond = nk.operator.Heisenberg(hilbert, edge, J=float(coupling) / 4, sign_rule=turn < 0)
        operator = bond if isinstance(operator, float) else operator + bond
    clusters = [(i, j) for i in range(count) for j in range(i)]
    return operator, nk.sampler.MetropolisExchange(hilbert, clusters=clusters, n_chains=chains, sweep_size=count)


def read_netket(lattice: Lattice, parameters: Any) -> ng.LogAmplitude:
    """Our network with NetKet's parameters."""
    psi = lattice.network(0)
    dense = parameters["Dense"]
    held = {
        "hidden.weight": np.array(dense["kernel"]).T,
        "hidden.bias": np.array(dense["bias"]),
        "visible.weight": np.array(parameters["visible_bias"])[None],
    }
    psi.net.load_state_dict({name: torch.as_tensor(value.copy()) for name, value in held.items()})
    return psi


Variants = Mapping[str, Contestant]  # what is chosen -> a contestant with it
CONTESTANTS: dict[str, Variants] = {  # name -> its variants, of which the best one on the first seed counts
    "ng.vmc": {f"momentum {mu:g}": partial(by_library, momentum=mu) for mu in MOMENTA},
    "NetKet": {
        f"momentum {mu:g}, {chains or 'all'} chains, {'its' if left is None else left} sweeps left out": partial(
            by_netket, momentum=mu, chains=chains, discarded=left
        )
        for mu in MOMENTA
        for chains in CHAINS
        for left in DISCARDED
    },
    "Adam": {f"{rate:g}": partial(by_adam, rate=rate) for rate in ADAM_RATES},
}
HEADS = tuple(CONTESTANTS)
TITLE = "Relative error of the energy, {}: median (least to largest) at equal CPU seconds"


def train(lattice: Lattice, contestant: Contestant, seed: int, seconds: float) -> float:
    """The error after these CPU seconds; infinite for a run that fails."""
    try:
        steps = contestant(lattice, seed)
        read, began = next(steps), time.process_time()
        while time.process_time() - began < seconds:
            read = next(steps)
        error = lattice.error(read())
    except (ValueError, RuntimeError):
        return math.inf
    return error if math.isfinite(error) else math.inf


def figures(seeds: range, choices: ChosenTables) -> Iterator[tuple[str, ...]]:
    """One row per lattice: median, least and largest error of each contestant, and which of its variants that is."""
    check_names("lattices", choices.workloads, LATTICES)
    check_names("methods", choices.methods, HEADS)
    torch.set_num_threads(1)
    for make in (LATTICES[name] for name in choices.workloads or LATTICES):
        lattice = make()
        budget = choices.seconds or lattice.seconds
        cells = [race(lattice, name, seeds, budget) if name in (choices.methods or HEADS) else "-" for name in HEADS]
        yield f"{lattice.name}, {lattice.samples} samples, {budget:g} s", *cells


def race(lattice: Lattice, name: str, seeds: range, seconds: float) -> str:
    """The variant with the least error on the first seed, and its errors on all of them."""
    if name == "NetKet" and find_spec("netket") is None:
        return MISSING
    return write_errors(*race_variants(partial(train, lattice, seconds=seconds), CONTESTANTS[name], seeds))
