"""Particles in space: local energies against known eigenstates and double backward, and antisymmetry."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor, nn
from wave_functions import Formula, tanh_net

import natgrad as ng
from natgrad import vmc
from natgrad.vmc.networks import determinant


def distances(x: Tensor) -> Tensor:
    """|r_i| of every particle, (b, n)."""
    return x.unflatten(1, (-1, 3)).norm(dim=2)


EIGENSTATES = {
    "oscillator": (vmc.Harmonic(3, 2.0), lambda a, x: -a * x.square().sum(1), 3.0),
    "oscillator, excited": (vmc.Harmonic(2), lambda a, x: x[:, 0].abs().log() - a * x.square().sum(1) / 2, 2.0),
    "three fermions in a trap": (
        vmc.Harmonic(3),
        lambda a, x: torch.linalg.slogdet(torch.stack([torch.ones_like(x), x, x**2], 2))[1] - a * x.square().sum(1) / 2,
        4.5,
    ),
    "the same, by an operation that is not carried": (
        vmc.Harmonic(3),
        lambda a, x: torch.linalg.slogdet(x.unsqueeze(2) ** torch.arange(3))[1] - a * x.square().sum(1) / 2,
        4.5,
    ),
    "hydrogen": (vmc.Molecule.hydrogen(), lambda a, x: -a * distances(x).sum(1), -0.5),
    "hydrogen, 2s": (
        vmc.Molecule.hydrogen(),
        lambda a, x: (1 - a * distances(x)[:, 0] / 2).abs().log() - distances(x)[:, 0] / 2,
        -0.125,
    ),
}


@pytest.mark.parametrize("name", EIGENSTATES)
def test_an_eigenstate_has_one_local_energy(name):
    hamiltonian, log, energy = EIGENSTATES[name]
    found = vmc.local_energies(ng.LogAmplitude(Formula(log)), hamiltonian, draw(6, hamiltonian.count))
    assert_close(found, torch.full((6,), energy, dtype=F64), rtol=1e-9)


def laplacian_by_backward(psi: ng.LogAmplitude, x: Tensor) -> Tensor:
    """sum_i d_i^2 log psi + (d_i log psi)^2, by two backward passes per coordinate."""
    x = x.clone().requires_grad_()
    log = psi.take_moving(psi(x))
    parts = [log.real, log.imag] if log.is_complex() else [log]
    slopes = [torch.autograd.grad(part.sum(), x, create_graph=True)[0] for part in parts]
    bends = [
        sum(torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(x.shape[1]))
        for slope in slopes
    ]
    if len(parts) == 1:
        return bends[0] + slopes[0].square().sum(1)
    return torch.complex(*bends) + torch.complex(*slopes).square().sum(1)


@pytest.mark.parametrize("head", [ng.vmc.read_phase, ng.vmc.read_sign])
def test_the_kinetic_energy_is_that_of_double_backward(head):
    psi = ng.LogAmplitude(tanh_net(2, 6), head=head)
    x = draw(5, 6)
    assert_close(vmc.kinetic_energies(psi, x).detach(), -laplacian_by_backward(psi, x).detach() / 2, rtol=1e-10)


MOLECULES = {
    "hydrogen": vmc.Molecule.hydrogen(),
    "helium": vmc.Molecule.helium(),
    "H2": vmc.Molecule.hydrogen_molecule(),
    "LiH": vmc.Molecule.lithium_hydride(),
    "three alike": vmc.Molecule((3.0,), ((0.0, 0.0, 0.0),), up=3, down=1),
}


def antisymmetric(name: str) -> ng.LogAmplitude:
    """A small net for a molecule."""
    net = vmc.AntisymmetricNet(MOLECULES[name], hidden=6, determinants=2, dtype=F64)
    return ng.LogAmplitude(net, head=ng.vmc.read_sign)


@pytest.mark.parametrize("name", MOLECULES)
def test_exchanging_electrons_of_one_spin_changes_the_sign(name):
    psi, molecule = antisymmetric(name), MOLECULES[name]
    x = draw(4, molecule.electrons, 3)
    before = psi(x.flatten(1)).detach()
    for spin in (range(molecule.up), range(molecule.up, molecule.electrons)):
        for i in spin:
            for j in range(spin[0], i):
                order = list(range(molecule.electrons))
                order[i], order[j] = j, i
                after = psi(x[:, order].flatten(1)).detach()
                assert_close((after - before).exp(), torch.full((4,), -1.0, dtype=after.dtype), rtol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_sum_over_permutations_has_the_determinant_s_sign(size: int):
    matrices = draw(5, size, size)
    assert_close(determinant(matrices), torch.linalg.det(matrices), rtol=1e-10)


@pytest.mark.parametrize("name", MOLECULES)
def test_its_kinetic_energy_is_that_of_double_backward(name):
    psi, x = antisymmetric(name), draw(3, MOLECULES[name].count)
    found = vmc.local_energies(psi, MOLECULES[name], x) - MOLECULES[name].potential(x)
    assert_close(found, -laplacian_by_backward(psi, x).detach() / 2, rtol=1e-8)


def test_an_oscillator_is_found():
    h = vmc.Harmonic(2, 1.5)
    psi = ng.LogAmplitude(Formula(lambda a, x: -a * x.square().sum(1) - 0.1 * x.pow(4).sum(1) * a, 2.0))
    sr = ng.stochastic_reconfiguration(psi, lr=0.1, clip=5.0)
    search = vmc.GroundState(h, vmc.Metropolis(h, samples=200), sr)
    search.run(20)
    found = search.measure(5)
    assert 1.5 - 4 * found.error < found.mean < 1.7


def test_bad_input_is_named_at_the_door():
    with pytest.raises(ValueError, match="positions has 1 entries, expected three numbers for each of the 2 charges"):
        vmc.Molecule((1.0, 1.0), ((0.0, 0.0, 0.0),))
    with pytest.raises(ValueError, match="expected at most 5 each"):
        vmc.AntisymmetricNet(vmc.Molecule((6.0,), ((0.0, 0.0, 0.0),), up=6, down=0))
    with pytest.raises(ValueError, match="frequency is 0"):
        vmc.Harmonic(2, 0)


def test_a_potential_of_ones_own_is_that_of_a_class_below_harmonic():
    class Quartic(vmc.Harmonic):
        def potential(self, states: Tensor) -> Tensor:
            return states.pow(4).sum(1)

    class Alone:
        potential = Quartic.potential

    psi, h = ng.LogAmplitude(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()), Quartic(2)
    x = ng.vmc.Metropolis(h, samples=5).draw(psi).states[:, 0]
    assert_close(vmc.local_energies(psi, h, x), vmc.kinetic_energies(psi, x).detach() + x.pow(4).sum(1))
    with pytest.raises(TypeError, match=r"derive from ng\.vmc\.Harmonic"):
        vmc.local_energies(psi, Alone(), x)
