"""Normals moved by four metrics: the loss, Fisher's matrix, and a page from few numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_study import finish
from torch.testing import assert_close

from natgrad.families import MeanCovariance, MultivariateNormal
from natgrad.geometry import Wasserstein
from natgrad_lab.experiments import find
from natgrad_lab.experiments.frame import Findings
from natgrad_lab.papers.arbel_2020 import toy

FEW = toy.ArbelSettings(draws=2, samples=40, steps=3)


def test_the_loss_is_the_squared_distance_of_the_geometry():
    task = toy.problem(3, 10.0, 0)
    mean, B = task.parts(task.start)
    normals = Wasserstein(3)
    distance = normals.distance(normals.join(mean, B @ B.mT), normals.join(task.goal, task.spread))
    assert_close(task.loss(task.start), distance.square())


def test_fishers_direction_solves_with_the_normals_own_matrix():
    task = toy.problem(2, 3.0, 1)
    xi = task.start + 0.1
    g = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    coordinates = MeanCovariance(MultivariateNormal(2))

    def name_moments(xi):
        mean, B = task.parts(xi)
        covariance = B @ B.mT
        return torch.stack([*mean, covariance[0, 0], covariance[1, 1], covariance[0, 1]])

    J = torch.autograd.functional.jacobian(name_moments, xi)
    fisher = J.mT @ coordinates.fisher(name_moments(xi)).dense() @ J
    d = toy.fisher_direction(task, xi, fisher @ g)
    assert_close(fisher @ d, fisher @ g, rtol=1e-5, atol=1e-6)


def test_errors_fall_with_samples():
    s = replace(FEW, draws=1)
    few, many = (
        sum(toy.relative_error(s, 1, n, torch.Generator().manual_seed(seed)) for seed in range(8)) for n in (30, 600)
    )
    assert many < 0.6 * few


def test_wasserstein_steps_forget_the_coordinates_and_others_do_not():
    s = replace(FEW, steps=4)
    for name, same in (("Wasserstein, E[J^T J]", True), ("gradient", False)):
        ends = [toy.descend(s, toy.problem(2, condition, 0), name, 0.1, 0)["losses"][-1] for condition in (1.0, 30.0)]
        assert (abs(ends[0] - ends[1]) < 1e-4 * ends[0]) is same


def test_runs_that_break_off_rank_last():
    s = replace(FEW, steps=2, level=0.5)
    assert toy.count_steps_to_level([1.0, 0.6, 0.4], s) == 2
    assert toy.count_steps_to_level([1.0, 0.4], s) is None
    assert toy.rank([1.0, 0.6, 0.4], s) < toy.rank([1.0, 0.9, 0.8], s) < toy.rank([1.0, float("nan")], s)


def test_the_page_tells_both_parts():
    study = find("arbel_2020_toy")
    story = study.tell(Findings(FEW, finish(study, FEW)))
    assert [section.title for section in story.sections] == ["Error", "Descent"]
    assert study.tell(Findings(FEW, ())).lead == "Nothing is finished yet."
