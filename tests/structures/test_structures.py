"""How a metric is remembered between steps."""

from __future__ import annotations

import pytest
import torch
from models import CASES, Case, assert_close, draw
from optim_models import deep, net, pass_through_file, same
from torch import nn

import natgrad as ng
from natgrad.structures import accumulate_total, accumulate_weight
from natgrad.testing import check_structure

STRUCTURES = [ng.Exact(), ng.Dense(), ng.Dense(decay=0.9)]
BATCHES = [draw(5, 3, seed=seed) for seed in range(4)]


def fix_case() -> tuple[nn.Module, ng.Metric]:
    model = net()
    return model, ng.fisher(model, ng.Categorical())


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_structures_pass_the_public_check_and_have_a_plain_memory(structure: ng.Structure) -> None:
    model, metric = fix_case()
    params = ng.trainable(model)
    check_structure(structure, metric, params, BATCHES[0])
    _, memory = structure.update(None, metric, params, BATCHES[0])
    kept = deep(memory)
    first, _ = structure.update(memory, metric, params, BATCHES[1])
    assert same(memory, kept)
    second, _ = structure.update(pass_through_file(memory), metric, params, BATCHES[1])
    assert torch.equal(first.dense(), second.dense())


@pytest.mark.parametrize("name", ["mlp", "tied", "frozen", "in-place rectifier", "batch norm, training", "dropout"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_the_first_operator_is_the_metric(structure: ng.Structure, name: str) -> None:
    case: Case = CASES[name]
    model, params = case.make()
    metric, random = ng.fisher(model, case.family), torch.get_rng_state()
    operator, _ = structure.update(None, metric, params, case.inputs)
    torch.set_rng_state(random)
    assert_close(operator.dense(), metric.at(params, case.inputs).dense(), 1e-13)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_dense_is_the_bias_corrected_running_average(decay: float) -> None:
    model, metric = fix_case()
    params, memory, structure = ng.trainable(model), None, ng.Dense(decay)
    matrices = []
    for t, x in enumerate(BATCHES):
        matrices.append(metric.at(params, x).dense())
        operator, memory = structure.update(memory, metric, params, x)
        weights = torch.tensor([decay ** (t - s) for s in range(t + 1)], dtype=torch.float64)
        expected = torch.einsum("s,sab->ab", weights / weights.sum(), torch.stack(matrices))
        assert_close(operator.dense(), expected, 1e-13)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, float("nan")])
def test_decay_is_checked(decay: float) -> None:
    with pytest.raises(ValueError, match=f"decay is {decay}, expected a number in"):
        ng.Dense(decay)


# running averages: a total over its weight is sum_s decay^(t - s) x_s / sum_s decay^(t - s)


DECAY = 0.7


def test_a_total_over_its_weight_is_the_weighted_mean():
    batches, counts = torch.randn(5, 3, dtype=torch.float64), [4, 1, 2, 8, 3]
    total, weight = None, None
    for batch, count in zip(batches, counts, strict=True):
        total, weight = accumulate_total(total, count * batch, DECAY), accumulate_weight(weight, DECAY, count)
    assert total is not None
    assert weight is not None
    ages = DECAY ** torch.arange(4, -1, -1, dtype=torch.float64) * torch.tensor(counts)
    assert_close(total / weight, (ages[:, None] * batches).sum(0) / ages.sum(), 1e-12)
