"""The quantum geometric tensor against its definition, the Fisher matrix, and the layers' own."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close
from wave_functions import WAVES, all_spins

import natgrad as ng
from natgrad.testing import check_metric, check_operator


@pytest.mark.parametrize("name", WAVES)
@pytest.mark.parametrize("centred", [True, False])
def test_it_is_a_sound_operator_and_metric(name, centred):
    psi, states = WAVES[name](), all_spins()[:7]
    metric = ng.metrics.geometric_tensor(psi, centred=centred, outputs=psi.take_moving)
    check_operator(metric.at(ng.trainable(psi), (states, None)))
    check_metric(metric, ng.trainable(psi), (states, None))


def test_four_times_it_is_the_fisher_matrix_of_the_distribution():
    psi, states = WAVES["real log psi"](), all_spins()
    params = ng.trainable(psi)
    p = torch.softmax(2 * psi(states).detach(), 0)

    def logits(point: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.func.functional_call(psi, point, (x[0],)).unsqueeze(0)

    fisher = ng.fisher(logits, ng.Categorical()).at(params, states.unsqueeze(0))
    found = ng.metrics.geometric_tensor(psi).at(params, (states, p))
    assert_close(found.nats * found.dense(), fisher.dense(), rtol=1e-9)
    assert_close(found.diagonal(), found.dense().diagonal(), rtol=1e-9)


def test_a_number_times_psi_is_the_same_state():
    psi, states = WAVES["log psi and phase"](), all_spins()
    found = ng.metrics.geometric_tensor(psi).at(ng.trainable(psi), (states, torch.full((16,), 1 / 16, dtype=F64)))
    space = ng.Space(ng.trainable(psi))
    phase_and_length = space.flatten({"net.2.bias": torch.ones(2, dtype=F64)})
    assert float(found.mv(phase_and_length).abs().max()) < 1e-12
