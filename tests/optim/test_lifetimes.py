"""Operators belong to the point at which they were taken; steps that are refused change nothing."""

from __future__ import annotations

import pytest
import torch
from models import Assembled, assert_close, draw, mlp
from torch import nn

import natgrad as ng

X, Y = draw(8, 3), torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.parametrize("first", ["product", "diagonal", "root"])
def test_an_operator_outlives_a_step_of_the_parameters(first):
    model = mlp(3, 4, 2)
    params = ng.trainable(model)
    operator = ng.fisher(model, ng.Categorical()).at(params, X)
    expected = ng.fisher(model, ng.Categorical()).at(params, X).dense()
    if first == "product":
        operator.mv(draw(operator.size))
    with torch.no_grad():
        for p in params.values():
            p.add_(0.5)
    if first == "diagonal":
        assert_close(operator.diagonal(), expected.diagonal())
    if first == "root":
        assert_close(operator.root() @ operator.root().mT, expected)
    assert_close(operator.mm(torch.eye(operator.size).double()), expected)


def test_a_refused_step_does_not_decay_the_weights():
    model = mlp(3, 4, 2)
    metric = ng.fisher(model, nn.CrossEntropyLoss())
    rule = ng.LineSearch(backtracks=1, sufficient=1e9)  # no step can be that good
    opt = ng.NaturalGradient(model, metric, damping=1e-2, weight_decay=0.1, rule=rule)
    before = flat(model)
    opt.loss(model(X), Y).backward()
    opt.step()
    assert opt.state_report().rate == 0
    assert torch.equal(flat(model), before)


def test_the_fisher_in_an_optimizer_weighs_rows_as_the_loss_does():
    weight = torch.tensor([1.0, 4.0], dtype=torch.float64)
    targets = torch.tensor([0, 1, -100, 1, -100, 0, -100, 0])
    moved = []
    for metric in (ng.fisher, ng.gauss_newton):
        model = mlp(3, 4, 2)
        opt = ng.NaturalGradient(model, metric(model, nn.CrossEntropyLoss(weight=weight)), damping=1e-2)
        opt.loss(model(X), targets).backward()
        opt.step()
        moved.append(flat(model))
    assert torch.equal(*moved)


def test_sums_and_shifts_keep_the_unit_of_their_terms():
    operator = ng.gauss_newton(mlp(3, 2), nn.MSELoss()).at(ng.trainable(mlp(3, 2)), (X, None))
    assert operator.nats == 2
    assert (operator + operator).nats == (2 * operator).nats == operator.shift(0.1).nats == 2
    with pytest.raises(ValueError, match="unit"):
        operator + ng.operators.DenseOperator(operator.dense())


def test_a_predicted_variance_counts_its_nats_per_example():
    def build_both() -> nn.Module:
        return Assembled(lambda m, x: (m.mean(x), m.spread(x).exp()), mean=mlp(3, 5), spread=mlp(3, 5))

    model = build_both()
    opt = ng.NaturalGradient(model, ng.fisher(model, nn.GaussianNLLLoss()), rule=ng.TrustRegion(0.01), damping=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt.loss(model(X), draw(8, 5, seed=4)).backward()
    opt.step()
    family = ng.HeteroscedasticGaussian(log_variance=False)
    old = family.rows(torch.func.functional_call(model, before, (X,)))
    moved = family.kl(old, family.rows(model(X))).sum() / 8
    assert abs(float(moved.detach()) - 0.01) < 0.002  # the radius, to second order
