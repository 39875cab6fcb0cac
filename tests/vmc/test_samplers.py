"""Samplers against |psi|^2 over all states, within their standard errors."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from models import F64, Assembled, assert_close
from torch import Tensor, nn
from wave_functions import tanh_net

import natgrad as ng
from natgrad import vmc


class Weighted(nn.Module):
    """log psi of a linear and a quadratic form: any number of variables, any values."""

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.weight = nn.Parameter(0.3 * torch.randn(count, dtype=F64, generator=generator))
        self.pair = nn.Parameter(0.1 * torch.randn(count, count, dtype=F64, generator=generator))

    def forward(self, states: Tensor) -> Tensor:
        return states @ self.weight + torch.einsum("bi,ij,bj->b", states, self.pair, states)


def assert_drawn_from(space: vmc.Spins | vmc.Bosons, psi: ng.LogAmplitude, states: Tensor) -> None:
    """The counts of all states are those of |psi|^2: chi^2 within five standard deviations."""
    every = space.all_states(F64)
    p = torch.softmax(2 * psi(every).detach().real, 0)
    places = torch.searchsorted(space.number(every), space.number(states.flatten(0, -2)))
    counts = torch.bincount(places, minlength=len(every))
    expected = p * counts.sum()
    chi = float(((counts - expected).square() / expected.clamp(min=1e-9))[expected > 1].sum())
    freedom = int((expected > 1).sum())
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


CASES = {
    "flip": (vmc.Spins(4), None),
    "exchange": (vmc.Spins(5, 2), None),
    "exchange along edges": (vmc.Spins(5, 2), vmc.Exchange(vmc.chain_edges(5))),
    "flip of three values": (vmc.Bosons(2, None, 2), None),
    "hop": (vmc.Bosons(3, 3, 2), None),
    "hop along edges": (vmc.Bosons(3, 3, 2), vmc.Hop(2, vmc.chain_edges(3))),
}


@pytest.mark.parametrize("name", CASES)
def test_metropolis_draws_from_psi_squared(name):
    space, move = CASES[name]
    psi = ng.LogAmplitude(Weighted(space.count))
    sampler = vmc.Metropolis(space, move, samples=3000, sweep=20, burn_in=5)
    assert_drawn_from(space, psi, sampler.draw(psi).states)
    assert 0.05 < sampler.accepted < 0.95


def test_exact_and_ancestral_draws():
    space, psi = vmc.Spins(4), ng.LogAmplitude(Weighted(4))
    assert_drawn_from(space, psi, vmc.ExactSampler(space, 3000).draw(psi).states)
    net = ng.LogAmplitude(vmc.AutoregressiveNet(4, seed=3, dtype=F64, phase=True))
    every = space.all_states(F64)
    assert_close((2 * net(every).real).exp().sum(), torch.ones((), dtype=F64), rtol=1e-12)
    assert_drawn_from(space, net, vmc.AncestralSampler(3000).draw(net).states)
    with pytest.raises(TypeError, match=r"expected one with draw\(count, generator\)"):
        vmc.AncestralSampler().draw(psi)


def build_gaussian() -> nn.Module:
    """log psi = -sum_i a_i x_i^2 / 2: |psi|^2 is normal with variances 1 / (2 a_i)."""
    return Assembled(lambda m, x: -(m.a * x.square()).sum(1) / 2, a=nn.Parameter(torch.tensor([0.5, 2.0], dtype=F64)))


class Line:
    """Where walkers start."""

    count = 2

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, 2, generator=generator, dtype=dtype)


@pytest.mark.parametrize("move", [None, vmc.Shift(single=1)])
def test_shifts_are_tuned_and_draw_from_psi_squared(move):
    psi = ng.LogAmplitude(build_gaussian())
    sampler = vmc.Metropolis(Line(), move, samples=2000, width=0.01, burn_in=40, acceptance=0.6)
    squares = sampler.draw(psi).states.square().flatten(0, 1)
    assert abs(sampler.accepted - 0.6) < 0.1
    errors = squares.std(0) / math.sqrt(2000)
    assert bool(((squares.mean(0) - torch.tensor([1.0, 0.25])).abs() < 5 * errors).all())


def test_walkers_leave_a_node_and_never_enter_one():
    class Node(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tanh_net()

        def forward(self, s: Tensor) -> Tensor:
            log = self.net(s).squeeze(1)
            return torch.where(s[:, 0] > 0, log, -torch.inf)

    sampler = vmc.Metropolis(vmc.Spins(4), samples=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = sampler.draw(ng.LogAmplitude(Node())).states
    assert bool((states[..., 0] > 0).all())


class Table(nn.Module):
    """log psi of every state of a space, written out; with a parameter that it could do without."""

    def __init__(self, space: vmc.Spins, logs: Tensor) -> None:
        super().__init__()
        self.space, self.logs, self.scale = space, logs, nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, s: Tensor) -> Tensor:
        return (
            self.scale * self.logs[torch.searchsorted(self.space.number(self.space.all_states()), self.space.number(s))]
        )


def test_walkers_that_rest_at_the_likeliest_states_are_no_trouble():
    h = vmc.Heisenberg(8, sublattice=range(0, 8, 2))
    ground = torch.linalg.eigh(h.matrix().to_dense())[1][:, 0]
    psi, sampler = ng.LogAmplitude(Table(h.space, ground.abs().log())), vmc.Metropolis(h.space, samples=1000)
    rests = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(25):
            sampler.draw(psi)
            rests += len(sampler.stuck)
    assert rests


def test_stuck_walkers_are_told_of_once():
    space = vmc.Spins(3)
    psi, sampler = ng.LogAmplitude(Table(space, torch.zeros(8, dtype=F64))), vmc.Metropolis(space, samples=20)
    sampler.draw(psi)
    sampler.move = vmc.Flip((1.0, 1.0))  # from 1 to 1
    sampler.states = torch.ones(20, 3, dtype=F64)
    with pytest.warns(UserWarning, match="20 of 20 walkers accepted no move for 20 sweeps") as caught:
        [sampler.draw(psi) for _ in range(25)]
    assert len(caught) == 1
    assert len(sampler.stuck) == 20


def test_bad_input_is_named_at_the_door():
    with pytest.raises(ValueError, match="samples is 10, expected a multiple of chains, 3"):
        vmc.Metropolis(vmc.Spins(3), samples=10, chains=3)
    with pytest.raises(ValueError, match="acceptance is 1"):
        vmc.Metropolis(vmc.Spins(3), acceptance=1)
    with pytest.raises(TypeError, match="did you mean 'width'"):
        vmc.Metropolis(vmc.Spins(3), widht=0.1)  # pyright: ignore[reportCallIssue]
    tuned = vmc.Metropolis(vmc.Spins(3), tuning=vmc.WidthTuning(0.2, 0.4))
    assert (tuned.width, tuned.acceptance) == (0.2, 0.4)
    one = vmc.Metropolis(vmc.Spins(3), samples=10)
    with pytest.raises(ValueError, match="state_dict has 4 chains, expected 10"):
        one.load_state_dict(one.state_dict() | {"states": torch.ones(4, 3)})
    with pytest.raises(ValueError, match="the state lacks"):
        one.load_state_dict({})
