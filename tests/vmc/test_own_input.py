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
