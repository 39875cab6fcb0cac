"""psi as a module with real parameters."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from models import F64, assert_close
from torch import nn
from wave_functions import WAVES, ComplexRBM, SignedNet, all_spins, tanh_net

import natgrad as ng
from natgrad.vmc.networks import log_cosh


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


@pytest.mark.parametrize("name", WAVES)
def test_parameters_are_real(name):
    psi = WAVES[name]()
    assert not any(p.is_complex() for p in psi.parameters())


def test_complex_parameters_keep_their_values_and_convert():
    states, net = all_spins(), ComplexRBM()
    before, weight = net(states).detach(), net.W.detach().clone()
    psi = ng.LogAmplitude(net)
    assert torch.equal(psi(states), before)
    assert torch.equal(net.W, weight)
    assert sum(p.numel() for p in psi.parameters()) == 2 * 15
    other = copy.deepcopy(psi).float()
    assert_close(other(states.float()).to(before.dtype), before, rtol=1e-6)
    assert torch.equal(psi(states), before)


def test_a_real_sign_has_no_derivative_and_a_complex_one_has():
    states = all_spins()
    for complex_sign, columns in ((False, 1), (True, 2)):
        psi = ng.LogAmplitude(SignedNet(complex_sign), head=ng.vmc.read_sign)
        assert psi.take_moving(psi(states)).is_complex() is complex_sign
        metric = ng.metrics.geometric_tensor(psi, outputs=psi.take_moving)
        assert metric.at(ng.trainable(psi), (states, None)).rank == columns * len(states)


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


def test_log_cosh_and_its_slope_hold_at_all_sizes():
    z = torch.tensor([-800.0, -1.0, 0.0, 1e-9, 2.0, 800.0], dtype=torch.float64, requires_grad=True)
    value = log_cosh(z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    expected = torch.where(z.abs() < 100, torch.cosh(z.clamp(-100, 100)).log(), z.abs() - math.log(2))
    torch.testing.assert_close(value, expected, atol=1e-15, rtol=1e-14)
    torch.testing.assert_close(slope, torch.tanh(z), atol=1e-15, rtol=1e-14)
