"""The Gauss-Markov field: closed forms, the optimum of score matching, and one natural step to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import F64, draw
from models import assert_close as close
from torch import Tensor
from torch.distributions import MultivariateNormal

import natgrad as ng
from natgrad.energies.gauss_markov import GaussMarkov
from natgrad.ground.densities import Density, Plain
from natgrad.testing import check_metric

FIELD = GaussMarkov(4, [(0, 1), (1, 2), (2, 3), (0, 3)])


def assert_close(found: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    close(found.detach(), expected.detach(), rtol)


def condition_precision(field: GaussMarkov, lowest: float) -> dict[str, Tensor]:
    """The graph's Laplacian plus lowest I: the condition number is about the largest degree twice over lowest."""
    matrix = torch.zeros(field.size, field.size, dtype=F64)
    for i, j in field.edges:
        matrix[[i, j], [j, i]] = -1
    return field.parameters(torch.diag(lowest - matrix.sum(1)) + matrix)


def quadratic(params: Any, x: Tensor) -> Tensor:
    return -0.5 * x @ FIELD.precision(params) @ x


def test_closed_forms_are_those_of_log_p():
    params, x, plain = condition_precision(FIELD, 0.5), draw(5, 4), Plain(quadratic)
    assert_close(FIELD.log_p(params, x), plain.log_p(params, x))
    assert_close(FIELD.scores(params, x), plain.scores(params, x))
    for dims in (None, [3, 1]):
        for found, expected in zip(
            FIELD.scores_and_curvatures(params, x, dims),
            Density.scores_and_curvatures(plain, params, x, dims),
            strict=True,
        ):
            assert_close(found, expected)
    assert_close(ng.score_matching_loss(FIELD, params, x), ng.score_matching_loss(quadratic, params, x))
    expected = ng.score_metric(quadratic).at(params, x).dense()
    check_metric(ng.score_metric(FIELD), params, x, reference=expected)
    turned = {name: params[name] for name in ("edges", "diagonal")}
    assert_close(ng.score_metric(FIELD).at(turned, x).dense(), ng.score_metric(quadratic).at(turned, x).dense())


def test_constant_and_divergence_are_those_of_the_normal_distribution():
    params, other, x = condition_precision(FIELD, 0.5), condition_precision(FIELD, 2.0), draw(5, 4)
    p, q = (
        MultivariateNormal(torch.zeros(4, dtype=F64), precision_matrix=FIELD.precision(given).detach())
        for given in (params, other)
    )
    assert_close(FIELD.log_p(params, x) - FIELD.log_partition(params), p.log_prob(x))
    assert_close(FIELD.kl(params, other), torch.distributions.kl_divergence(p, q))


@pytest.mark.parametrize("start", [0.1, 1.0, 30.0])
def test_one_natural_step_ends_at_the_optimum(start):
    field = GaussMarkov(9, ng.vmc.square_edges(3, 3, periodic=False))
    truth = condition_precision(field, 0.01)
    x = field.sample(truth, 400, generator=torch.Generator().manual_seed(0))
    params = condition_precision(field, start)
    opt = ng.NaturalGradient(params, ng.score_metric(field), lr=1.0, damping=0.0)
    ng.score_matching_loss(field, params, x).backward()
    opt.step()
    best = field.fit(x)
    for name in params:
        assert_close(params[name], best[name], rtol=1e-8)
    params = {name: value.detach().clone().requires_grad_() for name, value in best.items()}
    gradient = torch.autograd.grad(ng.score_matching_loss(field, params, x), list(params.values()))
    assert max(part.abs().max() for part in gradient) < 1e-11


def test_draws_have_the_covariance():
    params, count = condition_precision(FIELD, 0.5), 40_000
    x = FIELD.sample(params, count, generator=torch.Generator().manual_seed(0))
    covariance = torch.linalg.inv(FIELD.precision(params).detach())
    variances = covariance.diagonal()
    spread = ((covariance.square() + torch.outer(variances, variances)) / count).sqrt()
    assert ((x.mT @ x / count - covariance).abs() < 4.5 * spread).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: GaussMarkov(0, []), ("size", ">= 1")),
        (lambda: GaussMarkov(3, [(0, 3)]), ("(0, 3)", "0 to 2")),
        (lambda: GaussMarkov(3, [(1, 1)]), ("(1, 1)", "different")),
        (lambda: GaussMarkov(3, [(0, 1), (1, 0)]), ("twice", "once")),
        (lambda: FIELD.parameters(torch.eye(3)), ("precision", "(4, 4)")),
        (lambda: FIELD.scores({"diagonal": torch.ones(4)}, torch.ones(2, 4)), ("edges", "(4,)")),
        (lambda: FIELD.fit(torch.randn(1, 4)), ("1 examples", "undetermined")),
        (lambda: FIELD.fit(torch.ones(2, 4, dtype=torch.long)), ("int64", "floating")),
        (lambda: FIELD.sample(FIELD.parameters(-torch.eye(4)), 2), ("positive definite",)),
        (lambda: FIELD.kl(FIELD.parameters(), FIELD.parameters(-torch.eye(4))), ("positive definite",)),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_data_whose_mean_is_not_zero_are_refused():
    field = GaussMarkov(3, [(0, 1), (1, 2), (0, 2)])
    x = draw(2000, 3)
    with pytest.raises(ValueError, match=r"X\[:, 1\] has the mean .*X - X.mean\(0\)"):
        field.fit(x + torch.tensor([0.0, 2.0, 2.0]))
    centred = x - x.mean(0)
    precision = field.precision(field.fit(centred))
    assert_close(precision, torch.linalg.inv(centred.mT @ centred / len(x)), rtol=1e-10)
