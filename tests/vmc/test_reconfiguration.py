"""Stochastic reconfiguration against quantum mechanics by definition, on all states of a few spins."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close
from optim_models import pass_through_file
from torch import Tensor, nn
from wave_functions import WAVES, ComplexRBM, all_spins, draw_hermitian, enumerate_state, flat_parameters, tanh_net

import natgrad as ng
from natgrad.vmc.reconfiguration import pull_back

DAMPING = 1e-3


def step_of(psi: ng.LogAmplitude, sr: ng.vmc.StochasticReconfiguration, *data: Tensor, **how: bool) -> Tensor:
    """The step that the data lead to."""
    before = flat_parameters(psi)
    sr.step(*data, **how)
    return flat_parameters(psi) - before


def log_derivatives(psi: ng.LogAmplitude, states: Tensor) -> Tensor:
    """O (b, n), one backward pass per state and part."""
    params, log = ng.trainable(psi), psi(states).to(torch.complex128)
    space = ng.Space(params)

    def gradient(value: Tensor) -> Tensor:
        found = torch.autograd.grad(value, list(params.values()), retain_graph=True, allow_unused=True)
        return space.flatten(dict(zip(params, found, strict=True)))

    return torch.stack([torch.complex(gradient(one.real), gradient(one.imag)) for one in log])


@pytest.mark.parametrize("name", WAVES)
def test_the_step_is_by_definition(name):
    psi, states = WAVES[name](), all_spins()
    h = draw_hermitian(len(states), real=psi(states).is_complex() is False)
    vector, p, local = enumerate_state(psi, h, states)
    o = log_derivatives(psi, states)
    o = o - (p.unsqueeze(1) * o).sum(0)
    energy = (vector.conj() @ h.to(vector.dtype) @ vector).real
    s = ((o.mH * p) @ o).real
    force = ((o.mH * p) @ (local - (p * local).sum())).real
    expected = torch.linalg.solve(s + DAMPING * torch.eye(len(s), dtype=F64), force)
    params = ng.trainable(psi)
    slopes = torch.autograd.grad(energy, list(params.values()), allow_unused=True)
    slope = ng.Space(params).flatten(dict(zip(params, slopes, strict=True)))
    assert_close(2 * force, slope)  # F is half the energy's gradient: 2 Re Cov(O, e)
    sr = ng.stochastic_reconfiguration(psi, lr=0.1, damping=DAMPING, rule=ng.Rate())
    found = step_of(psi, sr, states, local, p, enumerated=True)
    assert_close(found, -0.1 * expected, rtol=1e-9)
    assert sr.energies[0].error == 0
    assert abs(sr.energies[0].mean - float(energy.detach())) < 1e-12


@pytest.mark.parametrize("name", WAVES)
def test_the_force_is_the_pull_back_where_states_have_no_probability(name):
    psi, states = WAVES[name](), all_spins()
    weights = torch.rand(len(states), generator=torch.Generator().manual_seed(1), dtype=F64)
    weights[::3] = 0
    metric = ng.metrics.geometric_tensor(psi, outputs=psi.take_moving)
    moment = metric.at(ng.trainable(psi), (states, weights / weights.sum())).moment
    cotangents = torch.randn(moment.outputs.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    cotangents[::3] = 0
    assert_close(pull_back(moment, cotangents), moment.linearization.vjp(cotangents), rtol=1e-9)


def test_complex_parameters_move_as_complex_numbers():
    net, states = ComplexRBM(), all_spins()
    psi = ng.LogAmplitude(net)
    _, p, local = enumerate_state(psi, draw_hermitian(len(states)), states)
    o = net.log_derivatives(states)
    o = o - (p.unsqueeze(1) * o).sum(0)
    s, force = (o.mH * p) @ o, (o.mH * p) @ (local - (p * local).sum())
    expected = torch.linalg.solve(s + DAMPING * torch.eye(len(s), dtype=s.dtype), force)
    before = torch.cat([net.W.reshape(-1), net.b]).clone()
    ng.stochastic_reconfiguration(psi, lr=0.1, damping=DAMPING, rule=ng.Rate()).step(states, local, p)
    assert_close(torch.cat([net.W.reshape(-1), net.b]) - before, -0.1 * expected, rtol=1e-9)  # the net itself moved


def test_momentum_is_the_damped_least_squares_of_spring():
    states, mu = all_spins()[[0, 3, 5, 6, 9]], 0.9
    psi = WAVES["log psi and phase"]()
    sr = ng.stochastic_reconfiguration(psi, lr=0.1, damping=DAMPING, momentum=mu, rule=ng.Rate())
    last = torch.zeros_like(flat_parameters(psi))
    for seed in range(3):
        local = torch.randn(5, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))
        o = log_derivatives(psi, states)
        o = (o - o.mean(0)) / 5**0.5
        rows = torch.cat([o.real, o.imag])
        goal = (local - local.mean()) / 5**0.5
        # min |rows d - goal|^2 + damping |d - mu last|^2, stacked
        root = DAMPING**0.5 * torch.eye(len(last), dtype=F64)
        target = torch.cat([goal.real, goal.imag, DAMPING**0.5 * mu * last])
        last = torch.linalg.lstsq(torch.cat([rows, root]), target.unsqueeze(1)).solution.squeeze(1)
        assert_close(step_of(psi, sr, states, local), -0.1 * last, rtol=1e-7)


def test_clipped_energies_count_in_the_step_and_not_in_the_energy():
    states, local = all_spins(), torch.ones(16, dtype=F64)
    local[3:9] = torch.tensor([2.0, 0.5, 1.5, 0.7, 1e6, -3.0], dtype=F64)
    clipped = local.clamp(max=1 + 5 * float((local - 1).abs().mean()))
    psi, other = WAVES["real log psi"](), WAVES["real log psi"]()
    sr = ng.stochastic_reconfiguration(psi, clip=5.0)
    assert_close(
        step_of(psi, sr, states, local),
        step_of(other, ng.stochastic_reconfiguration(other), states, clipped),
        rtol=1e-9,
    )
    assert sr.energies[0].mean == pytest.approx(float(local.mean()))


def test_a_trust_region_counts_nats_of_the_distribution():
    psi, states = WAVES["real log psi"](), all_spins()
    h = draw_hermitian(16, real=True)
    _, before, local = enumerate_state(psi, h, states)
    radius = 1e-8
    sr = ng.stochastic_reconfiguration(psi, lr=1.0, damping=DAMPING, rule=ng.TrustRegion(radius=radius))
    sr.step(states, local, before, enumerated=True)
    _, after, _ = enumerate_state(psi, h, states)
    assert float((before * (before / after).log()).sum()) == pytest.approx(radius, rel=1e-2)


def test_kronecker_factors_weigh_inputs_and_derivatives_by_the_probabilities():
    torch.manual_seed(0)
    net, states = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double(), all_spins()
    p = torch.rand(16, dtype=F64)
    p = p / p.sum()
    metric = ng.metrics.geometric_tensor(net, centred=False)
    found, _ = ng.Kronecker().update(None, metric, ng.trainable(net), (states, p))
    ones = torch.ones(16, 1, dtype=F64)
    inner = torch.tanh(net[0](states)).detach()
    slope = (1 - inner.square()) * net[2].weight.detach()
    blocks = []
    for delta, a in ((slope, states), (ones, inner)):  # row (o, i) of [W, b] is delta_o [a, 1]_i
        a = torch.cat([a, ones], dim=1)
        block = torch.kron((delta.mT * p) @ delta, (a.mT * p) @ a)
        o, i = delta.shape[1], a.shape[1]
        order = torch.arange(o * i).view(o, i)
        order = torch.cat([order[:, :-1].reshape(-1), order[:, -1]])  # ours has W first, then b
        blocks.append(block[order][:, order])
    assert_close(found.dense(), torch.block_diag(*blocks), rtol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_structures_step_ends_where_the_quadratic_with_s_is_lowest_along_it(momentum):
    psi, states = WAVES["real log psi"](), all_spins()
    _, p, local = enumerate_real(psi, states)
    choices = {"structure": ng.Kronecker(), "rule": ng.Rate(), "damping": DAMPING, "momentum": momentum}
    sr = ng.stochastic_reconfiguration(psi, lr=1.0, **choices)
    step = torch.zeros_like(flat_parameters(psi))
    for _ in range(2):  # the second has a momentum
        o, last = log_derivatives(psi, states).real, step
        o = o - (p.unsqueeze(1) * o).sum(0)
        step = step_of(psi, sr, states, local, p, enumerated=True)
        pulled = (o.mT * p) @ (local - p @ local) - DAMPING * momentum * last
        slope, form = -(step @ pulled), step @ ((o.mT * p) @ o + DAMPING * torch.eye(len(step), dtype=F64)) @ step
        assert_close(slope, form)
        assert sr.state_report().kl == pytest.approx(2 * float(step @ ((o.mT * p) @ o) @ step))
        _, p, local = enumerate_real(psi, states)


def enumerate_real(psi: ng.LogAmplitude, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of a real Hamiltonian with its probabilities and local energies."""
    vector, p, local = enumerate_state(psi, draw_hermitian(len(states), real=True), states)
    return vector, p, local.real


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_save_load_and_continue_equals_never_having_stopped(momentum):
    h, states = draw_hermitian(16), all_spins()

    def run(psi: ng.LogAmplitude, sr: ng.vmc.StochasticReconfiguration, steps: int) -> None:
        for _ in range(steps):
            _, p, local = enumerate_state(psi, h, states)
            sr.step(states, local, p, enumerated=True)

    def build() -> tuple[ng.LogAmplitude, ng.vmc.StochasticReconfiguration]:
        psi = WAVES["complex parameters"]()
        return psi, ng.stochastic_reconfiguration(psi, momentum=momentum)

    whole, half = build(), build()
    run(*whole, 6)
    run(*half, 3)
    saved, later = pass_through_file([part.state_dict() for part in half]), build()
    for part, state in zip(later, saved, strict=True):
        part.load_state_dict(state)
    run(*later, 3)
    assert torch.equal(flat_parameters(whole[0]), flat_parameters(later[0]))
    assert whole[1].energies == later[1].energies


def test_bad_input_is_named_at_the_door():
    psi, states = ng.LogAmplitude(tanh_net()), all_spins()
    sr = ng.stochastic_reconfiguration(psi)
    before, local = flat_parameters(psi), torch.ones(16, dtype=F64)
    with pytest.raises(ValueError, match=r"states has shape \(16, 4\) and local_energies \(15,\)"):
        sr.step(states, local[1:])
    with pytest.raises(ValueError, match=r"local_energies\[2\] is nan at the state \[-1.0, -1.0, 1.0, -1.0\]"):
        sr.step(states, local.index_fill(0, torch.tensor([2]), torch.nan))
    with pytest.raises(ValueError, match=r"weights add up to 16.0"):
        sr.step(states, local, local)
    with pytest.raises(ValueError, match=r"weights has shape \(15,\), expected \(16,\)"):
        sr.step(states, local, local[1:] / 15)
    with pytest.raises(ValueError, match=r"weights has entries down to -0\.5"):
        sr.step(states, local, torch.cat([-local[:1] / 2, local[1:] / 10]))
    with pytest.raises(TypeError, match=r"psi is Sequential, expected ng.LogAmplitude"):
        ng.stochastic_reconfiguration(tanh_net())
    with pytest.raises(ValueError, match=r"momentum is 1.0"):
        ng.stochastic_reconfiguration(psi, momentum=1.0)
    with pytest.raises(ValueError, match=r"one number for the whole of S"):
        ng.stochastic_reconfiguration(psi, momentum=0.9, damping=ng.Relative(0.1, per="block"))
    part = ng.LogAmplitude(tanh_net().requires_grad_(False))
    part.net[0].weight.requires_grad_(True)  # type: ignore[index, union-attr]
    partial_sr = ng.stochastic_reconfiguration(part)
    part.requires_grad_(True)
    with pytest.raises(ValueError, match=r"psi's parameters \['net.0.bias', .*\] were frozen when"):
        partial_sr.step(states, local)
    assert torch.equal(before, flat_parameters(psi))
    assert sr.energies == []
