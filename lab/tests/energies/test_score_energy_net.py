"""Energy networks by denoising: the densities, one step, and a page for two dimensions and for digits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_study import finish

import natgrad as ng
from natgrad_lab.energies import score_energy_net
from natgrad_lab.experiments import find
from natgrad_lab.experiments.frame import Findings

FEW = score_energy_net.ScoreEnergySettings(tasks="rings,digits", seconds=0.01, batch=20, width=8)


def test_rings_and_arms_lie_where_they_should():
    generator = torch.Generator().manual_seed(0)
    radii = score_energy_net.rings(2000, generator).norm(dim=1)
    assert (radii - radii.round()).abs().max() < 0.3
    assert set(radii.round().tolist()) == {1.0, 2.0, 3.0}
    arms = score_energy_net.spiral(2000, generator)
    assert 2.8 < arms.norm(dim=1).max() < 3.3
    inner = arms[(arms.norm(dim=1) - 2).abs() < 0.1]  # a whole turn out: the first arm along +x, the second along -x
    assert (inner[:, 0].abs() > 1.5).float().mean() > 0.9


@pytest.mark.parametrize(("task", "turns"), [("rings", 90), ("spiral", 400)])
def test_the_exact_score_is_that_of_a_smooth_density_and_leaves_noise_alone(task, turns):
    traced, noise = score_energy_net.trace(task, turns), 0.4
    x = torch.tensor([[1.1, 0.3], [-0.4, 2.2], [2.5, 2.0]], dtype=torch.float64, requires_grad=True)
    variance = traced.variance + noise**2
    log_p = (traced.weights.log() - torch.cdist(x, traced.points).square() / (2 * variance)).logsumexp(1)
    (expected,) = torch.autograd.grad(log_p.sum(), x)
    torch.testing.assert_close(score_energy_net.exact_score(traced, x.detach(), noise), expected)
    draw, generator = score_energy_net.source(task)[0], torch.Generator().manual_seed(0)
    z = torch.randn(4000, 2, generator=generator)
    noisy = draw(4000, generator) + noise * z
    left = (
        score_energy_net.exact_score(traced, noisy, noise) + z / noise
    )  # no function of x explains more: orthogonal to all of them
    for tried in (noisy, noisy.square(), noisy.sin()):
        terms = left * tried
        assert terms.mean().abs() < 4 * terms.std() / terms.numel() ** 0.5


@pytest.mark.parametrize("method", ["K-FAC", "Adam"])
def test_steps_lower_the_loss(method):
    s = replace(FEW, kfac=0.5, width=16)
    draw, test = score_energy_net.source("rings")
    score, generator = ng.Score(score_energy_net.network("rings", 2, s.width, 0)), torch.Generator().manual_seed(0)
    opt = score_energy_net.optimizers(s)[method](score)
    before = score_energy_net.held_out(score, test, 0.5)
    assert abs(before - 1) < 0.1
    for _ in range(40):
        score_energy_net.step(opt, score, draw(100, generator), 0.5, generator)
    assert score_energy_net.held_out(score, test, 0.5) < 0.97 * before


def test_the_page_tells_every_task(monkeypatch):
    monkeypatch.setattr(score_energy_net, "STEPS", {"flat": 20, "images": 20})
    study = find("score_energy_net")
    pieces = finish(study, FEW)
    story = study.tell(Findings(FEW, pieces))
    assert [section.title for section in story.sections] == ["rings", "digits"]
    assert "of 2 tasks" in story.lead
    assert len(study.tell(Findings(FEW, pieces[:1])).sections) == 1
