"""Networks, graphs and Hamiltonians of one's own: what is taken, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad import vmc


def test_edges_come_from_anything_that_lists_pairs():
    pairs = [(0, 1), (1, 2)]
    edges: Any
    for edges in (torch.tensor(pairs), np.array(pairs), dict.fromkeys(pairs)):
        assert vmc.TransverseIsing(3, edges=edges).edges == pairs
    labels: Any = [((0, 0), (0, 1))]
    with pytest.raises(ValueError, match="convert_node_labels"):
        vmc.Heisenberg(4, edges=labels)
    with pytest.raises(ValueError, match=r"sublattice is \[0, 1, 0, 1\].*range\(0, 4, 2\)"):
        vmc.Heisenberg(4, sublattice=[0, 1, 0, 1])


@pytest.mark.parametrize("found", [(torch.ones(4, 3), torch.ones(4)), (torch.ones(4, 2, 3), [1.0]), (None, None)])
def test_connections_of_another_shape_are_refused(found):
    class Own:
        def connected(self, states: Tensor) -> Any:
            return found

    with pytest.raises(ValueError, match=r"Own\.connected\(states\) returned .* \(4, k, 3\)"):
        vmc.local_energies(ng.LogAmplitude(vmc.RBM(3)), Own(), torch.ones(4, 3))


@pytest.mark.parametrize("part", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_a_network_that_needs_a_batch_or_chance_is_refused(part):
    sr = ng.stochastic_reconfiguration(ng.LogAmplitude(nn.Sequential(nn.Linear(4, 3), part, nn.Linear(3, 1))))
    with pytest.raises(ValueError, match=r"psi\.net\.1 is a (Dropout in training mode|BatchNorm1d with moments)"):
        sr.step(torch.ones(5, 4), torch.randn(5))


def test_arrays_are_taken_as_samples_and_energies():
    h, generator = vmc.TransverseIsing(4), np.random.default_rng(0)
    states, shares = generator.choice([-1, 1], (3, 5, 4)).astype(np.int8), np.full((3, 5), 1 / 15)
    found = []
    for given in (states, torch.as_tensor(states).double()):
        psi = ng.LogAmplitude(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double())
        with torch.no_grad():
            psi.net[0].weight.fill_(0.1), psi.net[2].weight.fill_(0.2)  # type: ignore[index]
            psi.net[0].bias.zero_(), psi.net[2].bias.zero_()  # type: ignore[index]
        local = vmc.local_energies(psi, h, given)
        as_given = local.numpy() if isinstance(given, np.ndarray) else local
        sr = ng.stochastic_reconfiguration(psi)
        energy = sr.step(given, as_given, shares if isinstance(given, np.ndarray) else torch.as_tensor(shares))
        found.append((energy.mean, [p.detach().clone() for p in psi.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


NEAR = [(0, 1), (1, 2), (2, 3)]
MODELS = {
    "transverse Ising": vmc.TransverseIsing(4, NEAR, field=0.7, coupling=0.3),
    "Heisenberg": vmc.Heisenberg(4, NEAR, coupling=0.3, up=2),
    "Bose-Hubbard": vmc.BoseHubbard(4, NEAR, hopping=0.7, interaction=1.3),
}


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_states_of_integers_or_of_single_precision_have_the_same_local_energies(name, kind):
    h, psi = MODELS[name], ng.LogAmplitude(vmc.RBM(4, dtype=torch.float64))
    states = h.space.all_states(torch.float64)
    found = vmc.local_energies(psi, h, states.to(kind))
    torch.testing.assert_close(found, vmc.local_energies(psi, h, states), rtol=1e-13, atol=1e-13)
    assert found.dtype == torch.float64


class Embedded(nn.Module):
    """log psi from an embedding, which takes integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(2, 3), nn.Linear(12, 1)

    def forward(self, states: Tensor) -> Tensor:
        if states.is_floating_point():
            raise TypeError("integers are wanted")
        return self.last(torch.tanh(self.table((states > 0).long()).flatten(1)))


def test_integers_go_to_a_network_that_takes_them_and_are_refused_by_one_that_does_not():
    h, states = vmc.TransverseIsing(4), vmc.Spins(4).all_states().to(torch.int8)
    psi = ng.LogAmplitude(Embedded().double())
    local = vmc.local_energies(psi, h, states)
    assert ng.stochastic_reconfiguration(psi).step(states, local).samples == 16
    plain = ng.LogAmplitude(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    for call in (
        lambda: vmc.local_energies(plain, h, states),
        lambda: ng.stochastic_reconfiguration(plain).step(states, local),
    ):
        with pytest.raises(
            ValueError, match=r"states is torch\.int8.*convert with states\.to\(psi\.dtype\), torch\.float32"
        ):
            call()


class LocalEstimators:
    """What NetKet's `state.local_estimators(H)` gives: JAX's protocol, and no array of NumPy's."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __jax_array__(self) -> np.ndarray:
        return self.data


def test_local_estimators_of_netket_are_energies():
    states, local = torch.ones(2, 5, 4), np.linspace(0, 1, 10).reshape(2, 5)
    sr = ng.stochastic_reconfiguration(ng.LogAmplitude(vmc.RBM(4)))
    assert sr.step(states, LocalEstimators(local)).mean == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["states", "local_energies", "weights"])
def test_what_is_no_array_is_refused(name):
    given = {"states": torch.ones(5, 4), "local_energies": torch.zeros(5), "weights": torch.full((5,), 0.2)}
    sr = ng.stochastic_reconfiguration(ng.LogAmplitude(vmc.RBM(4)))
    with pytest.raises(TypeError, match=f"{name} is object, expected a tensor"):
        sr.step(**{**given, name: object()})


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"damping": ng.LevenbergMarquardt(1e-3)}, "damping is LevenbergMarquardt.*take a number"),
        ({"rule": ng.LineSearch(1)}, r"rule is LineSearch.*take ng\.TrustRegion"),
    ],
)
def test_choices_that_compare_losses_are_refused_at_the_door(choices, words):
    with pytest.raises(ValueError, match=words):
        ng.stochastic_reconfiguration(ng.LogAmplitude(vmc.RBM(4)), **choices)
