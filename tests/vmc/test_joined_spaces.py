"""Hamiltonian, sampler, move and psi are over the same states, or it is an error; complex energies and exact nodes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models import F64, Assembled, assert_close
from torch import Tensor, nn
from wave_functions import draw_hermitian, tanh_net

import natgrad as ng
from natgrad import vmc


def join(hamiltonian: Any, sampler: vmc.Sampler, net: nn.Module | None = None) -> vmc.GroundState:
    """The job, with a network of six variables if none is given."""
    psi = ng.LogAmplitude(vmc.RBM(6, dtype=F64) if net is None else net)
    return vmc.GroundState(hamiltonian, sampler, ng.stochastic_reconfiguration(psi))


ISING, BOSE = vmc.TransverseIsing(6), vmc.BoseHubbard(6, most=2)
SAMPLERS = {
    "enumerated": vmc.Enumerated,
    "exact": lambda space: vmc.ExactSampler(space, 20),
    "chains": lambda space: vmc.Metropolis(space, samples=20),
}
APART = {
    "a sector that H leaves": (ISING, vmc.Spins(6, up=3)),
    "another sector": (vmc.Heisenberg(6), vmc.Spins(6, up=2)),
    "all sectors of one": (vmc.Heisenberg(6, up=2), vmc.Spins(6)),
    "fewer variables": (ISING, vmc.Spins(5)),
    "bosons for spins": (ISING, vmc.Bosons(6, most=1)),
    "more bosons on a site": (BOSE, vmc.Bosons(6, 6, most=3)),
    "another number of bosons": (BOSE, vmc.Bosons(6, 5, most=2)),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", APART)
def test_a_hamiltonian_and_a_sampler_over_different_states_are_refused(name: str, sampler: str):
    hamiltonian, space = APART[name]
    with pytest.raises(ValueError, match=r"an energy is right over one space alone; take .* over hamiltonian\.space"):
        join(hamiltonian, SAMPLERS[sampler](space))


@pytest.mark.parametrize("hamiltonian", [vmc.Harmonic(6), vmc.Molecule.helium()])
def test_particles_in_space_and_a_lattice_do_not_join(hamiltonian):
    with pytest.raises(ValueError, match="over the hamiltonian itself"):
        join(hamiltonian, vmc.Metropolis(vmc.Spins(6), samples=10))
    with pytest.raises(ValueError, match=r"over hamiltonian\.space"):
        join(ISING, vmc.Metropolis(hamiltonian, samples=10))
    with pytest.raises(ValueError, match="over the hamiltonian itself"):
        join(vmc.Harmonic(3), vmc.Metropolis(hamiltonian, samples=10))


class Flips:
    """A Hamiltonian that does not say what it is over."""

    def connected(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return ISING.connected(states)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_hamiltonian_that_leads_out_of_the_samples_is_told_at_a_draw(sampler: str):
    search = join(Flips(), SAMPLERS[sampler](vmc.Spins(6, up=3)))
    for call in (search.step, search.measure):
        with pytest.raises(ValueError, match=r"hamiltonian leads out of Spins\(count=6, up=3\), the sampler's states"):
            call()
    free = join(Flips(), SAMPLERS[sampler](vmc.Spins(6)))
    said = join(ISING, SAMPLERS[sampler](vmc.Spins(6)))
    assert free.step().mean == pytest.approx(said.step().mean, rel=1e-12)


def test_a_network_that_draws_other_states_than_the_hamiltonian_has_is_told():
    for hamiltonian, words in ((vmc.Heisenberg(6, up=1), "not of hamiltonian.space"), (BOSE, "have other values")):
        with pytest.raises(ValueError, match=words):
            join(hamiltonian, vmc.AncestralSampler(50), vmc.AutoregressiveNet(6, dtype=F64)).step()


def test_a_network_of_other_variables_is_named_when_the_parts_are_joined():
    with pytest.raises(ValueError, match=r"psi's network does not take the states of Spins\(count=6, up=None\)"):
        join(ISING, vmc.Enumerated(ISING.space), vmc.RBM(4, dtype=F64))
    four = vmc.SymmetricNet(vmc.RBM(4, dtype=F64), vmc.chain_translations(4))
    with pytest.raises(ValueError, match="states have 6 sites, expected 4, those of the permutations"):
        join(ISING, vmc.Enumerated(ISING.space), four)
    helium, hydrogen = vmc.Molecule.helium(), vmc.Molecule.hydrogen_molecule()
    psi = ng.LogAmplitude(vmc.AntisymmetricNet(helium), head=vmc.read_sign)
    with pytest.raises(ValueError, match="take a network of the hamiltonian"):
        vmc.GroundState(hydrogen, vmc.Metropolis(hydrogen, samples=10), ng.stochastic_reconfiguration(psi))


@pytest.mark.parametrize(
    ("hamiltonian", "states"),
    [
        (vmc.Heisenberg(4), torch.ones(3, 6)),  # whose first four alone would count
        (vmc.Heisenberg(4), torch.tensor([[0.0, 1.0, 0.0, 1.0]])),
        (vmc.TransverseIsing(4), torch.full((2, 3, 4), 0.5)),
        (vmc.BoseHubbard(4), torch.tensor([[-1, 1, -1, 1]])),
        (vmc.BoseHubbard(4, most=2), torch.tensor([[4.0, 0.0, 0.0, 0.0]])),
    ],
)
def test_local_energies_of_other_variables_are_refused(hamiltonian, states):
    psi = ng.LogAmplitude(tanh_net(n=states.shape[-1]))
    with pytest.raises(ValueError, match=r"states have .*hamiltonian\.space"):
        vmc.local_energies(psi, hamiltonian, states)


WRONG_MOVES = {
    "conserves what is free": (vmc.Spins(6), vmc.Exchange()),
    "conserves the number where it is free": (vmc.Bosons(4, None, 2), vmc.Hop(2)),
    "changes what is conserved": (vmc.Spins(6, 3), vmc.Flip()),
    "other values": (vmc.Bosons(3, None, 2), vmc.Flip()),
    "fewer values": (vmc.Bosons(3, None, 2), vmc.Flip((0.0, 1.0))),
    "keeps the numbers on sites": (vmc.Bosons(3, 3, 2), vmc.Exchange()),
    "more on a site": (vmc.Bosons(3, 3, 2), vmc.Hop(3)),
    "of particles in space": (vmc.Spins(6), vmc.Shift()),
    "of a lattice": (vmc.Harmonic(2), vmc.Flip()),
}


@pytest.mark.parametrize("name", WRONG_MOVES)
def test_a_move_that_does_not_fit_its_space_is_refused(name: str):
    with pytest.raises(ValueError, match=r"leads out of the space, or does not reach all of its states; take"):
        vmc.Metropolis(*WRONG_MOVES[name])


def test_a_move_of_ones_own_that_leaves_the_space_is_told_at_the_draw():
    class FlipAll:
        tuned = False

        def propose(self, states: Tensor, generator: torch.Generator, width: float) -> Tensor:
            return -states

    psi = ng.LogAmplitude(vmc.RBM(4, dtype=F64))
    vmc.Metropolis(vmc.Spins(4, 2), FlipAll(), samples=20).draw(psi)
    with pytest.raises(ValueError, match=r"leads out of Spins\(count=4, up=1\): take a move .* such as Exchange"):
        vmc.Metropolis(vmc.Spins(4, 1), FlipAll(), samples=20, sweep=1).draw(psi)


@pytest.mark.parametrize("space", [vmc.Spins(1), vmc.Spins(1, 1), vmc.Bosons(1, 1, 1), vmc.Bosons(1, 2, 3)])
def test_one_site_is_a_lattice(space):
    sampler = vmc.Metropolis(space, samples=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single state is a stuck chain
        assert sampler.draw(ng.LogAmplitude(vmc.RBM(1, dtype=F64))).states.shape == (4, 1, 1)


SPACES = [vmc.Spins(4), vmc.Spins(4, 1), vmc.Bosons(3, None, 2), vmc.Bosons(3, 4, 2)]


@pytest.mark.parametrize("space", SPACES)
def test_a_space_contains_its_states_and_no_others(space):
    every = vmc.Bosons(space.count, None, 3).all_states(F64) - 1  # -1, 0, 1, 2 each
    own = {tuple(s) for s in space.all_states(F64).tolist()}
    assert space.contains(every).tolist() == [tuple(s) in own for s in every.tolist()]
    assert space.contains(every.to(torch.int8)).tolist() == space.contains(every).tolist()
    assert not bool(space.contains(every + 0.5).any())
    assert not bool(space.contains(torch.ones(5, space.count + 1)).any())


# Complex Hamiltonians.


class Written(vmc.Hamiltonian):
    """A matrix over all states of some spins, times a unit."""

    def __init__(self, matrix: Tensor, spins: int) -> None:
        self.elements, self.space = matrix, vmc.Spins(spins)

    def diagonal(self, states: Tensor) -> Tensor:
        return self.elements.diagonal().real[self.space.number(states)]

    def moves(self, states: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.space.number(states)
        every = self.space.all_states(states.dtype).expand(len(states), -1, -1)
        values = self.elements[rows].clone()
        values[torch.arange(len(rows)), rows] = 0
        return every, values


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("unit", [1.0, 1e-14, 1e14])
@pytest.mark.parametrize("spins", [1, 4, 6])
def test_the_lowest_energy_is_the_least_eigenvalue_in_any_unit(spins: int, unit: float, real: bool):
    matrix = unit * draw_hermitian(2**spins, real)
    exact = torch.linalg.eigvalsh(matrix)
    found = vmc.lowest_energy(Written(matrix, spins))
    assert abs(found - float(exact[0])) < 1e-10 * float(exact.abs().max())


def test_an_energy_that_does_not_stand_and_a_matrix_that_is_not_hermitian_are_told():
    matrix = draw_hermitian(64)
    with pytest.warns(UserWarning, match="does not stand to 12 digits after 6 products with H"):
        vmc.lowest_energy(Written(matrix, 6), steps=6)
    matrix[3, 5] *= 1.001
    with pytest.raises(ValueError, match="is not Hermitian"):
        vmc.lowest_energy(Written(matrix, 6))


def test_the_ground_state_of_a_complex_hamiltonian_is_found():
    h = Written(draw_hermitian(16) - 2 * torch.ones(16, 16), 4)
    search = join(h, vmc.Enumerated(h.space), vmc.RBM(4, 8, complex_parameters=True, dtype=F64))
    found = search.run(40)[-1]
    assert abs(found.mean - vmc.lowest_energy(h)) < 0.1 * abs(vmc.lowest_energy(h))


# Exact nodes.


class Odd(nn.Module):
    """psi = (s_0 - s_1) phi(s), zero where the first two are equal whatever the parameters are."""

    def __init__(self, outputs: str) -> None:
        super().__init__()
        self.net, self.outputs = tanh_net(), outputs

    def forward(self, s: Tensor) -> Any:
        log, sign = self.net(s).squeeze(1), (s[:, 0] - s[:, 1]) / 2
        if self.outputs == "psi":
            return sign * log.exp()
        if self.outputs == "complex psi":
            return torch.polar(log.exp() * sign.abs(), s[:, 2])
        return (sign, torch.where(sign == 0, -torch.inf, log))


HEADS = {"psi": vmc.read_amplitude, "complex psi": vmc.read_amplitude, "sign": vmc.read_sign}


@pytest.mark.parametrize("outputs", HEADS)
def test_enumerated_takes_exact_nodes(outputs: str):
    """Energy and step are those of psi over all states, where the nodes have no weight."""
    psi, h = ng.LogAmplitude(Odd(outputs), head=HEADS[outputs]), vmc.Heisenberg(4)
    search = vmc.GroundState(h, vmc.Enumerated(h.space), ng.stochastic_reconfiguration(psi, lr=1e-3, damping=1e-3))
    every = h.space.all_states(F64)

    def energy() -> Tensor:
        log = psi(every).detach()
        vector = torch.where(log.real == -torch.inf, 0, log.exp()).to(torch.complex128)
        return torch.vdot(vector, h.matrix().to_dense().to(vector.dtype) @ vector).real / vector.norm().square()

    before = float(energy())
    assert_close(torch.tensor(search.measure().mean), torch.tensor(before), rtol=1e-12)
    search.run(5)
    assert float(energy()) < before
    drawn = vmc.ExactSampler(h.space, 50).draw(psi).states
    assert bool((drawn[..., 0] != drawn[..., 1]).all())


def test_a_psi_that_is_zero_everywhere_is_told():
    def build_nothing() -> nn.Module:
        return Assembled(lambda m, s: s @ m.weight, weight=nn.Parameter(torch.zeros(4, dtype=F64)))

    psi = ng.LogAmplitude(build_nothing(), head=vmc.read_amplitude)
    with pytest.raises(ValueError, match="psi is zero at every state of"):
        vmc.Enumerated(vmc.Spins(4)).draw(psi)
