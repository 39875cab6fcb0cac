"""The whole job on small systems, against Lanczos."""

from __future__ import annotations

import io

import pytest
import torch
from models import F64
from torch import nn
from wave_functions import tanh_net

import natgrad as ng
from natgrad import vmc


def search(h: vmc.Hamiltonian, net: nn.Module, sampler: vmc.Sampler, **how: float) -> vmc.GroundState:
    """The job with usual settings."""
    psi = ng.LogAmplitude(net)
    return vmc.GroundState(h, sampler, ng.stochastic_reconfiguration(psi, **{"lr": 0.1, "damping": 1e-3} | how))


H = vmc.TransverseIsing(6)
BOSONS = vmc.BoseHubbard(4, interaction=2.0, most=2)
ANTI = vmc.Heisenberg(6, sublattice=(0, 2, 4))
JOBS = {
    "enumerated": lambda: search(H, vmc.RBM(6, dtype=F64), vmc.Enumerated(H.space)),
    "exact draws": lambda: search(H, vmc.RBM(6, dtype=F64), vmc.ExactSampler(H.space, 300)),
    "flips": lambda: search(H, vmc.RBM(6, dtype=F64), vmc.Metropolis(H.space, samples=300)),
    "complex, few samples": lambda: search(
        H, vmc.RBM(6, complex_parameters=True, dtype=F64), vmc.Metropolis(H.space, samples=60), momentum=0.8
    ),
    "autoregressive": lambda: search(H, vmc.AutoregressiveNet(6, dtype=F64), vmc.AncestralSampler(300)),
    "exchanges": lambda: search(ANTI, vmc.RBM(6, dtype=F64), vmc.Metropolis(ANTI.space, samples=300)),
    "hops": lambda: search(BOSONS, tanh_net(), vmc.Metropolis(BOSONS.space, samples=300)),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_energy_comes_down_to_the_exact_one(name):
    job = JOBS[name]()
    exact = vmc.lowest_energy(job.hamiltonian)
    energies = job.run(16)
    last = energies[-1]
    assert abs(last.mean - exact) < 4 * last.error + 0.02 * abs(exact)
    assert last.mean < energies[0].mean - 0.5
    found = job.measure(3)
    assert found.mean > exact - 4 * found.error  # variational
    assert found.variance < energies[0].variance / 3


@pytest.mark.parametrize("name", ["complex, few samples", "exact draws", "autoregressive"])
def test_save_load_and_continue_equals_never_having_stopped(name):
    whole, half = JOBS[name](), JOBS[name]()
    whole.run(6)
    half.run(3)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    later = JOBS[name]()
    state = torch.load(file, weights_only=True)
    with pytest.raises(ValueError, match="sampler"):
        later.load_state_dict({name: part for name, part in state.items() if name != "sampler"})
    fresh = [p.clone() for p in later.psi.parameters()]
    with pytest.raises(ValueError, match="state"):
        later.load_state_dict(state | {"optimizer": {"optimizer": {}, "energies": []}})
    assert all(map(torch.equal, later.psi.parameters(), fresh))
    later.load_state_dict(state)
    later.run(3)
    assert [one.mean for one in later.energies] == [one.mean for one in whole.energies]
    for a, b in zip(later.psi.parameters(), whole.psi.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bad_input_is_named_at_the_door():
    with pytest.raises(TypeError, match="optimizer is Adam"):
        vmc.GroundState(H, vmc.Enumerated(H.space), torch.optim.Adam(vmc.RBM(3).parameters()))
    with pytest.raises(TypeError, match="sampler is int"):
        vmc.GroundState(H, 3, ng.stochastic_reconfiguration(ng.LogAmplitude(vmc.RBM(3))))
    with pytest.raises(ValueError, match="steps is 0"):
        vmc.lowest_energy(H, steps=0)
