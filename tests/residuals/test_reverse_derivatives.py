"""Terms that differentiate with `torch.autograd.grad`, as people write them elsewhere: the numbers of ng.laplacian."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from residual_nets import draw, perceptron
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.residuals.system import LinearisedTerms

Term = Callable[..., Any]


def slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)[0]


def in_place(u: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    first = torch.autograd.grad(u(x).sum(), x, create_graph=True)[0]
    return sum((torch.autograd.grad(first[i], x, create_graph=True)[0][i] for i in range(2)), start=torch.sin(x[0]))


def on_a_copy(u: Any, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_(True)
    first = slope(u(x), x)
    return slope(first[0], x)[0] + slope(first[1], x)[1] + torch.sin(x[0])


def without_asking(u: Any, x: Tensor) -> Tensor:
    first = slope(u(x), x)
    return slope(first[0], x)[0] + slope(first[1], x)[1] + torch.sin(x[0])


def without_a_graph(u: Any, x: Tensor) -> Tensor:
    first = slope(u(x), x)
    return sum((torch.autograd.grad(first[i], x, retain_graph=True)[0][i] for i in range(2)), start=torch.sin(x[0]))


def by_coordinate(u: Any, x: Tensor) -> Tensor:
    a, b = x[:1].requires_grad_(), x[1:].requires_grad_()
    y = u(torch.cat([a, b]))
    return slope(slope(y, a), a) + slope(slope(y, b), b) + torch.sin(a)


def by_torch_func(u: Any, x: Tensor) -> Tensor:
    return torch.func.hessian(u)(x)[0].trace() + torch.sin(x[0])


def by_both(u: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    first = torch.func.jacrev(u)(x)[0]
    return sum((slope(first[i], x)[i] for i in range(2)), start=torch.sin(x[0]))


def linearise(net: nn.Module, term: Term, points: Tensor) -> LinearisedTerms:
    opt = ng.residuals(net, {"inside": term})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "natgrad")
        now = opt.system.linearise(ng.trainable(net), {"inside": (points,)})
    assert_close(opt.system.residuals(ng.trainable(net), now), now.residuals)
    return now


def check_same(net: nn.Module, term: Term, own: Term) -> None:
    found, expected = linearise(net, term, draw(5)), linearise(net, own, draw(5))
    assert_close(found.residuals, expected.residuals, rtol=1e-10, atol=1e-12)
    assert_close(found.operator.rows.dense(), expected.operator.rows.dense(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "term", [in_place, on_a_copy, without_asking, without_a_graph, by_coordinate, by_torch_func, by_both]
)
def test_second_derivatives_are_those_of_the_laplacian(term: Term):
    check_same(perceptron(2, 6, 1), term, lambda u, x: ng.laplacian(u, x) + torch.sin(x[0]))


def test_mixed_and_third_derivatives_and_several_components():
    def theirs(u: Any, x: Tensor) -> Tensor:
        y = u(x)
        first = slope(y[0], x)
        return torch.stack([slope(first[0], x)[1], slope(slope(first[0], x)[0], x)[0], slope(y[1], x)[1] * y[0]])

    def ours(u: Any, x: Tensor) -> Tensor:
        first = ng.jacobian(u, x)
        mixed = ng.grad(lambda y: ng.jacobian(u, y)[0, 0], x)[1]
        third = ng.grad(lambda y: ng.laplacian(u, y, [0])[0], x)[0]
        return torch.stack([mixed, third, first[1, 1] * u(x)[0]])

    check_same(perceptron(2, 6, 2), theirs, ours)


def test_coefficients_are_trained_through_them():
    net, k = perceptron(2, 6, 1), nn.Parameter(torch.tensor(0.5).double())
    unknowns, points = {"u": net, "k": k}, draw(6)
    steps = []
    for derivative in (without_asking, lambda u, x: ng.laplacian(u, x) + torch.sin(x[0])):
        with torch.no_grad():
            k.fill_(0.5)
        opt = ng.residuals(unknowns, {"inside": lambda u, k, x, f=derivative: k * f(u, x) - u(x)}, params=[k])
        opt.step(inside=points)
        steps.append(float(k.detach()))
    assert steps[0] != 0.5
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


class Force(nn.Module):
    """The slope of an energy, taken in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = perceptron(2, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_()
            return slope(self.energy(x), x)


def test_a_network_may_differentiate_in_its_forward_pass():
    net = Force()
    found = linearise(net, lambda u, x: u(x) - x, draw(5))
    expected = linearise(net.energy, lambda u, x: ng.grad(u, x) - x, draw(5))
    assert_close(found.residuals, expected.residuals)
    assert_close(found.operator.rows.dense(), expected.operator.rows.dense(), rtol=1e-9, atol=1e-11)


def test_a_term_that_cannot_be_batched_has_the_same_rows_and_says_so():
    def branches(u: Any, x: Tensor) -> Tensor:
        return without_asking(u, x) * (2 if x[0] > 0.5 else 1)

    net = perceptron(2, 6, 1)
    opt = ng.residuals(net, {"inside": branches})
    with pytest.warns(UserWarning, match="term 'inside' takes one backward pass per residual"):
        found = opt.system.linearise(ng.trainable(net), {"inside": (draw(5),)})
    expected = linearise(net, lambda u, x: without_asking(u, x) * torch.where(x[0] > 0.5, 2.0, 1.0), draw(5))
    assert_close(found.residuals, expected.residuals)
    assert_close(found.operator.rows.dense(), expected.operator.rows.dense(), rtol=1e-9, atol=1e-11)


def test_what_is_not_in_the_graph_is_said_as_torch_says_it():
    opt = ng.residuals(
        perceptron(2, 6, 1), {"inside": lambda u, x: slope(u(x), torch.ones(2).double().requires_grad_())}
    )
    with pytest.raises(RuntimeError, match="not have been used") as caught:
        opt.step(inside=draw(3))
    assert any("the term 'inside'" in note for note in caught.value.__notes__)


def test_a_training_goes_as_with_own_derivatives():
    edge = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double()
    losses = []
    for term in (without_asking, lambda u, x: ng.laplacian(u, x) + torch.sin(x[0])):
        opt = ng.residuals(perceptron(2, 6, 1), {"inside": term, "edge": lambda u, x: u(x)})
        losses.append([float(opt.step(inside=draw(20), edge=edge)) for _ in range(6)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][-1] < losses[0][0] / 10
    assert math.isfinite(losses[0][-1])
