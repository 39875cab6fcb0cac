"""Objectives of unnormalised models against the reference values, autodiff, closed forms and each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from energies import (
    RATIOS,
    VECTORS,
    boltzmann,
    energy_net,
    gaussian,
    gaussian_case,
    table,
    two_layers,
    vector_case,
    weighted_states,
)
from models import F64, assert_close, draw, pair, tensor
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.spaces import Space


def gradient(value: Tensor, params: dict[str, Tensor]) -> Tensor:
    found = torch.autograd.grad(value, list(params.values()), materialize_grads=True)  # a last bias is a constant
    return Space(params).flatten(dict(zip(params, found, strict=True)))


@pytest.mark.parametrize("name", ["score_matching_n3", "score_matching_n8"])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 100])
def test_score_matching_has_the_reference_values(name, chunk_size):
    params, x = vector_case(name)
    expected = VECTORS[name]["expected"]
    value = ng.score_matching_loss(two_layers, params, x, chunk_size=chunk_size)
    assert_close(value.detach(), tensor(expected["l"]).mean())
    assert_close(gradient(value, params), tensor(expected["grad"]).mean(0))


def test_a_mask_leaves_the_conditional_objective():
    params, x = vector_case("score_matching_n8")
    mask = torch.tensor([True, False] * 4)
    scores = torch.func.vmap(torch.func.grad(two_layers, argnums=1), (None, 0))(params, x)
    hessians = torch.func.vmap(torch.func.hessian(two_layers, argnums=1), (None, 0))(params, x)
    entries = 0.5 * scores.square() + hessians.diagonal(dim1=1, dim2=2)
    expected = entries[:, mask].sum(1).mean().detach()
    for given in (mask, mask.expand(2, 8), mask.double()):
        assert_close(ng.score_matching_loss(two_layers, params, x, mask=given).detach(), expected)
    assert_close(ng.score_matching_loss(two_layers, params, x, mask=mask, chunk_size=3).detach(), expected)


LOSSES = {
    "whole": ng.score_matching_loss,
    "in chunks": partial(ng.score_matching_loss, chunk_size=2),
    "sliced": ng.sliced_score_matching_loss,
    "denoising": partial(ng.denoising_score_matching_loss, noise=0.3),
}
DENSITIES = {
    "a function": lambda: (two_layers, vector_case("score_matching_n3")[0]),
    "layers": lambda: (model := energy_net(), ng.trainable(model)),
    "other layers": lambda: (model := nn.Sequential(nn.LayerNorm(3), energy_net()).double(), ng.trainable(model)),
}


@pytest.mark.parametrize(("loss", "density"), [*pair(LOSSES, DENSITIES), ("in chunks", "other layers")])
def test_losses_are_differentiable_in_the_examples(loss, density):
    """What an encoder, or a scale of the data, in front of the density learns by."""
    log_p, params = DENSITIES[density]()

    def evaluate(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return LOSSES[loss](log_p, params, x)

    assert torch.autograd.gradcheck(evaluate, draw(3, 3).requires_grad_())


@pytest.mark.parametrize(("variance_reduced", "mask"), [(True, None), (False, torch.tensor([True, False, True]))])
def test_sliced_score_matching_is_unbiased(variance_reduced, mask):
    params, x = vector_case("score_matching_n3")
    expected = ng.score_matching_loss(two_layers, params, x, mask=mask).detach()
    options: Any = {"variance_reduced": variance_reduced, "mask": mask, "generator": torch.Generator().manual_seed(0)}
    draws = torch.stack(
        [ng.sliced_score_matching_loss(two_layers, params, x, slices=8, **options).detach() for _ in range(60)]
    )
    assert draws.std() > 0
    assert (draws.mean() - expected).abs() < 4 * draws.std() / len(draws) ** 0.5


def test_denoising_matches_the_blurred_data():
    """E of the objective is 1/2 E|s(x~) - s_blurred(x~)|^2 + const: its minimum is the blurred Gaussian's precision."""
    params, x = gaussian_case()
    noise = 0.5
    blurred = torch.linalg.inv(x.mT @ x / len(x) + noise**2 * torch.eye(3, dtype=F64))
    point = {"A": torch.linalg.cholesky(blurred).mT.contiguous().requires_grad_()}
    many = x.repeat(4000, 1)
    draws = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        value = ng.denoising_score_matching_loss(gaussian, point, many, noise=noise, generator=generator)
        draws.append(gradient(value, point))
    slopes = torch.stack(draws)
    assert ((slopes.mean(0)).abs() < 4 * slopes.std(0) / len(draws) ** 0.5 + 1e-12).all()
    away = ng.denoising_score_matching_loss(gaussian, params, many, noise=noise)
    assert gradient(away, params).norm() > 10 * slopes.std(0).norm()


def test_denoising_with_a_level_per_example_and_scaling():
    params, x = vector_case("score_matching_n3")
    levels = tensor([0.1, 0.2, 0.5])
    alone = [
        ng.denoising_score_matching_loss(
            two_layers, params, x, noise=float(s), scaled=True, generator=torch.Generator().manual_seed(1)
        )
        for s in levels
    ]
    z = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    noisy = x + levels.view(-1, 1) * z
    scores = torch.func.vmap(torch.func.grad(two_layers, argnums=1), (None, 0))(params, noisy)
    expected = 0.5 * (levels.view(-1, 1) * scores + z).square().sum(1).mean()
    found = ng.denoising_score_matching_loss(
        two_layers, params, x, noise=levels, scaled=True, generator=torch.Generator().manual_seed(1)
    )
    assert_close(found.detach(), expected.detach())
    assert len({round(float(value.detach()), 9) for value in alone}) == 3


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_ratio_matching_has_the_reference_values(chunk_size):
    params = {"xi": tensor(RATIOS["inputs"]["xi"]).requires_grad_()}
    value = ng.ratio_matching_loss(boltzmann, params, weighted_states(), chunk_size=chunk_size)
    assert_close(value.detach(), tensor(RATIOS["expected"]["J_RM"]))
    assert_close(gradient(value, params), tensor(RATIOS["expected"]["grad"]))


@pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
def test_an_optimiser_finds_the_examples_of_the_loss(module):
    if module:
        log_p: Any = energy_net()
        params, x = dict(ng.trainable(log_p)), draw(6, 3)
    else:
        log_p, (params, x) = two_layers, vector_case("score_matching_n3")
    opt = ng.NaturalGradient(log_p if module else params, ng.score_metric(log_p), lr=0.1, damping=0.1)
    direct = ng.natural_gradient(
        ng.score_metric(log_p).at(params, x), gradient(ng.score_matching_loss(log_p, params, x), params), damping=0.1
    ).value
    before = Space(params).flatten({name: p.detach().clone() for name, p in params.items()})
    ng.score_matching_loss(log_p, params, x).backward()
    ng.score_matching_loss(log_p, params, 2 * x)  # a loss that does not go backward is not heard
    opt.step()
    moved = Space(params).flatten({name: p.detach() for name, p in params.items()}) - before
    assert_close(moved, -0.1 * direct, rtol=1e-6)
    opt.zero_grad()
    for p in params.values():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="observe"):
        opt.step()


PARAMS, X = vector_case("score_matching_n3")
BITS = (X > 0).double()


def relu(params: Any, x: Tensor) -> Tensor:
    return (params["W"] @ x).relu().sum()


def ignore_inputs(params: Any, x: Tensor) -> Tensor:
    return params["W"].sum() + 0 * x.sum()


def differentiate(params: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(two_layers(params, x), x)[0].sum()


WRONG: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "wrong dimension": (lambda: ng.score_matching_loss(two_layers, PARAMS, X[:, :2]), ValueError, ("X", "(3, 2)")),
    "one example": (lambda: ng.score_matching_loss(two_layers, PARAMS, X[0]), ValueError, ("X", "unsqueeze(0)")),
    "no example": (lambda: ng.score_matching_loss(two_layers, PARAMS, X[:0]), ValueError, ("X", "empty")),
    "not a tensor": (lambda: ng.score_matching_loss(two_layers, PARAMS, [[1.0]]), ValueError, ("X", "list")),  # type: ignore[arg-type]
    "NaN": (lambda: ng.score_matching_loss(two_layers, PARAMS, X * float("nan")), ValueError, ("X", "NaN")),
    "bits": (lambda: ng.score_matching_loss(two_layers, PARAMS, BITS), ValueError, ("X", "ratio_matching_loss")),
    "integers": (lambda: ng.score_matching_loss(two_layers, PARAMS, X.long()), ValueError, ("X", "floating")),
    "ReLU": (lambda: ng.score_matching_loss(relu, PARAMS, X), ValueError, ("second derivatives", "Softplus")),
    "ReLU, sliced": (lambda: ng.sliced_score_matching_loss(relu, PARAMS, X), ValueError, ("second", "Softplus")),
    "autograd": (lambda: ng.score_matching_loss(differentiate, PARAMS, X), ValueError, ("by torch.func.grad",)),
    "no x": (lambda: ng.score_matching_loss(ignore_inputs, PARAMS, X), ValueError, ("does not depend on x",)),
    "a vector back": (lambda: ng.score_matching_loss(lambda p, x: x, PARAMS, X), ValueError, ("log_p", "scalar")),
    "not a function": (lambda: ng.score_matching_loss(3, PARAMS, X), TypeError, ("log_p", "energies")),  # type: ignore[arg-type]
    "continuous ratios": (lambda: ng.ratio_matching_loss(table, PARAMS, X), ValueError, ("X", "0 and 1")),
    "signs": (lambda: ng.ratio_matching_loss(table, PARAMS, 2 * BITS - 1), ValueError, ("X", "map -1 to 0")),
    "mask": (lambda: ng.score_matching_loss(two_layers, PARAMS, X, mask=BITS[:2]), ValueError, ("mask", "(3,)")),
    "short mask": (
        lambda: ng.score_matching_loss(two_layers, PARAMS, X, mask=BITS[0, :2]),
        ValueError,
        ("(2,)", "(3,)"),
    ),
    "no mask": (lambda: ng.score_matching_loss(two_layers, PARAMS, X, mask=[1, 0, 1]), ValueError, ("mask", "list")),  # type: ignore[arg-type]
    "empty mask": (lambda: ng.score_matching_loss(two_layers, PARAMS, X, mask=0 * BITS), ValueError, ("mask", "True")),
    "chunk": (lambda: ng.score_matching_loss(two_layers, PARAMS, X, chunk_size=0), ValueError, ("chunk_size",)),
    "slices": (lambda: ng.sliced_score_matching_loss(two_layers, PARAMS, X, slices=0), ValueError, ("slices",)),
    "noise": (lambda: ng.denoising_score_matching_loss(two_layers, PARAMS, X, noise=0.0), ValueError, ("noise", "> 0")),
    "params": (lambda: ng.score_matching_loss(two_layers, [X], X), TypeError, ("params", "dict")),  # type: ignore[arg-type]
    "batch norm": (
        lambda: ng.score_matching_loss(NORMED, ng.trainable(NORMED), X),
        ValueError,
        ("batch norm", "eval()"),
    ),
    "energies": (lambda: ng.score_matching_loss(WIDE, ng.trainable(WIDE), X), ValueError, ("energy", "(3, 2)")),
}
NORMED = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
WIDE = nn.Linear(3, 2).double()


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_what_is_wrong(name):
    call, kind, words = WRONG[name]
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
