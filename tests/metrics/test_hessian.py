"""Newton's matrix: products, units, indefinite systems and the saddle-safe step."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close, draw
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn import functional

import natgrad as ng

X, T, Y = draw(6, 3), draw(6, 2, seed=1), torch.tensor([0, 1, 2, 1, 0, 2])


def reference(model: nn.Module, loss, x: Tensor, t: Tensor) -> Tensor:
    """The Hessian by torch.func, as a matrix in the order of ng.trainable."""
    params = {name: p.detach() for name, p in ng.trainable(model).items()}
    space = ng.Space(params)
    return hessian(lambda v: loss(functional_call(model, space.unflatten(v), (x,)), t))(space.flatten(params))


LOSSES = {
    "MSE": (nn.MSELoss(), 2, T),
    "MSE, sum": (nn.MSELoss(reduction="sum"), 2, T),
    "cross-entropy": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=F64)), 3, Y),
    "a function": (lambda r, t: (r - t).pow(4).mean(), 2, T),
    "Huber": (nn.HuberLoss(delta=0.3), 2, T),
    "a module that is no likelihood": (nn.MultiLabelSoftMarginLoss(), 2, (T > 0).double()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_second_derivative_of_the_mean_loss(name):
    loss, outputs, t = LOSSES[name]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    H = ng.hessian(model, loss).at(ng.trainable(model), (X, t))
    expected = reference(model, loss, X, t)
    expected = expected / (t.numel() if name == "MSE, sum" else 1)
    assert_close(H.dense(), expected, 1e-12)
    assert H.indefinite
    assert float(torch.linalg.eigvalsh(expected)[0]) < 0  # the case is one where it matters


def test_it_stays_at_its_point_and_is_zero_where_the_loss_is_linear():
    model = nn.Linear(3, 1).double()
    H = ng.hessian(model, lambda r, t: r.mean()).at(ng.trainable(model), (X, T))
    assert not H.mv(draw(4)).any()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    H = ng.hessian(model, nn.CrossEntropyLoss()).at(ng.trainable(model), (X, Y))
    before = H.dense()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert torch.equal(H.dense(), before)


def test_auto_takes_solvers_that_stand_negative_eigenvalues():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    H = ng.hessian(model, nn.MSELoss()).at(ng.trainable(model), (X, T))
    b, expected = draw(H.size, seed=3), torch.linalg.pinv(H.dense(), rtol=1e-12)
    assert_close(ng.Auto().solve(H, b).value, expected @ b, 1e-6)
    assert isinstance(ng.Auto(dense=3).choose(H), ng.MinresQLP)
    assert isinstance(ng.Auto(dense=3).choose(2.0 * H.shift(0.1) + H), ng.MinresQLP)


@pytest.mark.parametrize(("family", "width"), [(ng.GaussianPosterior(), 4), (ng.LogDensity(), 1)])
def test_losses_without_targets_have_their_derivatives(family, width):
    model = nn.Linear(3, width).double()
    params, sizes = ng.trainable(model), [p.numel() for p in model.parameters()]

    def losses(theta):
        weight, bias = theta.split(sizes)
        return family.nll(functional.linear(X, weight.view(width, 3), bias), None)

    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected = torch.autograd.functional.hessian(lambda theta: losses(theta).mean(), theta)
    assert_close(ng.hessian(model, family).at(params, (X, None)).dense(), expected, 1e-12)
    scores = torch.autograd.functional.jacobian(losses, theta)
    metric = ng.empirical_fisher(model, family)
    moment = metric.at(params, (X, None) if metric.needs_targets else X)
    assert_close(moment.dense(), scores.mT @ scores / len(X), 1e-12)
    for build in (ng.hessian, ng.empirical_fisher, ng.covariance):
        opt = ng.NaturalGradient(model, build(model, family), damping=1.0)
        opt.zero_grad()
        opt.loss(model(X), None).backward()
        opt.step()


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda m: ng.hessian(m, nn.MSELoss).at(ng.trainable(m), (X, T)), TypeError, "class MSELoss"),
        (lambda m: ng.hessian(m, 3).at(ng.trainable(m), (X, T)), TypeError, "criterion is int"),  # type: ignore[arg-type]
        (lambda m: ng.hessian(m, nn.MSELoss()).at(ng.trainable(m), (X, None)), ValueError, "targets is None"),
        (lambda m: ng.hessian(m, nn.MSELoss()).at(ng.trainable(m), X), ValueError, "expected a tuple"),
        (lambda m: ng.hessian(m, lambda r, t: r - t).at(ng.trainable(m), (X, T)), ValueError, "scalar"),
        (lambda m: ng.hessian(m, lambda r, t: t.mean()).at(ng.trainable(m), (X, T)), ValueError, "does not depend"),
        (lambda m: ng.hessian(m, nn.MSELoss()).at(ng.trainable(m), (X / 0, T)), ValueError, "loss is nan"),
    ],
)
def test_bad_input_is_named(call, kind, words):
    with pytest.raises(kind, match=words):
        call(nn.Linear(3, 2).double())
