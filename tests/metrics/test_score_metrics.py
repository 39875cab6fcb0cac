"""The metrics of score matching and ratio matching against their definitions and their divergences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from energies import (
    VECTORS,
    boltzmann,
    gaussian,
    gaussian_case,
    table,
    table_case,
    two_layers,
    vector_case,
    weighted_states,
)
from models import F64, assert_close, draw, tensor
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.densities import Plain
from natgrad.testing import check_metric

EXPECTED = VECTORS["score_matching_n3"]["expected"]


def test_score_metric_has_the_reference_values():
    params, x = vector_case("score_matching_n3")
    operator = ng.score_metric(two_layers).at(params, x)
    assert_close(operator.dense(), tensor(EXPECTED["metric"]))
    root = operator.root()
    assert root is not None
    assert root.shape == (18, 9)
    assert_close(root @ root.mT, tensor(EXPECTED["metric"]))
    first = ng.score_metric(two_layers).at(params, x[:1]).root()
    assert first is not None
    assert_close(first.mT, tensor(EXPECTED["score_jacobian_first_sample"]))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"mask": torch.tensor([True, False, True])}], ids=str)
def test_score_metrics_are_sound(options):
    params, x = vector_case("score_matching_n3")
    scores = torch.func.vmap(torch.func.grad(two_layers, argnums=1), (None, 0))
    jacobian = torch.func.jacrev(lambda p: scores(p, x))({name: p.detach() for name, p in params.items()})
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], dim=2)
    rows = rows * options.get("mask", torch.ones(3)).view(1, -1, 1)
    check_metric(
        ng.score_metric(two_layers, **options), params, x, reference=torch.einsum("bik,bil->kl", rows, rows) / 3
    )


def test_a_mask_by_example_is_cut_with_its_examples():
    params, x = vector_case("score_matching_n3")
    mask = torch.tensor([[True, False, True], [False, True, True], [True, False, False]])
    whole = ng.score_metric(two_layers, mask=mask).at(params, x).dense()
    assert_close(ng.score_metric(two_layers, mask=mask, chunk_size=2).at(params, x).dense(), whole)
    table_params, bits = table_case()
    by_example = torch.arange(20).view(10, 2) % 3 > 0
    whole = ng.ratio_metric(table, mask=by_example).at(table_params, bits).dense()
    assert_close(ng.ratio_metric(table, mask=by_example, chunk_size=3).at(table_params, bits).dense(), whole)


def test_score_metric_is_the_hessian_of_the_loss_at_the_truth():
    params, x = gaussian_case()
    metric = ng.score_metric(gaussian).at(params, x).dense()
    point = params["A"].detach().flatten()
    hessian = torch.func.hessian(lambda a: ng.score_matching_loss(gaussian, {"A": a.view(3, 3)}, x))(point)
    assert_close(metric, hessian, rtol=1e-10)
    away = ng.score_metric(gaussian).at(params, 2 * x).dense()
    other = torch.func.hessian(lambda a: ng.score_matching_loss(gaussian, {"A": a.view(3, 3)}, 2 * x))(point)
    assert (away - other).abs().max() > 1


def test_sliced_metric_is_unbiased_and_has_a_small_root():
    params, x = vector_case("score_matching_n3")
    metric = ng.score_metric(two_layers, slices=2)
    draws = torch.stack([metric.at(params, x).dense() for _ in range(80)])
    root = metric.at(params, x).root()
    assert root is not None
    assert root.shape == (18, 6)
    standard = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - tensor(EXPECTED["metric"])).abs() < 4.5 * standard + 1e-12).all()


def test_products_of_chunks_are_those_of_one_matrix():
    """Whatever is drawn for it: directions, dropout masks."""
    params, x = vector_case("score_matching_n3")
    energy = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    cases = (
        ng.score_metric(two_layers, slices=2, chunk_size=2).at(params, x),
        ng.score_metric(energy, chunk_size=2).at(ng.trainable(energy), x),
        ng.ratio_metric(energy, chunk_size=2).at(ng.trainable(energy), (x > 0).double()),
    )
    for operator in cases:
        before = operator.dense()
        torch.rand(1)
        assert torch.equal(operator.dense(), before)


def test_langevin_draws_from_the_model():
    """From a point far off, the moments of the Gaussian with precision A^T A come out within their standard errors."""
    params, _ = gaussian_case()
    covariance = torch.linalg.inv(params["A"].detach().mT @ params["A"].detach())
    start = torch.full((4000, 3), 2.0, dtype=F64)
    generator = torch.Generator().manual_seed(0)
    x = ng.Langevin(steps=200, step=0.1).draw(Plain(gaussian), params, start, generator)
    assert (x.mean(0).abs() < 5 * (covariance.diagonal() / 4000).sqrt()).all()
    spread = ((covariance.square() + torch.outer(covariance.diagonal(), covariance.diagonal())) / 4000).sqrt()
    assert ((x.mT @ x / 4000 - covariance).abs() < 5 * spread).all()


def test_the_model_expectation_is_the_hessian_where_the_data_are_not_the_model():
    params, x = gaussian_case()
    exact = ng.score_metric(gaussian).at(params, x).dense()  # x has the model's moments
    far = (3 * x).repeat(400, 1)
    metric = ng.score_metric(gaussian, langevin=ng.Langevin(steps=100, step=0.1))
    found = metric.at(params, far).dense()
    assert (found - exact).norm() < 0.2 * exact.norm()
    assert (ng.score_metric(gaussian).at(params, far).dense() - exact).norm() > 5 * exact.norm()


def test_ratio_metric_has_the_reference_values():
    params = {"xi": tensor(VECTORS["ratio_matching"]["inputs"]["xi"]).requires_grad_()}
    operator = ng.ratio_metric(boltzmann).at(params, weighted_states())
    expected = VECTORS["ratio_matching"]["expected"]
    assert_close(operator.dense(), tensor(expected["metric_empirical"]))
    check_metric(ng.ratio_metric(boltzmann), params, weighted_states(), reference=tensor(expected["metric_empirical"]))
    gradient = torch.autograd.grad(ng.ratio_matching_loss(boltzmann, params, weighted_states()), params["xi"])[0]
    found = ng.natural_gradient(operator, gradient).value
    assert_close(found, tensor(expected["natural_gradient_empirical"]), rtol=1e-9)


def test_ratio_metric_is_the_hessian_of_the_loss_at_the_truth():
    params, x = table_case()
    metric = ng.ratio_metric(table).at(params, x).dense()
    hessian = torch.func.hessian(lambda t: ng.ratio_matching_loss(table, {"t": t}, x))(params["t"].detach())
    assert_close(metric, hessian, rtol=1e-12)

    def divergence(given: Any, other: Any, inputs: Tensor) -> Tensor:
        """Its own divergence: J of `other` on the states of `given`, less its least value."""
        return ng.ratio_matching_loss(table, other, inputs) - ng.ratio_matching_loss(table, given, inputs)

    assert_close(ng.divergence(divergence).at(params, x).dense(), metric, rtol=1e-12)
    options: Any = {"mask": torch.tensor([True, False])}
    check_metric(ng.ratio_metric(table, **options), params, x)
    assert_close(ng.ratio_metric(table, chunk_size=3).at(params, x).dense(), metric, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ng.score_metric(two_layers, slices=0), ("slices", ">= 1")),
        (lambda: ng.score_metric(two_layers, chunk_size=0), ("chunk_size", ">= 1")),
        (lambda: ng.Langevin(steps=0), ("steps", ">= 1")),
        (lambda: ng.Langevin(step=0.0), ("step", "> 0")),
        (lambda: ng.score_metric(two_layers).at(*bits()), ("X", "ratio_metric")),
        (lambda: ng.ratio_metric(two_layers).at(*vector_case("score_matching_n3")), ("X", "0 and 1")),
        (lambda: ng.score_metric(two_layers).at(vector_case("score_matching_n3")[0], draw(2, 5)), ("X", "(2, 5)")),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def bits() -> tuple[dict[str, Tensor], Tensor]:
    params, x = vector_case("score_matching_n3")
    return params, (x > 0).double()
