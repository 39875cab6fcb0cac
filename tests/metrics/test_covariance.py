"""TONGA's metrics: moments of the per-example gradients, in sample space."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import F64, assert_close, draw, mlp
from torch import Tensor, nn

import natgrad as ng
from natgrad.testing import check_metric, check_operator

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "mlp.json").read_text(encoding="utf-8"))
FAMILIES = {"gaussian": ng.Gaussian(0.7), "bernoulli": ng.Bernoulli(), "categorical": ng.Categorical()}


def lower(rows: list[list[float]]) -> Tensor:
    """A symmetric matrix from the rows of its lower triangle."""
    matrix = torch.zeros(len(rows), len(rows), dtype=F64)
    for i, row in enumerate(rows):
        matrix[i, : i + 1] = matrix[: i + 1, i] = torch.tensor(row, dtype=F64)
    return matrix


def reference_net() -> tuple[nn.Module, Tensor]:
    """The network of the reference values, and its inputs."""
    net = {key: torch.tensor(VECTORS["net"][key], dtype=F64) for key in ("W1", "b1", "W2", "b2", "X")}
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        for p, key in zip(model.parameters(), ("W1", "b1", "W2", "b2"), strict=True):
            p.copy_(net[key])
    return model, net["X"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("solver", [ng.SampleSpace(), ng.Direct(), ng.Auto(), ng.CG(rtol=1e-12), ng.MinresQLP(1e-12)])
def test_steps_agree_with_reference_values(name, solver):
    model, x = reference_net()
    expected = VECTORS[name]
    data = (x, torch.tensor(expected["targets"], dtype=F64))
    gradient = torch.tensor(expected["gradient"], dtype=F64)
    for centred, matrix, step in (
        (False, "empirical_fisher_lower", "tonga_uncentred"),
        (True, "centred_covariance_lower", "tonga_centred"),
    ):
        operator = ng.covariance(model, FAMILIES[name], centred=centred).at(ng.trainable(model), data)
        assert_close(operator.dense(), lower(expected[matrix]))
        found = ng.natural_gradient(operator, gradient, solver=solver, damping=VECTORS["net"]["damping"]).value
        assert_close(found, torch.tensor(expected[step], dtype=F64), rtol=1e-11)


@pytest.mark.parametrize("centred", [False, True])
def test_covariance_is_a_sound_operator_and_metric(centred):
    model, x, t = mlp(3, 4, 2), draw(5, 3), torch.tensor([0, 1, 1, 0, 1])
    metric = ng.covariance(model, nn.CrossEntropyLoss(), centred=centred)
    check_operator(metric.at(ng.trainable(model), (x, t)))
    check_metric(metric, ng.trainable(model), (x, t))
