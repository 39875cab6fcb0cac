"""The metric on part of a large batch."""

from __future__ import annotations

import pytest
import torch
from models import assert_close, draw, mlp
from torch import nn

import natgrad as ng

X, Y = draw(12, 3), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1])


def build(model: nn.Module, **choices) -> ng.NaturalGradient:
    """Exact steps, so that only the data decide."""
    metric = ng.gauss_newton(model, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0], dtype=torch.float64)))
    return ng.NaturalGradient(model, metric, lr=0.5, solver=ng.Direct(), damping=1e-2, **choices)


def step(model: nn.Module, opt: ng.NaturalGradient) -> None:
    opt.zero_grad()
    opt.loss(model(X), Y).backward()
    opt.step()


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_the_metric_is_that_of_the_drawn_examples_and_the_gradient_that_of_all():
    part, observed = mlp(3, 4, 2), mlp(3, 4, 2)
    opt, reference = build(part, metric_batch=5), build(observed)
    seen = []
    for _ in range(3):
        drawn = torch.randperm(12, generator=torch.Generator().manual_seed(opt.state_report().step))[:5]
        seen.append(set(drawn.tolist()))
        reference.observe(X[drawn], Y[drawn])
        step(part, opt)
        step(observed, reference)
        assert_close(flat(part), flat(observed), 1e-13)
    assert seen[0] != seen[1]


def test_a_batch_that_is_small_enough_is_taken_whole():
    part, whole = mlp(3, 4, 2), mlp(3, 4, 2)
    step(part, build(part, metric_batch=12))
    step(whole, build(whole))
    assert torch.equal(flat(part), flat(whole))


@pytest.mark.parametrize("size", [0, -3])
def test_a_size_below_one_is_refused(size):
    with pytest.raises(ValueError, match="metric_batch"):
        build(mlp(3, 2), metric_batch=size)
