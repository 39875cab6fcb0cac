"""Energies whose derivatives in x are carried through their layers: the same numbers as derivatives of any density."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from energies import energy_net
from models import assert_close, build_seeded, draw
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.densities import Density, Energy


def deep(activation: Callable[[], nn.Module] = nn.Tanh, inputs: int = 3) -> nn.Module:
    """Nested, with a square layer's worth of everything that passes through."""
    inner: Any = lambda: nn.Sequential(nn.Linear(5, 6, bias=False), activation(), nn.Dropout(0.5).eval())  # noqa: E731
    outer: Any = lambda: nn.Sequential(  # noqa: E731
        nn.Flatten(), nn.Linear(inputs, 5), activation(), inner(), nn.Identity(), nn.Linear(6, 4), activation(),
        nn.Linear(4, 1),
    )  # fmt: skip
    return build_seeded(outer)


def use_parts_again() -> nn.Module:
    """One activation after every layer, and a block without parameters in two places."""
    act, block = nn.Tanh(), nn.Sequential(nn.Softplus(), nn.Identity())
    return nn.Sequential(
        nn.Linear(3, 5), act, nn.Linear(5, 5), block, nn.Linear(5, 4), act, nn.Linear(4, 4), block, nn.Linear(4, 1)
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "two hidden layers": energy_net,
    "deep": deep,
    "linear": lambda: build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))),
    "activation first": lambda: build_seeded(lambda: nn.Sequential(nn.Tanh(), nn.Linear(3, 1))),
    "activation last": lambda: build_seeded(lambda: nn.Sequential(nn.Linear(3, 1), nn.Softplus())),
    "an activation of one's own": lambda: deep(Sine),
    "parts that are used again": lambda: build_seeded(use_parts_again),
    "one hidden layer": lambda: build_seeded(lambda: nn.Sequential(nn.Linear(3, 7), nn.SiLU(), nn.Linear(7, 1))),
}


def general(net: nn.Module, params: Any, x: Tensor, dims: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """One backward pass of the score per variable."""
    return Density.scores_and_curvatures(Energy(net), params, x, dims)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dims", [None, [2, 0]], ids=str)
def test_the_same_as_derivatives_of_the_energy(name, dims):
    net, x = NETS[name](), draw(5, 3)
    params = ng.trainable(net)
    found, expected = Energy(net).scores_and_curvatures(params, x, dims), general(net, params, x, dims)
    for one, other in zip(found, expected, strict=True):
        assert_close(one.detach(), other.detach(), scale=1.0)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_loss_has_the_same_gradient(chunk_size):
    net, x = deep(nn.Softplus), draw(6, 3)
    params = ng.trainable(net)
    loss = ng.score_matching_loss(net, params, x, chunk_size=chunk_size)
    found = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    scores, curvatures = general(net, params, x)
    value = (0.5 * scores.square() + curvatures).sum(1).mean()
    expected = torch.autograd.grad(value, list(params.values()), materialize_grads=True)
    assert_close(loss.detach(), value.detach(), scale=1.0)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-11)


def test_second_derivatives_in_the_parameters_too():
    net, x = energy_net(), draw(4, 3)
    params = {name: p.detach() for name, p in ng.trainable(net).items()}

    def by(way: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        def value(weight: Tensor) -> Tensor:
            scores, curvatures = way(net, params | {"0.weight": weight}, x)
            return (0.5 * scores.square() + curvatures).sum()

        return torch.func.hessian(value)(params["0.weight"])

    assert_close(by(lambda n, p, y: Energy(n).scores_and_curvatures(p, y)), by(general), rtol=1e-11)


def tied_net() -> nn.Module:
    net: Any = deep()
    return nn.Sequential(net[1], net[2], nn.Linear(5, 3).double(), nn.Tanh(), net[1], nn.Linear(5, 1).double())


def with_hook() -> nn.Module:
    net: Any = energy_net()
    net[1].register_forward_hook(lambda module, args, output: 2 * output)
    return net


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "tied": tied_net,
    "hook": with_hook,
    "norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double(),
    "subclass": lambda: nn.Sequential(Doubled(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
    "in place": lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Linear(4, 1)).double(),
    "weight norm": lambda: nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)
    ).double(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_networks_that_are_no_chain_have_the_same_derivatives(name):
    net, x = UNKNOWN[name](), draw(4, 3)
    params = ng.trainable(net)
    assert_close(Energy(net).scores_and_curvatures(params, x)[1].detach(), general(net, params, x)[1].detach())
