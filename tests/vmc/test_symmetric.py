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


def test_what_is_no_permutation_is_refused():
    for wrong in ([], [[0, 1, 1]], [[0, 1, 2], [0, 1]]):
        with pytest.raises(ValueError, match=r"lists of all sites"):
            ng.vmc.SymmetricNet(ng.vmc.RBM(3), wrong)
