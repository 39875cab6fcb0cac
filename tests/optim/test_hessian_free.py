"""The first recipe, truncated Newton with Levenberg-Marquardt damping."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from models import build_seeded, draw, mlp
from optim_models import CE, iterate
from torch import Tensor, nn

import natgrad as ng


def clusters(classes: int = 5, size: int = 200) -> tuple[Tensor, Tensor]:
    """Images that look a little like digits: noisy prototypes of 16 pixels, on very different scales."""
    y = torch.arange(size) % classes
    prototypes = draw(classes, 16, seed=21)
    x = prototypes[y] + 0.8 * draw(size, 16, seed=22)
    return x * torch.logspace(-1, 1, 16, dtype=torch.float64), y


def train(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """Full-batch losses, before every step and at the end."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        own = isinstance(optimizer, ng.NaturalGradient)
        loss = optimizer.loss(model(x), y) if own else CE(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses, float(CE(model(x), y).detach())]


def test_ten_steps_reach_lower_than_ten_of_plain_gradient_descent_at_its_best_rate() -> None:
    x, y = clusters()
    start = mlp(16, 12, 5)
    plain = []
    for lr in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        model = copy.deepcopy(start)
        plain.append(train(torch.optim.SGD(model.parameters(), lr=lr), model, x, y, 10)[-1])
    model = copy.deepcopy(start)
    losses = train(ng.hessian_free(model, CE), model, x, y, 10)
    assert losses[-1] < 0.2 * min(plain)
    assert all(b <= a for a, b in pairwise(losses))  # the line search never raises it


def test_it_learns_an_autoencoder_of_bits() -> None:
    x = (draw(100, 16, seed=4) @ torch.diag(torch.ones(16).double()) > 0.3).double()
    model = mlp(16, 8, 3, 8, 16)
    criterion = nn.BCEWithLogitsLoss()
    opt = ng.hessian_free(model, criterion)
    first = float(criterion(model(x), x).detach())
    for _ in range(15):
        iterate(opt, model, x, x)
    assert float(criterion(model(x), x).detach()) < 0.85 * first


def test_its_damping_follows_its_ratio() -> None:
    x, y = clusters()
    model = mlp(16, 6, 5)
    opt = ng.hessian_free(model, CE)
    dampings, ratios = [], []
    for _ in range(8):
        iterate(opt, model, x, y)
        told = opt.state_report()
        dampings.append(told.damping)
        ratios.append(told.ratio)
    for before, after, ratio in zip(dampings, dampings[1:], ratios, strict=False):
        assert after == ng.LevenbergMarquardt().update(before, ratio)


def test_it_trains_a_convolutional_net_with_dropout_and_batch_norm() -> None:
    model = build_seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16, 5),
        )
    )
    x, y = clusters(size=60)
    x = (x / torch.logspace(-1, 1, 16, dtype=torch.float64)).view(-1, 1, 4, 4)
    opt = ng.hessian_free(model, CE)
    losses = train(opt, model, x, y, 4)
    assert losses[-1] < 0.8 * losses[0]
    assert opt.state_report().failures == 0
