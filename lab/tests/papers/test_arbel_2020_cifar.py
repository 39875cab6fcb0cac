"""Classifiers with a fixed matrix before the last layer, and a contestant whose metric is of no likelihood."""

from __future__ import annotations

import pytest
import torch
from small_races import race, runs, task

import natgrad as ng
from natgrad.metrics import RBF
from natgrad_lab.experiments import Contestant, execute, find
from natgrad_lab.experiments.training import knows_criterion
from natgrad_lab.papers.arbel_2020.cifar import RACE, ArbelCifarSettings, FixedMatrix, network, tasks


def test_the_fixed_matrix_has_its_condition_and_is_as_long_as_the_identity():
    torch.manual_seed(0)
    for condition in (1.0, 50.0):
        values = torch.linalg.svdvals(FixedMatrix(16, condition).matrix.double())
        assert float(values[0] / values[-1]) == pytest.approx(condition, rel=1e-3)
        assert float(values.norm()) == pytest.approx(4.0, rel=1e-5)


def test_both_tasks_differ_by_the_matrix_alone():
    assert find("arbel_2020_cifar") is RACE
    well, ill = tasks(ArbelCifarSettings())
    assert {len(contestant.grid) for contestant in (*well.contestants, *ill.contestants)} == {5}
    torch.manual_seed(0)
    first = well.model()
    torch.manual_seed(0)
    second = ill.model()
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)
    assert network(8, 3.0)(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    falls = well.contestants[0].falls
    assert (falls(0.0), falls(1.0)) == (1.0, pytest.approx(0.05))


def test_every_contestant_takes_a_step():
    (task, _) = tasks(ArbelCifarSettings(side=8, basis=4, metric_batch=6))
    x, y = torch.randn(12, 3, 8, 8), torch.arange(12) % 10
    for contestant in task.contestants:
        torch.manual_seed(0)
        model = network(8, 10.0)
        optimizer = contestant.build(model, task.criterion, contestant.grid[1])
        before = task.criterion(model(x), y).item()
        for _ in range(3):
            optimizer.zero_grad()
            loss_of = optimizer.loss if knows_criterion(optimizer) else task.criterion
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
        assert task.criterion(model(x), y).item() < before


def test_a_race_goes_with_a_metric_of_no_likelihood(tmp_path):
    def build(model, criterion, choice):
        return ng.NaturalGradient(model, ng.transport_metric(model, kernel=RBF(), basis=4), choice["lr"], damping=0.1)

    contestant = Contestant("transport", ({"batch": 8, "lr": 0.05},), build)
    (record,) = runs(execute(race(task(among=(contestant,))), race().settings(), [0], tmp_path)).values()
    assert record.rows[-1]["train_loss"] < record.rows[0]["train_loss"]
