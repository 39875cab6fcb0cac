"""The benchmark of ground states: what is tuned, what is told where NetKet lacks, and one Hamiltonian for all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import natgrad as ng
from benchmarks import ground_states
from benchmarks.ground_states import CONTESTANTS, LATTICES, MISSING, Lattice, Reader, build_netket, race, read_netket

SMALL = Lattice("small", ng.vmc.TransverseIsing(4), 1, 50, 0.0)


def scale(lattice: Lattice, factor: float) -> ng.LogAmplitude:
    psi = lattice.network(0)
    with torch.no_grad():
        for p in psi.parameters():
            p.mul_(factor)
    return psi


def stay(lattice: Lattice, seed: int) -> Iterator[Reader]:
    yield lambda: scale(lattice, 0.0)


def leave(lattice: Lattice, seed: int) -> Iterator[Reader]:
    yield lambda: scale(lattice, 1e3)


def fail(lattice: Lattice, seed: int) -> Iterator[Reader]:
    raise RuntimeError("this run fails")
    yield


def test_the_best_variant_of_the_first_seed_runs_from_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CONTESTANTS, "Adam", {"far": leave, "failed": fail, "near": stay})
    energy = -4.0  # psi is constant: every spin along x
    expected = (energy - SMALL.lowest) / abs(SMALL.lowest)
    assert race(SMALL, "Adam", range(3), 0.0) == f"{expected:.1e} ({expected:.1e} to {expected:.1e}), near"
    monkeypatch.setitem(CONTESTANTS, "Adam", {"failed": fail})
    assert race(SMALL, "Adam", range(1), 0.0).startswith(f"{math.inf}")


def test_what_to_install_is_told_where_netket_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ground_states, "find_spec", lambda name: None)
    assert race(SMALL, "NetKet", range(1), 0.0) == MISSING == "pip install netket"


@pytest.mark.filterwarnings("ignore:.*walkers accepted no move")
@pytest.mark.parametrize("name", ["ng.vmc", "Adam"])
def test_contestants_lower_the_energy(name):
    steps = next(iter(CONTESTANTS[name].values()))(SMALL, 0)
    first = SMALL.error(next(steps)())
    for _ in range(60):
        read = next(steps)
    assert SMALL.error(read()) < 0.8 * first


@pytest.mark.parametrize("name", LATTICES)
def test_netket_has_the_same_hamiltonian_and_network(name):
    nk = pytest.importorskip("netket")
    lattice = LATTICES[name]()
    operator, sampler = build_netket(nk, lattice, 4)
    state = nk.vqs.MCState(sampler, nk.models.RBM(alpha=lattice.hidden), n_samples=4)
    psi, states = read_netket(lattice, state.parameters), lattice.hamiltonian.space.all_states(torch.float64)[:20]
    with torch.no_grad():
        log = torch.as_tensor(state.log_value(states.numpy()).__array__().copy())
        torch.testing.assert_close(psi(states), log.real.to(torch.float64), rtol=1e-9, atol=1e-9)
    found = ng.vmc.local_energies(psi, operator, states)
    torch.testing.assert_close(found, ng.vmc.local_energies(psi, lattice.hamiltonian, states), rtol=1e-9, atol=1e-9)
