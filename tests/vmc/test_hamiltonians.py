"""Lattice Hamiltonians against sums of Kronecker products, and local energies against H psi / psi."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from models import F64, assert_close
from torch import Tensor
from wave_functions import WAVES, all_spins

from natgrad import vmc

# the order of states is (-1, 1): down first
X = torch.tensor([[0, 1], [1, 0]], dtype=torch.complex128)
Y = torch.tensor([[0, 1j], [-1j, 0]], dtype=torch.complex128)
Z = torch.tensor([[-1, 0], [0, 1]], dtype=torch.complex128)


def place(count: int, **factors: Tensor) -> Tensor:
    """The product of one-site operators, at sites named s0, s1, ..."""
    size = len(next(iter(factors.values())))
    eye = torch.eye(size, dtype=torch.complex128)
    return functools.reduce(torch.kron, [factors.get(f"s{i}", eye).contiguous() for i in range(count)])


def couple(count: int, pair: tuple[int, int], one: Tensor, other: Tensor) -> Tensor:
    """A two-site operator."""
    return place(count, **{f"s{pair[0]}": one, f"s{pair[1]}": other})


def restrict(matrix: Tensor, kept: Tensor) -> Tensor:
    """Rows and columns of the kept states."""
    return matrix[kept][:, kept].real


EDGES = [(0, 1), (1, 2), (2, 3), (0, 2)]
COUPLINGS = [1.0, -0.5, 2.0, 0.3]


def test_transverse_ising_is_its_sum_of_products():
    h = vmc.TransverseIsing(4, EDGES, field=0.7, coupling=COUPLINGS)
    expected = -sum(j * couple(4, pair, Z, Z) for pair, j in zip(EDGES, COUPLINGS, strict=True))
    expected = expected - 0.7 * sum(place(4, **{f"s{i}": X}) for i in range(4))
    assert_close(h.matrix().to_dense(), expected.real)


@pytest.mark.parametrize("sublattice", [(), (0, 2)])
def test_heisenberg_is_its_sum_of_products(sublattice):
    h = vmc.Heisenberg(4, EDGES, COUPLINGS, sublattice)
    expected = sum(j / 4 * couple(4, pair, s, s) for pair, j in zip(EDGES, COUPLINGS, strict=True) for s in (X, Y, Z))
    turn = place(4, **{f"s{i}": Z for i in sublattice}) if sublattice else torch.eye(16, dtype=torch.complex128)
    kept = all_spins().sum(1) == 0
    assert_close(h.matrix().to_dense(), restrict(turn @ expected @ turn, kept))


@pytest.mark.parametrize("particles", [None, 2])
def test_bose_hubbard_is_its_sum_of_products(particles):
    most, pairs = 2, [(0, 1), (1, 2), (0, 2)]
    raising = torch.diag(torch.arange(1.0, most + 1, dtype=F64).sqrt(), -1).to(torch.complex128)
    numbers = torch.diag(torch.arange(most + 1.0, dtype=F64)).to(torch.complex128)
    onsite = numbers @ (numbers - torch.eye(most + 1)) / 2
    hops = sum(couple(3, pair, raising, raising.mT) + couple(3, pair, raising.mT, raising) for pair in pairs)
    expected = -0.8 * hops + 3.0 * sum(place(3, **{f"s{i}": onsite}) for i in range(3))
    h = vmc.BoseHubbard(3, hopping=0.8, interaction=3.0, particles=particles, most=most)
    total = vmc.Bosons(3, None, most).all_states().sum(1)
    assert_close(h.matrix().to_dense(), restrict(expected, total == (3 if particles is None else particles)))


@pytest.mark.parametrize("space", [vmc.Spins(5), vmc.Spins(5, 2), vmc.Bosons(3, None, 2), vmc.Bosons(4, 3, 2)])
def test_states_are_all_different_in_order_and_drawn_within(space):
    states = space.all_states(F64)
    numbers = space.number(states)
    assert len(states) == space.size
    assert bool((numbers.diff() > 0).all())
    drawn = space.draw((200,), torch.Generator().manual_seed(0), F64)
    assert set(space.number(drawn).tolist()) <= set(numbers.tolist())
    assert len(set(space.number(drawn).tolist())) > space.size / 2


class Connected:
    """A Hamiltonian of somebody's own."""

    def __init__(self, inner: vmc.Hamiltonian) -> None:
        self.inner = inner

    def connected(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.connected(states)


class Padded:
    """What NetKet's operators offer: NumPy arrays in and out, padded with zeros."""

    def __init__(self, inner: vmc.Hamiltonian) -> None:
        self.inner = inner

    def get_conn_padded(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        others, values = self.inner.connected(torch.as_tensor(states))
        return others.numpy(), values.numpy()


@pytest.mark.parametrize("wrap", [lambda h: h, Connected, Padded])
@pytest.mark.parametrize("name", WAVES)
def test_local_energies_are_h_psi_over_psi(name, wrap):
    psi, states = WAVES[name](), all_spins()
    h = vmc.TransverseIsing(4, EDGES, 0.7, COUPLINGS)
    vector = psi(states).detach().to(torch.complex128).exp()
    expected = (h.matrix().to_dense().to(vector.dtype) @ vector) / vector
    found = vmc.local_energies(psi, wrap(h), states, chunk_size=7)
    assert_close(found.to(torch.complex128), expected, rtol=1e-11)
    assert_close(vmc.local_energies(psi, wrap(h), states.view(4, 4, 4)), found.view(4, 4))


@pytest.mark.parametrize("wrap", [lambda h: h, Connected, Padded])
def test_the_lowest_energy_is_that_of_anything_with_connections(wrap):
    h = vmc.Heisenberg(4, EDGES)
    assert (
        abs(vmc.lowest_energy(wrap(h), space=h.space) - float(torch.linalg.eigvalsh(h.matrix().to_dense())[0])) < 1e-12
    )


def test_the_lowest_energy_is_over_the_states_that_a_hamiltonian_has():
    class Field(Connected):
        space = vmc.Spins(6)

        def connected(self, states: Tensor) -> tuple[Tensor, Tensor]:
            return states[:, None, :], states[:, :1]

    h = vmc.TransverseIsing(4)
    assert vmc.lowest_energy(Field(h)) == -1.0
    with pytest.raises(ValueError, match="leads out of Spins"):
        vmc.lowest_energy(h, space=vmc.Spins(4, 2))
    for other in (Connected(h), vmc.Molecule.helium()):
        with pytest.raises(TypeError, match=r"over None, expected an ng\.vmc\.Hamiltonian.*space=ng\.vmc\.Spins"):
            vmc.lowest_energy(other)


def test_bad_input_is_named_at_the_door():
    with pytest.raises(ValueError, match=r"edges has \(0, 4\), expected pairs of different sites from 0 to 3"):
        vmc.TransverseIsing(4, [(0, 4)])
    with pytest.raises(ValueError, match="coupling has 1 numbers"):
        vmc.Heisenberg(4, EDGES, [1.0])
    with pytest.raises(TypeError, match="hamiltonian is int"):
        vmc.local_energies(WAVES["real log psi"](), 3, all_spins())
    with pytest.raises(ValueError, match="expected at most 4194304 to enumerate"):
        vmc.Spins(40).all_states()
    with pytest.raises(ValueError, match="up is 5"):
        vmc.Spins(4, 5)
