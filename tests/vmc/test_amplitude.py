"""psi as a module with real parameters, and its means over permutations of the sites."""

from __future__ import annotations

import math

import pytest
import torch
from models import F64, assert_close
from torch import nn
from wave_functions import all_spins, tanh_net

import natgrad as ng


def test_every_head_says_the_same_of_one_wave_function():
    states, net = all_spins(), tanh_net()
    psi = net(states).squeeze(1).detach()
    expected = torch.complex(psi, torch.zeros_like(psi)).log()
    forms = {
        ng.vmc.read_amplitude: psi.unsqueeze(1),
        ng.vmc.read_sign: (psi.sign(), psi.abs().log()),
        ng.vmc.read_phase: torch.stack([psi.abs().log(), math.pi * (psi < 0).double()], dim=1),
        ng.vmc.read_log: expected,
    }
    assert bool((psi < 0).any())
    assert bool((psi > 0).any())
    for head, outputs in forms.items():
        assert_close(head(outputs), expected)


def test_bad_input_is_named_at_the_door():
    with pytest.raises(ValueError, match=r"head=vmc.read_phase"):
        ng.LogAmplitude(tanh_net(2))(all_spins())
    with pytest.raises(ValueError, match=r"expected \(log \|psi\|, phase\)"):
        ng.LogAmplitude(tanh_net(3), head=ng.vmc.read_phase)(all_spins())
    with pytest.raises(TypeError, match=r"net is function"):
        ng.LogAmplitude(lambda s: s)
    shared = nn.ModuleList([nn.Linear(2, 2, dtype=torch.complex128), nn.Linear(2, 2, dtype=torch.complex128)])
    shared[1].weight = shared[0].weight
    with pytest.raises(ValueError, match=r"shares a complex parameter"):
        ng.LogAmplitude(shared)
    assert ng.LogAmplitude(tanh_net()).dtype == F64


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
