"""Means of wave functions over permutations of the sites."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close

import natgrad as ng


@pytest.mark.parametrize("complex_parameters", [False, True])
def test_psi_is_the_mean_over_translations_and_does_not_change_by_one(complex_parameters):
    rbm = ng.vmc.RBM(6, complex_parameters=complex_parameters, scale=0.5, dtype=F64)
    translations, states = ng.vmc.square_translations(2, 3), ng.vmc.Spins(6).all_states(F64)
    psi = ng.LogAmplitude(ng.vmc.SymmetricNet(rbm, translations))
    found = psi(states).detach().exp()
    assert_close(found, torch.stack([rbm(states[:, one]).detach().exp() for one in translations]).mean(0), rtol=1e-12)
    for one in translations:
        assert_close(psi(states[:, one]).detach().exp(), found, rtol=1e-12)


def test_translations_map_the_lattice_onto_itself():
    edges = set(ng.vmc.square_edges(3, 4))
    translations = ng.vmc.square_translations(3, 4)
    assert len({tuple(one) for one in translations}) == 12
    for one in translations:
        assert {tuple(sorted((one[a], one[b]))) for a, b in edges} == edges
    assert ng.vmc.chain_translations(4) == ng.vmc.square_translations(1, 4)


def test_a_symmetric_net_finds_the_ground_state_of_a_chain():
    h = ng.vmc.Heisenberg(6, sublattice=[0, 2, 4])
    psi = ng.LogAmplitude(ng.vmc.SymmetricNet(ng.vmc.RBM(6, dtype=F64), ng.vmc.chain_translations(6)))
    search = ng.vmc.GroundState(h, ng.vmc.Enumerated(h.space), ng.stochastic_reconfiguration(psi, lr=0.1))
    energy, exact = search.run(60)[-1].mean, ng.vmc.lowest_energy(h)
    assert exact - 1e-9 < energy < exact * (1 - 0.01)


def test_what_is_no_permutation_is_refused():
    for wrong in ([], [[0, 1, 1]], [[0, 1, 2], [0, 1]]):
        with pytest.raises(ValueError, match=r"lists of all sites"):
            ng.vmc.SymmetricNet(ng.vmc.RBM(3), wrong)
