"""Objectives of unnormalised models against the reference values, autodiff, closed forms and each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from boltzmann_states import RATIOS, boltzmann, weighted_states
from energies import VECTORS, energy_net, gaussian, gaussian_case, table, table_case, tensor, two_layers, vector_case
from models import F64, assert_close, draw
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.spaces import Space


def gradient(value: Tensor, params: dict[str, Tensor]) -> Tensor:
    found = torch.autograd.grad(value, list(params.values()), materialize_grads=True)  # a last bias is a constant
    return Space(params).flatten(dict(zip(params, found, strict=True)))


def plain_objective(log_p: Any, params: Any, x: Tensor) -> Tensor:
    """l of one example by torch.func, straight from its definition."""
    score = torch.func.grad(log_p, argnums=1)(params, x)
    hessian = torch.func.hessian(log_p, argnums=1)(params, x)
    return 0.5 * score.square().sum() + hessian.trace()


@pytest.mark.parametrize("name", ["score_matching_n3", "score_matching_n8"])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 100])
def test_score_matching_has_the_reference_values(name, chunk_size):
    params, x = vector_case(name)
    expected = VECTORS[name]["expected"]
    value = ng.score_matching_loss(two_layers, params, x, chunk_size=chunk_size)
    assert_close(value.detach(), tensor(expected["l"]).mean())
    assert_close(gradient(value, params), tensor(expected["grad"]).mean(0))


def test_score_matching_of_a_module_is_that_of_the_function():
    net, x = energy_net(), draw(4, 3)
    params = dict(ng.trainable(net))

    def log_p(given: Any, one: Tensor) -> Tensor:
        return -torch.func.functional_call(net, given, one.unsqueeze(0)).squeeze()

    expected = torch.stack([plain_objective(log_p, params, one) for one in x]).mean()
    value = ng.score_matching_loss(net, params, x)
    assert_close(value.detach(), expected.detach())
    assert_close(gradient(value, params), gradient(expected, params))


def test_score_matching_takes_images():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 1)).double()
    flat = nn.Sequential(nn.Unflatten(1, (1, 3, 3)), *net)
    x = draw(2, 1, 3, 3)
    images = ng.score_matching_loss(net, ng.trainable(net), x, chunk_size=4)
    assert_close(images.detach(), ng.score_matching_loss(flat, ng.trainable(flat), x.flatten(1)).detach())


def test_score_matching_under_transforms_is_a_function_of_the_parameters():
    params, x = vector_case("score_matching_n3")
    point = {name: p.detach() for name, p in params.items()}
    found = torch.func.grad(lambda p: ng.score_matching_loss(two_layers, p, x))(point)
    assert_close(Space(point).flatten(found), gradient(ng.score_matching_loss(two_layers, params, x), params))
    both = {name: torch.stack([p, 0.5 * p]) for name, p in point.items()}
    values = torch.func.vmap(lambda p: ng.score_matching_loss(two_layers, p, x))(both)
    assert_close(values[0], ng.score_matching_loss(two_layers, point, x))


def test_the_gaussian_optimum_is_the_precision_of_the_data():
    params, x = gaussian_case()
    assert gradient(ng.score_matching_loss(gaussian, params, x), params).abs().max() < 1e-12
    assert gradient(ng.score_matching_loss(gaussian, params, 2 * x), params).abs().max() > 0.1


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


@pytest.mark.parametrize("variance_reduced", [True, False])
@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True])])
def test_sliced_score_matching_is_unbiased(variance_reduced, mask):
    params, x = vector_case("score_matching_n3")
    expected = ng.score_matching_loss(two_layers, params, x, mask=mask).detach()
    options: Any = {"variance_reduced": variance_reduced, "mask": mask, "generator": torch.Generator().manual_seed(0)}
    draws = torch.stack(
        [ng.sliced_score_matching_loss(two_layers, params, x, slices=8, **options).detach() for _ in range(300)]
    )
    assert draws.std() > 0
    assert (draws.mean() - expected).abs() < 4 * draws.std() / len(draws) ** 0.5


def test_variance_reduction_reduces_variance():
    params, x = vector_case("score_matching_n8")

    def spread(variance_reduced: bool) -> Tensor:
        options: Any = {"variance_reduced": variance_reduced, "generator": torch.Generator().manual_seed(0)}
        values = [ng.sliced_score_matching_loss(two_layers, params, x, **options).detach() for _ in range(50)]
        return torch.stack(values).std()

    assert spread(True) < spread(False)


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


def test_ratio_matching_is_least_at_the_truth():
    params, x = table_case()
    assert gradient(ng.ratio_matching_loss(table, params, x), params).abs().max() < 1e-14
    assert torch.equal(ng.ratio_matching_loss(table, params, x), ng.ratio_matching_loss(table, params, x.int()))


def test_chunks_give_no_gradient_to_what_is_frozen():
    params, x = vector_case("score_matching_n3")
    params["V"].requires_grad_(False)
    ng.score_matching_loss(two_layers, params, x, chunk_size=2).backward()
    assert params["W"].grad is not None
    assert params["V"].grad is None
    with torch.no_grad():
        assert not ng.score_matching_loss(two_layers, params, x, chunk_size=2).requires_grad


@pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
def test_an_optimiser_finds_the_examples_of_the_loss(module):
    if module:
        log_p: Any = energy_net()
        params, x = dict(ng.trainable(log_p)), draw(6, 3)
    else:
        log_p, (params, x) = two_layers, vector_case("score_matching_n3")
    opt = ng.NaturalGradient(log_p if module else params, ng.score_metric(log_p), lr=0.1, damping=0.1)
    direct = ng.natural_gradient(
        ng.score_metric(log_p).at(params, x),
        gradient(ng.score_matching_loss(log_p, params, x), params),
        damping=0.1,
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
    "no x": (lambda: ng.score_matching_loss(ignore_inputs, PARAMS, X), ValueError, ("does not depend on x",)),
    "a vector back": (lambda: ng.score_matching_loss(lambda p, x: x, PARAMS, X), ValueError, ("log_p", "scalar")),
    "not a function": (lambda: ng.score_matching_loss(3, PARAMS, X), TypeError, ("log_p", "energies")),  # type: ignore[arg-type]
    "continuous ratios": (lambda: ng.ratio_matching_loss(table, PARAMS, X), ValueError, ("X", "0 and 1")),
    "signs": (lambda: ng.ratio_matching_loss(table, PARAMS, 2 * BITS - 1), ValueError, ("X", "map -1 to 0")),
    "mask": (lambda: ng.score_matching_loss(two_layers, PARAMS, X, mask=BITS[:2]), ValueError, ("mask", "(3,)")),
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


def test_denoising_welcomes_relu():
    assert torch.isfinite(ng.denoising_score_matching_loss(relu, PARAMS, X, noise=0.1))
