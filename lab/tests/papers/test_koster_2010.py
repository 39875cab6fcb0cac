"""The two-layer model on photographs: patches as said, measures of features that know a grating, and a page."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from models import assert_close
from small_study import finish

from natgrad.energies import TwoLayer
from natgrad_lab.data import sample_photographs
from natgrad_lab.experiments import PieceRun, find
from natgrad_lab.experiments.frame import Findings
from natgrad_lab.papers.koster_2010 import natural_images

FEW = natural_images.KosterSettings(
    photographs="embedded", size=6, keep=8, patches=1200, batch=20, seconds=0.05, metric_batch=10
)


def gratings(*angles: float) -> torch.Tensor:
    """Sine waves of one period in eight pixels, running along these directions."""
    down, right = torch.meshgrid(torch.arange(24.0).double(), torch.arange(24.0).double(), indexing="ij")
    return torch.stack([torch.sin((right * math.cos(a) + down * math.sin(a)) * math.pi / 4) for a in angles])


def test_patches_are_white_and_the_maps_are_inverse():
    data = natural_images.patches(FEW, 0)
    rows = torch.cat([data.train, data.test])
    assert_close(rows.mT @ rows / len(rows), torch.eye(8), rtol=2e-4)
    assert_close(data.whitening.mT @ data.dewhitening, torch.eye(8), rtol=1e-4)
    assert data.dewhitening.sum(0).abs().max() < 1e-4 * data.dewhitening.abs().max() * 36  # no mean in any of them
    assert torch.equal(natural_images.patches(FEW, 0).train, data.train)
    assert not torch.equal(natural_images.patches(FEW, 1).train, data.train)


def test_photographs_are_grey():
    for image in sample_photographs():
        assert image.shape == (427, 640)
        assert 0 <= image.min() < 0.2 < 0.8 < image.max() <= 1


def test_measures_know_gratings_and_spots():
    waves = gratings(0.3, 0.3, 0.3 + math.pi / 2)
    assert natural_images.coherence(waves).min() > 0.9
    checks = waves[:1] + gratings(0.3 + math.pi / 2)
    assert natural_images.coherence(checks).item() < 0.2
    spot = torch.zeros(1, 24, 24).double()
    spot[0, 5:7, 5:7] = 1
    assert natural_images.extent(spot).item() < 0.01 < 0.3 < natural_images.extent(waves).min()
    V = torch.ones(1, 2).double()
    assert_close(natural_images.likeness(waves[:2], V), torch.tensor(1.0).double(), rtol=1e-6)
    assert natural_images.likeness(waves[1:], V) < -0.9


def test_every_method_trains_and_the_page_tells_it():
    study = find("koster_2010_natural_images")
    pieces = finish(study, FEW)
    assert all(piece.numbers["steps"] >= 1 for piece in pieces)
    story = study.tell(Findings(FEW, pieces))
    assert "orientations" in story.lead
    assert len(story.sections) == 5
    assert len(study.tell(Findings(FEW, pieces[:1])).sections) == 2


def test_adam_lowers_the_loss():
    numbers = natural_images.training(PieceRun(replace(FEW, seconds=0.5), 0), "Adam")
    assert numbers["curve"][-1][2] < numbers["curve"][0][2]


def test_pooling_starts_near_the_identity():
    params = natural_images.start(8, 0)
    assert_close(params["W"].detach() @ params["W"].detach().mT, torch.eye(8), rtol=1e-5)
    V = params["V"].detach().exp()
    assert V.diagonal().min() > 10 * (V - torch.diag(V.diagonal())).max()


def test_no_step_of_feature_blocks_raises_the_loss_of_its_batch():
    params = {name: p.detach().double() for name, p in natural_images.start(5, 0).items()}
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)).double()
    rule = natural_images.FeatureBlocks(params, TwoLayer(), lr=1.0, damping=1e-2, radius=0.5, every=2, examples=20)
    losses = [float(TwoLayer().loss(params, x))]
    for _ in range(8):
        free = {name: p.clone().requires_grad_() for name, p in params.items()}
        slopes = torch.autograd.grad(TwoLayer().loss(free, x), list(free.values()))
        rule.take_step(dict(zip(free, slopes, strict=True)), x)
        losses.append(float(TwoLayer().loss(params, x)))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
