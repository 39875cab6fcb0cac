"""A parameter that the outputs depend on and their graph does not show is named, never counted as independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close, build_seeded, cross, draw
from optim_models import RECIPES, Closure, flat, same, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import natgrad as ng

X, Y = draw(16, 4), torch.arange(16) % 3
CE = nn.CrossEntropyLoss()


class Holding(torch.autograd.Function):
    """Runs a module in its own backward pass: the module's parameters are no arguments of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        with torch.enable_grad():
            point = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.part(point), gradient)
        assert point.grad is not None
        return point.grad, None


class Taking(torch.autograd.Function):
    """x W^T with W among its arguments, as it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Net(nn.Module):
    """4 -> 5 -> 5 -> 3, whose middle layer runs in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.kept = list(self.middle.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(getattr(self, self.way)(self.first(x).tanh()).tanh())

    def openly(self, z: Tensor) -> Tensor:
        return self.middle(z)

    def by_arguments(self, z: Tensor) -> Tensor:
        return Taking.apply(z, self.middle.weight) + self.middle.bias  # type: ignore[no-any-return]

    def reentrant(self, z: Tensor) -> Tensor:
        return checkpoint(self.middle, z.detach().requires_grad_(), use_reentrant=True)  # type: ignore[return-value]

    def function(self, z: Tensor) -> Tensor:
        return Holding.apply(z, self.middle)  # type: ignore[no-any-return]

    def openly_and_not(self, z: Tensor) -> Tensor:
        return self.middle(z) + Holding.apply(z.sin(), self.middle)

    def hook(self, z: Tensor) -> Tensor:
        found = self.middle(z.detach()).detach() + 0 * z
        again = z.detach()

        def go_backward(gradient: Tensor) -> None:
            with torch.enable_grad():
                self.middle(again).backward(gradient)

        found.register_hook(go_backward)
        return found

    def list_beside(self, z: Tensor) -> Tensor:
        return nn.functional.linear(z, *self.kept)

    def stop(self, z: Tensor) -> Tensor:  # straight through: no backward pass reaches the layer
        return z + (self.middle(z) - z).detach()


HIDDEN = ("reentrant", "function", "openly_and_not", "hook")
METRICS: dict[str, Callable[[nn.Module], Any]] = {
    "fisher": lambda net: ng.fisher(net, CE).at(ng.trainable(net), X),
    "sampled_fisher": lambda net: ng.sampled_fisher(net, CE).at(ng.trainable(net), X),
    "transport": lambda net: ng.transport_metric(net).at(ng.trainable(net), X),
    **{
        metric.__name__: lambda net, metric=metric: metric(net, CE).at(ng.trainable(net), (X, Y))
        for metric in (ng.gauss_newton, ng.empirical_fisher, ng.covariance, ng.hessian)
    },
}


def make(way: str) -> Any:
    return build_seeded(lambda: Net(way))


@pytest.mark.parametrize("way", [*HIDDEN, "list_beside"])
@pytest.mark.parametrize("metric", METRICS)
def test_metrics_name_parameters_whose_derivative_is_hidden(metric: str, way: str) -> None:
    net = make(way)
    CE(net(X), Y).backward()
    before = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    with pytest.raises(ValueError, match=r"\['middle.bias', 'middle.weight'\]"):
        METRICS[metric](net)
    assert same({name: p.grad for name, p in net.named_parameters()}, before)


@pytest.mark.parametrize(("recipe", "way"), cross(RECIPES[:1], RECIPES[1:], HIDDEN))
def test_optimizers_name_parameters_whose_derivative_is_hidden(recipe: Any, way: str) -> None:
    net = make(way)
    opt, before = recipe(net, CE), flat(net)
    closure = Closure(opt, lambda: opt.loss(net(X), Y))
    with pytest.raises(ValueError, match=r"\['middle.bias', 'middle.weight'\]"):
        opt.step(closure)
    assert torch.equal(flat(net), before)
    net.way = "openly"
    opt.step(closure)  # goes on once nothing is hidden
    assert not torch.equal(flat(net), before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_derivative_that_is_hidden_later_is_named_too(recipe: Any) -> None:
    net = make("openly")
    opt = recipe(net, CE, **({"update_every": 1} if recipe is ng.kfac else {}))
    train(opt, net, 2, X, Y)
    net.way = "reentrant"
    with pytest.raises(ValueError, match=r"middle.weight"):
        train(opt, net, 38, X, Y)


@pytest.mark.parametrize(
    "metric", sorted(METRICS.keys() - {"sampled_fisher", "hessian"})
)  # drawn; no second derivative
def test_a_function_that_takes_its_parameters_as_arguments_gives_the_same_matrix(metric: str) -> None:
    expected, found = METRICS[metric](make("openly")), METRICS[metric](make("by_arguments"))
    assert_close(found.diagonal(), expected.diagonal(), 1e-12)


@pytest.mark.filterwarnings("ignore")  # of the other loss
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stopped_gradient_is_the_users_choice(recipe: Any) -> None:
    """A codebook behind a straight-through estimator: its gradient comes from a loss of its own."""
    net = make("stop")
    opt = recipe(net, CE)
    opt.zero_grad()
    (opt.loss(net(X), Y) + net.middle.weight.square().sum()).backward()
    opt.step()
    assert opt.state_report().step == 1
