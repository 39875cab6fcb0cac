"""Networks, graphs and Hamiltonians of one's own: what is taken, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.applications import vmc


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
