"""Machines with hidden bits against sums over all states: log p, gradient, natural direction, draws, log Z."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import F64
from torch import Tensor
from torch.testing import assert_close

from natgrad.energies.boltzmann import list_bit_states
from natgrad.energies.restricted_boltzmann import PersistentLikelihood, RestrictedBoltzmann

MACHINE = RestrictedBoltzmann(4, 3)


def draw_parameters(scale: float = 0.8, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    params = MACHINE.parameters(scale, generator=generator, dtype=F64)
    with torch.no_grad():
        for name in ("b", "c"):
            params[name].copy_(0.5 * torch.randn(len(params[name]), generator=generator, dtype=F64))
    return params


def measure_joint(params: Any) -> tuple[Tensor, Tensor]:
    """T = (x, h, h x^T) of all joint states, (states, n), and their probabilities."""
    both = list_bit_states(7)
    x, h = both[:, :4], both[:, 4:]
    T = torch.cat([x, h, (h.unsqueeze(2) * x.unsqueeze(1)).flatten(1)], 1)
    theta = torch.cat([params[name].detach().flatten() for name in ("b", "c", "W")])
    return T, (T @ theta).softmax(0)


def build_trainer(params: dict[str, Tensor], **options: Any) -> PersistentLikelihood:
    """Its chains are all visible states, to be weighted with their probabilities."""
    return PersistentLikelihood(MACHINE, params, list_bit_states(4), 0.1, **options)


def flatten(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([parts[name].flatten() for name in ("b", "c", "W")])


def test_log_p_sums_the_hidden_bits_out():
    params, x = draw_parameters(), list_bit_states(4)
    T, shares = measure_joint(params)
    marginal = shares.view(16, 8).sum(1)
    assert_close(MACHINE.log_p(params, x).detach().softmax(0), marginal)
    assert_close(MACHINE.hidden_means(params, x).detach()[:, 0], shares.view(16, 2, 4)[:, 1].sum(1) / marginal)
    assert T.shape == (128, 19)


def test_the_gradient_is_that_of_the_exact_likelihood():
    params, states = draw_parameters(), list_bit_states(4)
    X = states[[1, 5, 5, 14]]
    loss = MACHINE.log_p(params, states).logsumexp(0) - MACHINE.log_p(params, X).mean()
    expected = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    shares = MACHINE.log_p(params, states).detach().softmax(0)
    assert_close(build_trainer(params, natural=False).find_direction(X, shares), expected)


def test_the_natural_direction_is_exact_where_both_layers_are_independent():
    params = draw_parameters()
    with torch.no_grad():
        params["W"].zero_()
    T, shares = measure_joint(params)
    centred = T - shares @ T
    fisher = (centred * shares.unsqueeze(1)).mT @ centred
    X = list_bit_states(4)[[1, 5, 5, 14]]
    visible = MACHINE.log_p(params, list_bit_states(4)).detach().softmax(0)
    gradient = flatten(build_trainer(params, natural=False).find_direction(X, visible))
    found = flatten(build_trainer(params, damping=1e-12).find_direction(X, visible))
    assert_close(fisher @ found, gradient, rtol=1e-8, atol=1e-9)


def test_draws_follow_the_distribution():
    params, states = draw_parameters(), list_bit_states(4)
    generator = torch.Generator().manual_seed(0)
    x = MACHINE.gibbs(params, torch.zeros(4000, 4, dtype=F64), sweeps=40, generator=generator)
    mean = MACHINE.log_p(params, states).detach().softmax(0) @ states
    assert ((x.mean(0) - mean).abs() < 5 * (mean * (1 - mean) / 4000).sqrt()).all()


def test_annealed_importance_sampling_finds_the_constant():
    params = draw_parameters()
    exact = MACHINE.log_p(params, list_bit_states(4)).logsumexp(0).item()
    generator = torch.Generator().manual_seed(0)
    found, error = MACHINE.estimate_log_partition(params, torch.zeros(4, dtype=F64), levels=200, generator=generator)
    assert error.item() < 0.1
    assert abs(found.item() - exact) < 5 * error.item()


def test_steps_raise_the_likelihood():
    params, states = draw_parameters(0.1), list_bit_states(4)
    generator = torch.Generator().manual_seed(0)
    X = states[torch.tensor([0, 15]).repeat(50)]

    def measure() -> float:
        return (MACHINE.log_p(params, X).mean() - MACHINE.log_p(params, states).logsumexp(0)).item()

    before = measure()
    trainer = PersistentLikelihood(MACHINE, params, X.clone(), 0.05, momentum=0.5, generator=generator)
    for _ in range(100):
        trainer.step(X)
    assert measure() > before + 0.5


@pytest.mark.parametrize(
    ("options", "message"), [({"damping": 0.0}, "damping"), ({"momentum": 1.0}, "momentum"), ({"sweeps": 0}, "sweeps")]
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_trainer(draw_parameters(), **options)


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (torch.zeros(2, 3), r"X has shape \(2, 3\), expected \(b, 4\)"),
        (torch.full((2, 4), 0.5), "expected 0 and 1 only"),
        (torch.full((2, 4), torch.nan), "NaN"),
    ],
)
def test_a_step_on_no_bits_is_refused_and_moves_nothing(X: Tensor, message: str):
    params, chains = draw_parameters(), list_bit_states(4)
    before = {name: p.detach().clone() for name, p in params.items()}
    trainer = PersistentLikelihood(MACHINE, params, chains, 0.1)
    with pytest.raises(ValueError, match=message):
        trainer.step(X.double())
    assert all(torch.equal(p, before[name]) for name, p in params.items())
    assert trainer.chains is chains
    with pytest.raises(ValueError, match=message):
        MACHINE.gibbs(params, X.double())
